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

from torch import Tensor

__all__ = ["TurnedRows", "blocks_of", "turned_weight_grads"]


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
