"""Weight gradients of every expert from fp8 operands, with the scales of both.

The sum of a weight gradient runs along an expert's rows, so a scale is for 128 of these, and both
operands are turned: their rows are features, and what is contiguous are the tokens.

Shapes: N expert rows, El local experts, A and B features of the two operands, P places. An expert's
rows take the next places from a multiple of 128 on, in their order; the places behind its last row,
up to the next multiple, hold zeros. `blocks_of` counts the blocks of 128 places.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.kernels.grouped_gemm import host_ends

__all__ = [
    "TurnedRows",
    "add_fp8_weight_grads",
    "blocks_of",
    "fp8_weight_grads",
    "turned_weight_grads",
]


class TurnedRows(NamedTuple):
    """Expert rows in e4m3, turned: feature f of the row at place p is values[f, p] * scales[p //
    128, f].

    Attributes:
        values: e4m3 [W, P], dense
        scales: fp32 [P / 128, W], dense
    """

    values: Tensor
    scales: Tensor


def blocks_of(rows: int, experts: int) -> int:
    """The most blocks of 128 places that so many rows of so many experts take."""
    return (rows + 127 * min(rows, experts)) // 128


def turned_weight_grads(left: TurnedRows, right: TurnedRows, ends: Sequence[int]) -> Tensor:
    """The reference in plain torch: sum over the rows of e of left[:, n] right[:, n], fp32 [El, A,
    B], zero for an expert without rows. ends: where each expert's rows end."""
    features = left.values.shape[0], right.values.shape[0]
    out = left.scales.new_zeros((len(ends), *features))
    block = 0
    for expert, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        for _ in range(-(-(end - start) // 128)):
            at = slice(128 * block, 128 * block + 128)
            part = left.values[:, at].float() @ right.values[:, at].float().t()
            out[expert] += part * (left.scales[block, :, None] * right.scales[block, None, :])
            block += 1
    return out


def fp8_weight_grads(
    left: TurnedRows,
    right: TurnedRows,
    offsets: Tensor,
    ends: Sequence[int] | None = None,
    programs: int | None = None,
) -> Tensor:
    """The weight gradients in bf16 [El, A, B], zero for an expert without rows.

    offsets: int32 [El] on the device; the rows of expert e end at offsets[e]. ends: the offsets on
    the host, for tensors on a CPU. programs: upper bound on the SMs; None means all.
    """
    return turned_weight_grads(left, right, host_ends(offsets, ends)).to(torch.bfloat16)


def add_fp8_weight_grads(
    left: TurnedRows,
    right: TurnedRows,
    offsets: Tensor,
    addresses: Tensor,
    outputs: Tensor | Sequence[Tensor],
    ends: Sequence[int] | None = None,
    programs: int | None = None,
) -> None:
    """Add the weight gradients to El dense fp32 matrices [A, B].

    addresses: int64 [El] on the device, where the outputs begin.
    """
    found = turned_weight_grads(left, right, host_ends(offsets, ends))
    for output, gradient in zip(outputs, found, strict=True):
        output += gradient
