"""Heads over one all-to-all collective each way, on any device: nothing is overlapped. For one
rank nothing is moved: every projection is one GEMM, whose result is taken as it stands.

Legend: attention.exchange.protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.exchange.protocol import (
    HeadExchange,
    Projection,
    RowsInFlight,
    add_columns,
    matmul,
    wide_dtype,
)
from megatron_fluid.attention.exchange.rounds import HeadsByPeer
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.tables import position_order
from megatron_fluid.comm.waits import group_waits

__all__ = ["CollectiveExchange"]


class CollectiveExchange(HeadExchange):
    """``HeadExchange`` over ``all_to_all_single``; with ``group`` None (one rank) nothing is moved.

    Args:
        group: the context-parallel group.
        heads: who attends which heads, in one head group.
        sequence: who holds which positions.
    """

    group = None  # of the class: the base's is abstract

    def __init__(
        self, group: dist.ProcessGroup | None, heads: HeadLayout, sequence: SequenceLayout
    ) -> None:
        assert heads.groups == 1, "one collective moves all heads"
        self.group, self.heads, self.sequence = group, heads, sequence
        self.rank = 0 if group is None else group.rank()
        self._parts = [heads.part(rank) for rank in range(heads.world)]
        self._rows = [sequence.local_length(rank) for rank in range(heads.world)]

    def _widths(self, of_output: bool) -> list[int]:
        return [part.columns_width(of_output) for part in self._parts]

    def _all_to_all(self, send: Tensor, receive: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Flat all-to-all that sends and receives these numbers of elements a rank."""
        received = send.new_empty(sum(receive))
        send = send.contiguous()  # a gradient may be expanded
        counts = list(receive), list(sizes)
        assert self.group is not None
        group_waits(self.group).collective(
            "attention all-to-all",
            lambda: dist.all_to_all_single(
                received, send, *counts, group=self.group, async_op=True
            ),
        )
        return received

    def project(
        self, operation: str, x: Tensor, projection: Projection, chunks: int = 1
    ) -> HeadsByPeer:
        whole = x.new_empty((*x.shape[:2], sum(self._widths(projection.of_output))))
        matmul(x, self._for_every_rank(projection), whole)
        return self._send(whole, projection.of_output)

    def _for_every_rank(self, projection: Projection) -> Projection:
        """The columns of all ranks, rank after rank; those of shared heads are repeated."""
        if projection.of_output or self.heads.disjoint:
            return projection
        bias, rows = projection.bias, projection.matrix.t()
        repeated = torch.cat([part.weight(rows) for part in self._parts]).t()
        if bias is not None:
            bias = torch.cat([part.weight(bias) for part in self._parts])
        return Projection(repeated, bias)

    def send_heads(self, operation: str, whole: Tensor, of_output: bool) -> HeadsByPeer:
        if not (of_output or self.heads.disjoint):
            columns = [cut for part in self._parts for cut in part.columns(of_output)]
            whole = torch.cat([whole[..., cut] for cut in columns], -1)
        return self._send(whole, of_output)

    def _send(self, whole: Tensor, of_output: bool) -> HeadsByPeer:
        """Send [s, B, columns of all ranks, rank after rank]."""
        if self.heads.single:
            return HeadsByPeer(self, [(whole, {})])
        widths, batch = self._widths(of_output), whole.shape[1]
        mine, rows = widths[self.rank], self._rows
        if len(set(widths)) == 1:
            send = whole.unflatten(2, (len(widths), mine)).permute(2, 0, 1, 3).reshape(-1)
        else:
            send = torch.cat([piece.reshape(-1) for piece in whole.split(widths, -1)])
        sizes = [rows[self.rank] * batch * width for width in widths]
        received = self._all_to_all(send, [n * batch * mine for n in rows], sizes)
        shards = received.view(self.sequence.length, batch, mine)
        if self.sequence.kind == "contiguous":
            return HeadsByPeer(self, [(shards, {})])
        buffer = torch.empty_like(shards)
        buffer[position_order(self.sequence, shards.device)] = shards
        return HeadsByPeer(self, [(buffer, {})])

    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> RowsInFlight:
        if self.heads.single:
            return RowsInFlight(buffer, [buffer])
        rows, batch, shards = self._rows[self.rank], buffer.shape[1], buffer
        if self.sequence.kind != "contiguous":
            shards = buffer[position_order(self.sequence, buffer.device)]
        widths = self._widths(of_output)
        receive = [rows * batch * width for width in widths]
        sizes = [n * batch * widths[self.rank] for n in self._rows]
        pieces = self._all_to_all(shards.reshape(-1), receive, sizes).split(receive)
        views = [p.view(rows, batch, width) for p, width in zip(pieces, widths, strict=True)]
        return RowsInFlight(buffer, views)

    def collect(
        self, returning: Sequence[RowsInFlight], of_output: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        [back] = returning
        pieces, rows = back.arrivals, slice(0, self._rows[self.rank])
        if len(pieces) == 1:
            yield rows, pieces[0]
        elif of_output or self.heads.disjoint:
            yield rows, torch.cat(list(pieces), -1)
        else:
            shape = (*pieces[0].shape[:2], self.heads.qkv_rows)
            wide = pieces[0].new_zeros(shape, dtype=wide_dtype(pieces[0].dtype))
            for part, piece in zip(self._parts, pieces, strict=True):
                add_columns(wide, part, piece, of_output, True)
            yield rows, wide.to(pieces[0].dtype)
