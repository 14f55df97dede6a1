"""Megatron's routing maps as the transports take them: the chosen experts of each token, and their
probabilities.

Shapes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_count", "chosen_of", "kept_choices"]


def chosen_of(
    probs: Tensor, routing_map: Tensor, top_k: int, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The choices of maps [T, E], at most top_k of a token: by a kernel on a GPU, else by torch.
    Differentiable in probs.

    Args:
        columns: the experts in the order in which ranks keep them, None for their own. [E]

    Returns:
        (indices in that order, ascending, -1 where a token has fewer [T, K]; fp32 probs [T, K],
        fp64 ones stay)
    """
    if probs.is_cuda:
        from megatron_fluid.moe.fused_router import chosen_of as by_kernel

        return by_kernel(probs, routing_map, top_k, columns)
    if columns is not None:
        probs, routing_map = probs.index_select(1, columns), routing_map.index_select(1, columns)
    # Stable: the chosen experts in ascending order, then the others.
    kept, ids = routing_map.int().sort(dim=1, descending=True, stable=True)
    kept, ids = kept[:, :top_k], ids[:, :top_k]
    chosen = probs.gather(1, ids)
    wide = torch.promote_types(chosen.dtype, torch.float32)
    return torch.where(kept != 0, ids, -1), chosen.to(wide)


def kept_choices(routing_map: Tensor, probs: Tensor) -> Tensor:
    """A routing map that Megatron has padded to the experts' capacity, bool [T, E], without the
    padding: choices of probability 0, which contribute nothing to a result or a gradient."""
    return routing_map & (probs.detach() != 0)


def check_count(routing_map: Tensor, top_k: int) -> None:
    """Refuse maps [T, E] of a router that is not Megatron's, with more experts of a token than the
    top_k that `chosen_of` has room for. The host does not wait for a GPU.

    Raises:
        RuntimeError: on a CPU; on a GPU an assertion fails there.
    """
    text = f"a router that is not Megatron's chose more experts than moe_router_topk={top_k}"
    torch._assert_async((routing_map.sum(dim=1) <= top_k).all(), text)
