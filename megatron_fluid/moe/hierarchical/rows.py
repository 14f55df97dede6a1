"""Blocks of rows as the two-level exchange sends, receives and sums them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.p2p_rounds import Transfer

__all__ = ["rows_by_peer", "select_rows", "sum_into", "sum_parts", "transfers_of", "wide"]


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype that sums of a tensor's rows have: fp32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


def select_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Rows at ascending positions, without a copy where they are all."""
    return tensor if len(positions) == len(tensor) else tensor.index_select(0, positions)


def rows_by_peer(
    blocks: Sequence[tuple[int, int]], tensors: Sequence[Tensor]
) -> dict[int, list[Tensor]]:
    """The consecutive blocks of tensors by (peer, rows)."""
    found: dict[int, list[Tensor]] = {}
    begin = 0
    for peer, rows in blocks:
        found[peer] = [tensor[begin : begin + rows] for tensor in tensors]
        begin += rows
    return found


def transfers_of(
    outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]
) -> list[Transfer]:
    """What P2PRounds.exchange takes, peers in ascending order."""
    peers = sorted({*outgoing, *incoming})
    return [(peer, outgoing.get(peer, ()), incoming.get(peer, ())) for peer in peers]


def sum_parts(
    rows: int, positions: Sequence[Tensor], parts: Sequence[list[Tensor]], like: Sequence[Tensor]
) -> list[Tensor]:
    """Sums over the ranks of this host, in their order, of what they made of the held tokens.

    Args:
        rows: number of held tokens.
        positions: among them, of each rank's rows. parts: of each rank, one tensor for each result.
        like: the results.
    """
    if len(parts) == 1 and len(positions[0]) == rows:
        return [part.contiguous() for part in parts[0]]
    sums = [r.new_empty((rows, *r.shape[1:])) for r in like]
    sum_into(sums, zip(positions, parts, strict=True))
    return sums


def sum_into(results: Sequence[Tensor], parts: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> None:
    """Set results to sums of rows, added in the order of the parts in fp32 or better.

    Args:
        parts: (which row of the results each of its rows is added to, rows for each result).
    """
    totals = [
        r.zero_() if r.dtype == wide(r) else torch.zeros_like(r, dtype=wide(r)) for r in results
    ]
    for places, rows in parts:
        for total, part in zip(totals, rows, strict=True):
            total.index_add_(0, places, part.to(total.dtype))
    for result, total in zip(results, totals, strict=True):
        if total is not result:
            result.copy_(total)
