"""Packed sequences (THD) in the exchanges of attention.

Megatron pads each sequence of a pack to a multiple of 2C rows and cuts it by itself: rank r of C
holds its chunks r and 2C - 1 - r. Rows are exchanged as they stand, rank after rank; the order of
the pack is made of them before the attention kernel and undone after it. All of it is computed on
the device: the lengths differ from batch to batch, and the host reads none. Nothing is kept from
one forward to the next: neither an address nor a version counter tells that lengths were written
in place (in inference mode, through `.data`, by a collective, or by the replay of a CUDA graph).

Legend: T rows of the whole pack, t = T / C a rank's, h heads of a rank, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.packed import RotaryTable
from megatron_fluid.backward.autograd import once_differentiable

__all__ = ["Reorder", "foreign_pack_reason", "pack_order", "pack_table"]


class Reorder(torch.autograd.Function):
    """x[there]; ``back`` is the inverse. Indexing by itself adds up gradients row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.back), None, None


def foreign_pack_reason(packed: Any) -> str | None:
    """Why a pack cannot be exchanged over the context-parallel group, or None.

    Args:
        packed: Megatron's PackedSeqParams.
    """
    if packed.qkv_format != "thd":
        return f"packed_seq_params of the format {packed.qkv_format}"
    if packed.cp_group is not None or packed.local_cp_size is not None:
        return "packed_seq_params has a context-parallel group of its own (hybrid)"
    return None


def pack_order(packed: Any, rows: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Where the ranks' rows, rank after rank, stand in the pack, and the inverse; int64 [T] each.

    Args:
        packed: Megatron's PackedSeqParams, whose lengths are those of whole sequences.
        rows: t.
        ranks: C.
    """
    order = _order(_bounds(packed), rows, ranks)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse


def pack_table(packed: Any, rows: int, ranks: int, table: RotaryTable) -> RotaryTable:
    """The rotations of the ranks' rows, rank after rank: positions restart in each.

    Args:
        packed, rows, ranks: as in ``pack_order``.
        table: of the positions of a sequence.
    """
    bounds = _bounds(packed)
    order = _order(bounds, rows, ranks)
    sequence = torch.searchsorted(bounds[1:].contiguous(), order, right=True)
    place = order - bounds[sequence]
    place = place.clamp(max=table.cos.shape[0] - 1)  # of rows behind the last sequence
    return RotaryTable(table.cos[place], table.sin[place], table.interleaved)


def _bounds(packed: Any) -> Tensor:
    """Where the sequences begin, and the end of the last; int64."""
    given: Tensor | None = packed.cu_seqlens_q_padded
    return (packed.cu_seqlens_q if given is None else given).long()


def _order(bounds: Tensor, rows: int, ranks: int) -> Tensor:
    row = torch.arange(ranks * rows, device=bounds.device)
    rank, local = row // rows, row % rows
    # What follows the last sequence is cut into consecutive pieces.
    starts, last = bounds // ranks, bounds.numel() - 1
    sequence = torch.searchsorted(starts[1:].contiguous(), local, right=True)
    begin, offset = bounds[sequence], local - starts[sequence]
    half = (bounds[(sequence + 1).clamp(max=last)] - begin) // (2 * ranks)
    later = (2 * ranks - 2 - rank) * half + offset
    inside = torch.where(offset < half, rank * half + offset, later)
    behind = rank * (rows - starts[last]) + offset
    return begin + torch.where(sequence < last, inside, behind)
