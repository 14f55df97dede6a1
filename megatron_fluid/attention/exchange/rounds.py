"""Moving heads between the sequence-parallel and the head-parallel side.

SP2HP (``project``): a rank projects the heads of its own rows and sends each rank the heads that it
attends; it receives its own heads of all rows. HP2SP (``send_rows``): a rank sends each peer the
peer's rows of its own heads, and receives its own rows of all heads. Head-parallel buffers are [S,
B, columns] in the order of positions, sequence-parallel ones [s, B, columns].

``HeadExchange`` is the interface that ``overlap`` is written against. It has two implementations:
``RoundsExchange`` here, over P2P rounds, for any transport; and ``symmetric.SymmetricExchange``,
over symmetric memory inside one NVLink domain.

Legend: S sequence, s local rows, B batch, H hidden, D head dim, W ranks, C columns of a packed
part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.attention.packed import RotaryTable, normalize, rotate_
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound

__all__ = [
    "HeadExchange",
    "HeadsUnderWay",
    "Pending",
    "Prepare",
    "Projection",
    "RoundsExchange",
    "RowsUnderWay",
    "matmul",
]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) after the arrival; bounded by the
        transport's timeout."""
        ...

    def done(self) -> bool:
        """Whether it has finished; never blocks."""
        ...


@dataclass(frozen=True)
class Projection:
    """A projection of rows onto heads: x [r, B, K] -> x @ matrix [K, C] + bias [C].

    ``of_output``: the columns are the heads of the attention output (Hq D); else those of the fused
    QKV weight.
    """

    matrix: Tensor
    bias: Tensor | None
    of_output: bool = False

    def part(self, part: HeadPart) -> Projection:
        """The columns of one part, in its packed order: a view where they are contiguous."""
        if self.of_output:
            return Projection(self.matrix[:, part.output_columns], None, True)
        bias = None if self.bias is None else part.weight(self.bias)
        return Projection(part.weight(self.matrix.t()).t(), bias)


@dataclass(frozen=True)
class Prepare:
    """What arrived queries and keys go through: RMS norm over D (both weights [D], or neither),
    then rotation (or None)."""

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    table: RotaryTable | None = None


class HeadsUnderWay(Protocol):
    """Heads on their way to the ranks that attend them."""

    def pending(self) -> Sequence[Pending]:
        """What is in flight, for work that may run beside it."""
        ...

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        """This rank's heads of head group ``group``, packed [S, B, C] and prepared; before it, what
        they were before a norm.

        The buffers are the caller's. The first is None where ``prepare`` has no norm.
        """
        ...


class RowsUnderWay(Protocol):
    """One head group's rows on their way to the ranks that hold them."""

    def pending(self) -> Sequence[Pending]: ...


class HeadExchange(Protocol):
    """What the overlapped attention needs of a transport; made for one call's layout."""

    rank: int
    late_weight_gradient: bool
    """Whether dW of the output projection runs beside the return of d-qkv, and not beside the
    sending of d-output."""
    apart: bool
    """Whether queries, keys and values arrive one after the other (``packed.split_apart``), and not
    by key/value head."""

    def project(
        self, operation: str, x: Tensor, projection: Projection, chunks: int = 1
    ) -> HeadsUnderWay:
        """Project this rank's rows x [s, B, K], and send every rank its heads; one part moves while
        the next is computed.

        ``chunks`` is the number of pieces in which a transport that sends pieces sends each peer's
        rows.
        """
        ...

    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> RowsUnderWay:
        """Send every peer its rows of ``buffer`` [S, B, C], this rank's heads of a head group."""
        ...

    def collect(
        self, returning: Sequence[Any], of_output: bool, like: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """All heads of this rank's rows: yields (rows, whole) as rows of whole [s, B, all columns]
        become complete.

        Args:
            returning: what ``send_rows`` gave, of every head group in order.
            of_output: as in Projection; gradients of heads that several ranks hold are summed wide
                and rounded once.
            like: [s, B, any], for shape and dtype.
        """
        ...


def matmul(x: Tensor, projection: Projection, out: Tensor) -> None:
    """out [r, B, C] = x [r, B, K] @ matrix + bias; of the types that the tensors have, under
    autocast too."""
    flat, rows = out.view(-1, out.shape[-1]), x.flatten(0, -2)
    if projection.bias is None:
        torch.mm(rows, projection.matrix, out=flat)
    else:
        torch.addmm(projection.bias, rows, projection.matrix, out=flat)


Arrivals = dict[tuple[int, int], PendingRound]  # by (chunk, peer)


@dataclass
class _HeadsInRounds:
    """Heads under way in P2P rounds: per head group, the buffer that peers write into and what is
    to arrive."""

    exchange: RoundsExchange
    groups: list[tuple[Tensor, Arrivals]]

    def pending(self) -> list[PendingRound]:
        return [arrival for _, arrivals in self.groups for arrival in arrivals.values()]

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        (buffer, arrivals), self.groups[group] = self.groups[group], (torch.empty(0), {})
        if prepare is None:
            for arrival in arrivals.values():
                arrival.wait()
            return None, buffer
        target = buffer if prepare.q_norm is None else torch.empty_like(buffer)
        self._prepare(prepare, group, buffer, target, self.exchange.rank)
        for (_, peer), arrival in arrivals.items():
            arrival.wait()
            self._prepare(prepare, group, buffer, target, peer)
        return None if target is buffer else buffer, target

    def _prepare(
        self, prepare: Prepare, group: int, buffer: Tensor, target: Tensor, rank: int
    ) -> None:
        """Normalise (into ``target``, which is ``buffer`` without a norm) and rotate the rows that
        ``rank`` sent."""
        part = self.exchange.heads.part(self.exchange.rank, group)
        for _, rows in self.exchange.sequence.pieces(rank):
            if prepare.q_norm is not None and prepare.k_norm is not None:
                normalize(
                    buffer[rows], target[rows], part, prepare.q_norm, prepare.k_norm, prepare.eps
                )
            rotate_(target[rows], part, None if prepare.table is None else prepare.table.rows(rows))


@dataclass
class _RowsInRounds:
    """Rows under way in P2P rounds, with the buffer they are sent from and where the peers'
    land."""

    buffer: Tensor
    chunks: int
    arrivals: dict[tuple[int, int], tuple[PendingRound, Tensor]]

    def pending(self) -> list[PendingRound]:
        return [arrival for arrival, _ in self.arrivals.values()]


class RoundsExchange:
    """``HeadExchange`` over P2P rounds; with ``rounds`` None (one rank) there are no peers and
    nothing is moved.

    A shard of positions is consecutive rows in both layouts (two stretches of them under the
    zig-zag layout), so both directions send and receive in place. Messages are cut as the
    receiver's places are: both sides see the same list of tensors.

    Args:
        rounds: the P2P rounds of the context-parallel group.
        heads: who attends which heads.
        sequence: who holds which positions.
        rank: this rank in the group.
    """

    late_weight_gradient = False
    apart = False

    def __init__(
        self, rounds: P2PRounds | None, heads: HeadLayout, sequence: SequenceLayout, rank: int
    ) -> None:
        self.rounds, self.heads, self.sequence, self.rank = rounds, heads, sequence, rank
        partners = [] if rounds is None else rounds.partners
        # (round, peer) in the order of the rounds; a bye is left out
        self.peers: list[tuple[int, int]] = [
            (i, peer) for i, peer in enumerate(partners) if peer is not None
        ]

    def _pieces(
        self, local: Tensor, whole: Tensor, peer: int, chunk: int, chunks: int
    ) -> tuple[list, list]:
        """This rank's rows of a chunk in ``local``, and the peer's rows of it in ``whole``, cut
        alike by their owners' stretches."""
        mine, theirs = (self.sequence.chunk(rank, chunk, chunks) for rank in (self.rank, peer))
        own = [
            local[a.start - mine.start : a.stop - mine.start]
            for a, _ in self.sequence.pieces(self.rank, mine)
        ]
        return own, [whole[places] for _, places in self.sequence.pieces(peer, theirs)]

    def project(
        self, operation: str, x: Tensor, projection: Projection, chunks: int = 1
    ) -> _HeadsInRounds:
        groups = [
            self._project(f"{operation} {g}", x, projection, g, chunks)
            for g in range(self.heads.groups)
        ]
        return _HeadsInRounds(self, groups)

    def _project(
        self, operation: str, x: Tensor, projection: Projection, group: int, chunks: int
    ) -> tuple[Tensor, Arrivals]:
        """Project each peer's part and send it while the next is projected; own part last."""
        own = projection.part(self.heads.part(self.rank, group))
        theirs = {peer: projection.part(self.heads.part(peer, group)) for _, peer in self.peers}
        buffer = x.new_empty((self.sequence.length, x.shape[1], own.matrix.shape[1]))
        arrivals: Arrivals = {}
        for chunk in range(chunks):
            rows = self.sequence.chunk(self.rank, chunk, chunks)
            for index, peer in self.peers:
                assert self.rounds is not None
                part = x.new_empty(
                    (rows.stop - rows.start, x.shape[1], theirs[peer].matrix.shape[1])
                )
                matmul(x[rows], theirs[peer], part)
                send, receive = self._pieces(part, buffer, peer, chunk, chunks)
                arrivals[chunk, peer] = self.rounds.start(operation, index, send, receive)
        for local, positions in self.sequence.pieces(self.rank):
            matmul(x[local], own, buffer[positions])
        return buffer, arrivals

    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> _RowsInRounds:
        result = _RowsInRounds(buffer, chunks, {})
        for chunk in range(chunks):
            rows = self.sequence.chunk(self.rank, chunk, chunks)
            for index, peer in self.peers:
                assert self.rounds is not None
                part = self.heads.part(peer, group)
                width = part.output_width if of_output else part.width
                landing = buffer.new_empty((rows.stop - rows.start, buffer.shape[1], width))
                receive, send = self._pieces(landing, buffer, peer, chunk, chunks)
                result.arrivals[chunk, peer] = (
                    self.rounds.start(f"{operation} {group}", index, send, receive),
                    landing,
                )
        return result

    def collect(
        self, returning: Sequence[_RowsInRounds], of_output: bool, like: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        heads, sequence = self.heads, self.sequence
        if heads.single:
            yield slice(0, like.shape[0]), returning[0].buffer
            return
        rows, batch = like.shape[:2]
        columns = heads.num_heads * heads.head_dim if of_output else heads.qkv_rows
        shared = not of_output and not heads.disjoint
        total = like.new_empty((rows, batch, columns))
        wide = total
        if (
            shared
        ):  # key/value heads that ranks share: their gradients are summed wide, and rounded once
            wide = total.new_zeros(
                total.shape, dtype=torch.float64 if total.dtype == torch.float64 else torch.float32
            )
        for group, back in enumerate(returning):
            for local, positions in sequence.pieces(self.rank):
                _into_columns(
                    wide[local],
                    heads.part(self.rank, group),
                    back.buffer[positions],
                    of_output,
                    shared,
                )
        chunks = returning[0].chunks
        for chunk in range(chunks):
            now = sequence.chunk(self.rank, chunk, chunks)
            for group, back in enumerate(returning):
                for _, peer in self.peers:
                    arrival, landing = back.arrivals.pop((chunk, peer))
                    arrival.wait()
                    _into_columns(wide[now], heads.part(peer, group), landing, of_output, shared)
            if shared:
                total[now] = wide[now]
            yield now, total


def _into_columns(
    total: Tensor, part: HeadPart, piece: Tensor, of_output: bool, shared: bool
) -> None:
    """Put (or, for shared heads, add) a part's packed columns where all heads have theirs."""
    start = 0
    for columns in [part.output_columns] if of_output else part.qkv_rows:
        mine = piece[..., start : start + columns.stop - columns.start]
        start += columns.stop - columns.start
        if shared:
            total[..., columns] += mine
        else:
            total[..., columns] = mine
