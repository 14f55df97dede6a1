"""Weight gradients of fp8 experts in fp8: both operands are turned to scales along their rows
(kernels/fp8_casts) when the gradient is computed, and multiplied (kernels/fp8_weight_grads).

    dW2 = turned dy x turned a,   dW1 = turned dh x turned x

The counterparts of weight_grads and add_to_main_grads of moe/experts.py, for rows of one or of
several segments.

Legend: N rows (sorted by expert), El experts, A and B widths of a weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fluid.kernels.fp8_casts.launch import cast_rows
from megatron_fluid.kernels.fp8_casts.turns import turn_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    fp8_weight_grads,
)
from megatron_fluid.kernels.grouped_gemm.launch import takes_main_grads
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from megatron_fluid.moe.experts import Rows

__all__ = ["add_to_main_grads", "cast_segment", "weight_grads"]

# Of one segment: gradient of the projection's output, its input. [N, out], [N, in]
type _Pair = tuple[Rows, Rows]


def weight_grads(
    fc: ExpertWeights, pairs: Sequence[_Pair], groups: Sequence[RowGroups]
) -> list[Tensor]:
    """dW of one projection in bf16, zero for an expert without rows.

    Args:
        fc: the projection.
        pairs: of each segment the gradient of its output [N, out] and its input [N, in]; rows that
            are not in fp8 are cast.
        groups: the rows of each expert, of each segment.

    Returns:
        One tensor for each of fc.params.
    """
    return fc.as_gradients(_gradient(fc, pairs, groups))


def add_to_main_grads(
    fc: ExpertWeights, pairs: Sequence[_Pair], groups: Sequence[RowGroups]
) -> None:
    """Add dW of one projection to the main_grads of its parameters, or write it there where
    Megatron asks for that. Arguments as for weight_grads.

    main_grads that the kernel does not take, in another precision than fp32 or strided, are added
    to by torch: dW is then rounded to bf16 before.
    """
    grads, found = fc.kernel_grads(takes_main_grads)
    overwrite = fc.overwrites_main_grads()
    if found.fit:
        _add(fc, pairs, groups, found.addresses, grads, overwrite)
        return
    for grad, gradient in zip(grads, _gradient(fc, pairs, groups), strict=True):
        if overwrite:
            grad.copy_(gradient)
        else:
            grad += gradient


def _gradient(fc: ExpertWeights, pairs: Sequence[_Pair], groups: Sequence[RowGroups]) -> Tensor:
    """dW of all experts in bf16, in the layout of the weights. [El, A, B]"""
    if len(pairs) == 1 and _rows(pairs[0]):
        return fp8_weight_grads(*_turned(fc, *pairs[0], groups[0]))
    # Of several segments in fp32, rounded once.
    shape = (fc.out_width, fc.in_width)
    shape = shape[::-1] if fc.layout == "in_out" else shape
    device = groups[0].offsets.device
    out = torch.empty((fc.num_experts, *shape), dtype=torch.float32, device=device)
    begins = [matrix.data_ptr() for matrix in out]
    _add(fc, pairs, groups, torch.tensor(begins, device=device), out, overwrite=True)
    return out.to(torch.bfloat16)


def _add(
    fc: ExpertWeights, pairs: Sequence[_Pair], groups: Sequence[RowGroups], addresses: Tensor,
    outputs: Tensor | Sequence[Tensor], overwrite: bool,
) -> None:  # fmt: skip
    """Add dW to fp32 outputs, or with `overwrite` write it there."""
    for pair, own in zip(pairs, groups, strict=True):
        if _rows(pair):
            left, right, offsets, ends = _turned(fc, *pair, own)
            given = left, right, offsets, addresses, outputs, ends
            add_fp8_weight_grads(*given, overwrite=overwrite)
            overwrite = False
    if overwrite:  # no row at all
        for output in outputs:
            output.zero_()


def _rows(pair: _Pair) -> int:
    """How many rows have room in the tensors."""
    dy = pair[0]
    return (dy.values if isinstance(dy, Fp8Rows) else dy).shape[0]


def _turned(
    fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups
) -> tuple[TurnedRows, TurnedRows, Tensor, Sequence[int] | None]:
    """Both operands in the order of the weights' layout, and the rows of each expert."""
    left, right = (x, dy) if fc.layout == "in_out" else (dy, x)
    return _turn(left, groups), _turn(right, groups), groups.offsets, groups.ends


def cast_segment(rows: Rows, groups: RowGroups) -> Fp8Rows:
    """rows [N, H] in fp8, where they are not yet."""
    if isinstance(rows, Fp8Rows):
        return rows
    return cast_rows(rows.contiguous(), groups.count)


def _turn(rows: Rows, groups: RowGroups) -> TurnedRows:
    return turn_rows(cast_segment(rows, groups), groups.offsets)
