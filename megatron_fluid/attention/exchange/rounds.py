"""Heads over round-robin P2P rounds, for any link: a part moves while the next is projected.

Legend: attention.exchange.protocol.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.exchange.protocol import (
    HeadExchange,
    Prepare,
    Projection,
    RowsInFlight,
    add_columns,
    groups_that_pay,
    matmul,
    wide_dtype,
)
from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound, shared_rounds

__all__ = ["HeadsByPeer", "RoundsExchange"]

# A message below this costs more by its latency and launch, and by smaller kernels, than it hides.
_LEAST_MESSAGE_BYTES = {"cuda": 4 * 2**20, "cpu": 2**17}

Arrivals = dict[tuple[int, int], PendingRound]  # by (chunk, peer)
Fill = Callable[[HeadPart, slice, Tensor], None]
"""(part, local rows, out): write the part's heads of these rows into ``out``."""


@dataclass
class HeadsByPeer:
    """Heads in flight: per head group, the buffer that peers write into and what is to arrive."""

    exchange: HeadExchange
    groups: list[tuple[Tensor, Arrivals]]

    def pending(self) -> list[PendingRound]:
        return [arrival for _, arrivals in self.groups for arrival in arrivals.values()]

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        (buffer, arrivals), self.groups[group] = self.groups[group], (torch.empty(0), {})
        prepare = Prepare() if prepare is None else prepare
        target = buffer if prepare.norm is None else torch.empty_like(buffer)
        part = self.exchange.heads.part(self.exchange.rank, group)

        def sent_by(rank: int) -> None:
            for _, rows in self.exchange.sequence.pieces(rank):
                prepare.apply(buffer, target, part, rows)

        if arrivals:
            sent_by(self.exchange.rank)
        else:  # all rows are there
            prepare.apply(buffer, target, part)
        for (_, peer), arrival in arrivals.items():
            arrival.wait()
            sent_by(peer)
        return None if target is buffer else buffer, target


class RoundsExchange(HeadExchange):
    """``HeadExchange`` over P2P rounds; with ``rounds`` None (one rank) nothing is moved.

    A shard of positions is consecutive rows in both layouts (two stretches of them under the
    zig-zag layout), so both directions send and receive in place. Both sides of a round cut
    messages by the owners' stretches, so they pass equal lists of tensors.

    Args:
        connection: the P2P rounds of the context-parallel group, or None.
        heads, sequence: as of HeadExchange.
    """

    def __init__(
        self, connection: P2PRounds | None, heads: HeadLayout, sequence: SequenceLayout
    ) -> None:
        super().__init__(connection, heads, sequence)
        self.rounds = rounds = connection
        self.rank, self.group = (0, None) if rounds is None else (rounds.rank, rounds.group)
        partners = [] if rounds is None else rounds.partners
        # (round, peer) in the order of the rounds; a bye is left out
        self.peers = [(i, peer) for i, peer in enumerate(partners) if peer is not None]

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> P2PRounds:
        return shared_rounds(group)

    @classmethod
    def head_groups(
        cls, connection: P2PRounds | None, heads: HeadLayout, length: int, batch: int, itemsize: int
    ) -> int:
        """Inside one host 1; over several, as many as leave messages long enough, so that one group
        is attended while the others cross."""
        if connection is None or len(set(connection.domains)) == 1:
            return 1
        sent = length * batch * heads.output_columns * itemsize // heads.world**2
        least = _LEAST_MESSAGE_BYTES[connection.device.type]
        return groups_that_pay(heads, sent, least, (8, 4, 2))

    def _pieces(
        self, local: Tensor, whole: Tensor, peer: int, chunk: int, chunks: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's rows of a chunk in ``local``, and the peer's rows of it in ``whole``, cut
        alike by their owners' stretches."""
        mine, theirs = (self.sequence.chunk(rank, chunk, chunks) for rank in (self.rank, peer))
        own = [
            local[a.start - mine.start : a.stop - mine.start]
            for a, _ in self.sequence.pieces(self.rank, mine)
        ]
        return own, [whole[positions] for _, positions in self.sequence.pieces(peer, theirs)]

    def project(
        self, operation: str, x: Tensor, projection: Projection, chunks: int = 1
    ) -> HeadsByPeer:
        if self.heads.single:
            return super().project(operation, x, projection)  # type: ignore[return-value]
        part = functools.cache(projection.part)

        def fill(heads: HeadPart, rows: slice, out: Tensor) -> None:
            matmul(x[rows], part(heads), out)

        return self._send(operation, x, projection.of_output, fill, chunks)

    def send_heads(self, operation: str, whole: Tensor, of_output: bool) -> HeadsByPeer:
        if self.heads.single:
            return HeadsByPeer(self, [(whole, {})])

        def fill(heads: HeadPart, rows: slice, out: Tensor) -> None:
            cuts = heads.columns(of_output)
            out.copy_(torch.cat([whole[rows][..., cut] for cut in cuts], -1))

        return self._send(operation, whole, of_output, fill, 1)

    def _send(
        self, operation: str, x: Tensor, of_output: bool, fill: Fill, chunks: int
    ) -> HeadsByPeer:
        """Fill each peer's part of x's rows and send it while the next is filled, head group by
        head group; own part last, in place."""
        sent = []
        for group in range(self.heads.groups):
            own = self.heads.part(self.rank, group)
            # A head group is equally wide on all ranks.
            shape = x.shape[1], own.output_width if of_output else own.width
            buffer, arrivals = x.new_empty((self.sequence.length, *shape)), Arrivals()
            for chunk in range(chunks):
                rows = self.sequence.chunk(self.rank, chunk, chunks)
                for index, peer in self.peers:
                    assert self.rounds is not None
                    part = x.new_empty((rows.stop - rows.start, *shape))
                    fill(self.heads.part(peer, group), rows, part)
                    pieces = self._pieces(part, buffer, peer, chunk, chunks)
                    arrival = self.rounds.start(f"{operation} {group}", index, *pieces)
                    arrivals[chunk, peer] = arrival
            for local, positions in self.sequence.pieces(self.rank):
                fill(own, local, buffer[positions])
            sent.append((buffer, arrivals))
        return HeadsByPeer(self, sent)

    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> RowsInFlight:
        received: list[list[tuple[int, PendingRound, Tensor]]] = [[] for _ in range(chunks)]
        for chunk in range(chunks):
            rows = self.sequence.chunk(self.rank, chunk, chunks)
            for index, peer in self.peers:
                assert self.rounds is not None
                into = buffer.new_empty((rows.stop - rows.start, *buffer.shape[1:]))
                receive, send = self._pieces(into, buffer, peer, chunk, chunks)
                arrival = self.rounds.start(f"{operation} {group}", index, send, receive)
                received[chunk].append((peer, arrival, into))
        waits = [arrival for chunk_ in received for _, arrival, _ in chunk_]
        return RowsInFlight(buffer, received, waits)

    def collect(
        self, returning: Sequence[RowsInFlight], of_output: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        heads, sequence, first = self.heads, self.sequence, returning[0].buffer
        rows = sequence.local_length(self.rank)
        if heads.single:
            yield slice(0, rows), first
            return
        columns = heads.output_columns if of_output else heads.qkv_rows
        shared = not of_output and not heads.disjoint
        wide = total = first.new_empty((rows, first.shape[1], columns))
        if shared:  # summed wide, and rounded once
            wide = total.new_zeros(total.shape, dtype=wide_dtype(total.dtype))
        for group, back in enumerate(returning):
            back.waits = ()  # what has arrived is let go chunk by chunk
            own = heads.part(self.rank, group)
            for local, positions in sequence.pieces(self.rank):
                add_columns(wide[local], own, back.buffer[positions], of_output, shared)
        chunks = len(returning[0].arrivals)
        for chunk in range(chunks):
            now = sequence.chunk(self.rank, chunk, chunks)
            for group, back in enumerate(returning):
                arrived, back.arrivals[chunk] = back.arrivals[chunk], []
                for peer, arrival, received in arrived:
                    arrival.wait()
                    add_columns(wide[now], heads.part(peer, group), received, of_output, shared)
            if shared:
                total[now] = wide[now]
            yield now, total
