"""Weight gradients of fp8 experts in fp8: both operands are turned to scales along their rows
(kernels/fp8_casts) when the gradient is computed, and multiplied (kernels/fp8_weight_grads).

    dW2 = turned dy x turned a,   dW1 = turned dh x turned x

The counterparts of weight_grads and add_to_main_grads of moe/experts.py. Transports that carry fp8
have one segment.

Legend: N rows (sorted by expert), El experts, A and B widths of a weight gradient.
"""

from __future__ import annotations

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


def weight_grads(fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> list[Tensor]:
    """dW of one projection in bf16, zero for an expert without rows.

    Args:
        fc: the projection.
        dy, x: the gradient of its output [N, out] and its input [N, in]; rows that are not in fp8
            are cast.
        groups: the rows of each expert.

    Returns:
        One tensor for each of fc.params.
    """
    return fc.as_gradients(_gradient(fc, dy, x, groups))


def add_to_main_grads(fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> None:
    """Add dW of one projection to the main_grads of its parameters, or write it there where
    Megatron asks for that. Arguments as for weight_grads.

    main_grads that the kernel does not take, in another precision than fp32 or strided, are added
    to by torch: dW is then rounded to bf16 before.
    """
    grads, known = fc.kernel_grads(takes_main_grads)
    overwrite = fc.overwrites_main_grads()
    if known.fit and _count(dy):
        left, right = _turned(fc, dy, x, groups)
        operands = left, right, groups.offsets, known.addresses, grads, groups.ends
        add_fp8_weight_grads(*operands, overwrite=overwrite)
        return
    for grad, gradient in zip(grads, _gradient(fc, dy, x, groups), strict=True):
        if overwrite:
            grad.copy_(gradient)
        else:
            grad += gradient


def _gradient(fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> Tensor:
    """dW of all experts in bf16, in the layout of the weights. [El, A, B]"""
    if _count(dy):
        return fp8_weight_grads(*_turned(fc, dy, x, groups), groups.offsets, groups.ends)
    shape = (fc.in_width, fc.out_width) if fc.layout == "in_out" else (fc.out_width, fc.in_width)
    device = groups.offsets.device
    return torch.zeros((fc.num_experts, *shape), dtype=torch.bfloat16, device=device)


def _count(rows: Rows) -> int:
    """How many rows have room in the tensors."""
    return (rows.values if isinstance(rows, Fp8Rows) else rows).shape[0]


def _turned(
    fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups
) -> tuple[TurnedRows, TurnedRows]:
    """Both operands in the order of the weights' layout."""
    left, right = (x, dy) if fc.layout == "in_out" else (dy, x)
    return _turn(left, groups), _turn(right, groups)


def cast_segment(rows: Rows, groups: RowGroups) -> Fp8Rows:
    """rows [N, H] in fp8, where they are not yet."""
    if isinstance(rows, Fp8Rows):
        return rows
    return cast_rows(rows.contiguous(), groups.count)


def _turn(rows: Rows, groups: RowGroups) -> TurnedRows:
    return turn_rows(cast_segment(rows, groups), groups.offsets)
