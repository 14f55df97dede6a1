"""Which kernels compute the products of a batch-invariant layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_fluid.kernels.fixed_tiles.launch import FixedTiles
from megatron_fluid.kernels.grouped_gemm.launch import can_send
from megatron_fluid.kernels.grouped_gemm.stacks import ReversedStack

__all__ = ["fixed_tiles"]


def fixed_tiles(weights: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """El matrices [in, out] as an operand of grouped_matmul that gives a row the same bits in any
    batch: what the kernels for Hopper take as it is, since no tile changes the order of their sums;
    others as FixedTiles."""
    stack = weights.stack if isinstance(weights, ReversedStack) else weights
    if isinstance(stack, Tensor) and can_send(stack.new_empty(1, stack.shape[1]), stack):
        return weights
    return FixedTiles(weights)
