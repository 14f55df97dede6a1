"""A linear layer whose weight gradient may wait for the next exchange (routers, attention
projections)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.functions import goes_on_to, once_differentiable
from megatron_fluid.backward.readiness import Readiness, readiness_of
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler

__all__ = ["can_defer", "deferred_linear", "graph_anchor", "linear_weight_grad"]


def can_defer(weight: Tensor, scheduler: WeightGradScheduler) -> Readiness | None:
    """How the gradient of `weight` is counted where it may be deferred now: the scheduler is on,
    and it is a leaf being trained. None where it may not.

    A weight that is computed from others (a cast, a reshape) stays an ordinary input of autograd,
    which alone knows how to go on from it.
    """
    trained = weight.is_leaf and weight.requires_grad
    if not (scheduler.is_enabled() and trained and torch.is_grad_enabled()):
        return None
    ready = readiness_of([weight])
    return ready if ready.bypass else None


def graph_anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires a gradient: as an input it keeps a Function in the graph whose
    weights are not, and says whether the gradients of leaves are wanted.
    """
    return torch.empty(0, device=device, requires_grad=True)


def linear_weight_grad(grad_output: Tensor, x: Tensor) -> Tensor:
    """dW [out, in] of y = x @ W.T from dy [..., out] and x [..., in]."""
    return grad_output.reshape(-1, grad_output.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class _Call:
    """What is no input of autograd. The weight must not be one: its hooks would fire for the
    gradient that is missing from this Function's backward, and again for the one that the scheduler
    delivers."""

    weight: Tensor
    scheduler: WeightGradScheduler
    name: str
    ready: Readiness


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor, call: _Call) -> Tensor:
        weight = call.weight.detach()
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.anchor = call, -1
        call.ready.enter(ctx)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_output @ weight if ctx.needs_input_grad[0] else None
        flat, call = grad_output.reshape(-1, grad_output.shape[-1]), ctx.call
        grad_bias = flat.sum(0) if ctx.needs_input_grad[1] else None
        if goes_on_to(ctx.next_functions[ctx.anchor]):
            weights = [call.weight]
            call.scheduler.submit(call.name, weights, lambda: [linear_weight_grad(flat, x)])
            call.ready.leave(ctx)
        return grad_x, grad_bias, None, None


def deferred_linear(
    x: Tensor,
    weight: Tensor,
    name: str = "linear",
    bias: Tensor | None = None,
    scheduler: WeightGradScheduler | None = None,
) -> Tensor:
    """`torch.nn.functional.linear`, with the weight's gradient deferred while the scheduler is
    enabled.

    Args:
        x: [..., in]
        weight: [out, in]; a leaf of the graph, else its gradient is not deferred.
        name: for errors.
        bias: [out] or None; its gradient is never deferred.
        scheduler: None takes the process-wide one.
    """
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    ready = can_defer(weight, scheduler)
    if ready is None or torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight, bias)
    call = _Call(weight, scheduler, name, ready)
    return _DeferredLinear.apply(x, bias, graph_anchor(x.device), call)
