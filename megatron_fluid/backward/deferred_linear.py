"""A linear layer whose weight gradient may wait for the next exchange (routers, attention
projections)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.autograd import (
    Readiness,
    apply,
    once_differentiable,
    readiness_of,
    weights_wanted,
)
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.kernels.fixed_tiles.launch import fixed_tile_linear

__all__ = ["deferred_linear", "graph_anchor"]


def graph_anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires a gradient: as an input it keeps a Function in the graph whose
    weights are not, and says whether the gradients of leaves are wanted.
    """
    return torch.empty(0, device=device, requires_grad=True)


def _weight_grad(grad_output: Tensor, x: Tensor) -> Tensor:
    """dW [out, in] of y = x @ W.T from dy [..., out] and x [..., in]."""
    return grad_output.reshape(-1, grad_output.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class _Deferred:
    """A weight that is no input of autograd. It must not be one: its hooks would fire for the
    gradient that is missing from this Function's backward, and again for the one that the scheduler
    delivers."""

    weight: Tensor
    scheduler: WeightGradScheduler
    name: str
    ready: Readiness


def _product(x: Tensor, weight: Tensor, wide: bool, fixed_tiles: bool) -> Tensor:
    if fixed_tiles:
        return fixed_tile_linear(x, weight, torch.float32 if wide else None)
    if not wide:
        return torch.nn.functional.linear(x, weight)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


class _Linear(torch.autograd.Function):
    """Inputs: x, the weight or None where its gradient is deferred, an anchor then, and what the
    scheduler is told; whether the result is in fp32; whether tiles are fixed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, anchor: Tensor | None,
        deferred: _Deferred | None, wide: bool, fixed_tiles: bool,
    ) -> Tensor:  # fmt: skip
        if deferred is not None:
            weight = deferred.weight.detach()
            deferred.ready.enter(ctx)
        assert weight is not None
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.anchor = deferred, -1
        return _product(x, weight, wide, fixed_tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if (deferred := ctx.deferred) is None:
            grad_weight = _weight_grad(grad, x) if ctx.needs_input_grad[1] else None
            return grad_x, grad_weight, None, None, None, None
        if weights_wanted(ctx.next_functions[ctx.anchor]):
            deferred.scheduler.submit(
                deferred.name, [deferred.weight], lambda: [_weight_grad(grad, x)]
            )
            deferred.ready.leave(ctx)
        return grad_x, None, None, None, None, None


def deferred_linear(
    x: Tensor,
    weight: Tensor,
    name: str = "linear",
    scheduler: WeightGradScheduler | None = None,
    wide: bool = False,
    fixed_tiles: bool = False,
) -> Tensor:
    """`torch.nn.functional.linear`, with the weight's gradient deferred while the scheduler is
    enabled.

    Args:
        x: [..., in]
        weight: [out, in]; a leaf of the graph, else its gradient is not deferred.
        name: for errors.
        scheduler: None takes the process-wide one.
        wide: x [T, in] and weight of 16 bits give a result in fp32, summed in fp32; gradients are
            computed from its gradient in their dtype. Not under autocast.
        fixed_tiles: a row's result has the same bits whatever the other rows are.
    """
    if fixed_tiles and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return deferred_linear(x, weight, name, scheduler, wide, fixed_tiles)
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return _product(x, weight, wide, fixed_tiles)
    # A weight that is computed from others (a cast, a reshape) stays an ordinary input of autograd,
    # which alone knows how to go on from it.
    leaf = weight.is_leaf and weight.requires_grad
    if scheduler.is_enabled() and leaf and not torch.is_autocast_enabled(x.device.type):
        ready = readiness_of([weight])
        if ready.bypass:
            deferred = _Deferred(weight, scheduler, name, ready)
            return apply(_Linear, x, None, graph_anchor(x.device), deferred, wide, fixed_tiles)
    if wide or fixed_tiles:
        return apply(_Linear, x, weight, None, None, wide, fixed_tiles)
    return _product(x, weight, wide, fixed_tiles)
