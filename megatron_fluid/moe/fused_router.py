"""Top-k and softmax of a router by one kernel; the same backward.

Fine-grained layers take less than a millisecond, of which a router of a dozen small operations
would be a third.

Shapes: T tokens, E experts, K top-k, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.autograd import apply, once_differentiable
from megatron_fluid.cuda.triton_launch import Launch, power_of_two
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.routing_plan.topk_router import (
    chosen_backward_kernel,
    chosen_kernel,
    topk_softmax_backward_kernel,
    topk_softmax_kernel,
)

__all__ = ["chosen_of", "topk_softmax"]

_launches: dict[tuple[object, ...], tuple[Launch, int]] = {}


def _tokens(experts: int) -> int:
    """Of one program: 8 logits a thread, so that the K searches over them, one after the other, are
    short."""
    return max(1, min(16, 1024 // max(2, power_of_two(experts))))


def _start(
    kernel: Any,
    key: tuple[object, ...],
    shape: tuple[int, int, int],
    *tensors: Tensor,
    **extra: bool,
) -> None:
    tokens, experts, top_k = shape
    if not tokens:
        return
    # A kernel itself is hashed by its source, under a lock.
    whole = (id(kernel), tensors[0].get_device(), experts, top_k, *key)
    found = _launches.get(whole)
    if found is None:
        padded, block = [max(2, power_of_two(n)) for n in (experts, top_k)], _tokens(experts)
        constants = {"E": experts, "EP": padded[0], "K": top_k, "KP": padded[1]}
        launch = Launch(kernel, 4, {**constants, **extra, "BT": block})
        found = _launches[whole] = launch, block
    launch, block = found
    launch((-(-tokens // block), 1), (*tensors, tokens))


def _choose(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    probs = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    _start(topk_softmax_kernel, (), (tokens, experts, top_k), logits.contiguous(), ids, probs)
    return ids, probs


class _TopkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        ids, probs = _choose(logits, top_k)
        ctx.save_for_backward(ids, probs)
        ctx.shape = (logits.shape[1], top_k)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # else zeros are made for ids
        return ids, probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        ids, probs = ctx.saved_tensors
        experts, top_k = ctx.shape
        out = torch.empty(ids.shape[0], experts, dtype=torch.float32, device=ids.device)
        shape = (ids.shape[0], experts, top_k)
        _start(topk_softmax_backward_kernel, (), shape, ids, probs, grad.contiguous(), out)
        return out, None


def topk_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, K], probs fp32 [T, K]): the K largest of fp32 logits [T, E], best first, and
    the softmax over them.

    Differentiable in logits. Raises ConfigError where top_k or the dtype does not fit.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ConfigError.of("top_k", top_k, f"1 to {logits.shape[-1]} experts")
    if logits.dtype != torch.float32:
        raise ConfigError.of("dtype of the logits", logits.dtype, "float32")
    # Where nothing is differentiated, a Function only takes time.
    if torch.is_grad_enabled() and logits.requires_grad:
        return apply(_TopkSoftmax, logits, top_k)
    return _choose(logits, top_k)


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, routing_map: Tensor, top_k: int, columns: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = routing_map.shape
        routing_map = routing_map.contiguous().view(torch.uint8)
        ids = torch.empty(tokens, top_k, dtype=torch.int32, device=probs.device)
        picked = torch.empty(tokens, top_k, dtype=torch.float32, device=probs.device)
        probs = probs.contiguous()
        order = ids if columns is None else columns
        key = (probs.dtype, None if columns is None else columns.dtype)
        ctx.call = key, shape = (key, (tokens, experts, top_k))
        ctx.extra = extra = {"HAS_COLUMNS": columns is not None}
        _start(chosen_kernel, key, shape, probs, routing_map, order, ids, picked, **extra)
        ctx.save_for_backward(routing_map, order)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        return ids, picked

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        routing_map, order = ctx.saved_tensors
        out = torch.empty(routing_map.shape, dtype=ctx.call[0][0], device=grad.device)
        tensors = (grad.contiguous(), routing_map, order, out)
        key, shape = ctx.call
        _start(chosen_backward_kernel, key, shape, *tensors, **ctx.extra)
        return out, None, None, None


def chosen_of(
    probs: Tensor, routing_map: Tensor, top_k: int, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Megatron's probs [T, E] and routing_map bool [T, E] as (ids int32 [T, K], probs fp32 [T, K]).

    Experts in ascending order, then -1 with probability 0 where a token has fewer than K; of more,
    the first K. With `columns` [E], ids are indices into it: the order in which ranks keep their
    experts. Differentiable in probs.
    """
    return apply(_Chosen, probs, routing_map, top_k, columns)
