"""Moving head parts between the sequence-parallel and the head-parallel side, in tournament rounds.

SP2HP (``to_heads``): a rank sends each peer the peer's heads of its own rows, and receives its own heads of the peer's rows.
HP2SP (``to_sequence``): a rank sends each peer the peer's rows of its own heads, and receives its own rows of the peer's heads.
Head-parallel buffers are [S, B, columns] in the order of positions, sequence-parallel ones [rows, B, columns]: a shard of
positions is consecutive rows in both (two stretches of them under the zig-zag layout), so both directions send and receive in
place and no permutation pass is needed on either side.

``HeadExchange`` is the interface that ``overlap`` is written against; ``RoundsExchange`` is its portable form over P2P rounds.
Another transport (symmetric memory) implements the same four methods; it owns the buffers it hands out, which is why these come
from the exchange and not from ``torch.empty`` at the caller's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.comm.rounds import P2PRounds, PendingRound

__all__ = ["HeadExchange", "Pending", "RoundsExchange"]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) after the arrival; bounded by the transport's timeout."""
        ...

    def done(self) -> bool:
        """Whether it has finished; never blocks."""
        ...


class HeadExchange(Protocol):
    """What the overlapped attention needs of a transport."""

    rank: int
    sequence: SequenceLayout
    peers: list[tuple[int, int]]  # (round, peer) in the order of the rounds; a bye is left out

    def buffer(self, rows: int, batch: int, columns: int, like: Tensor) -> Tensor:
        """An uninitialised [rows, batch, columns] tensor that the exchange can receive into or send from."""
        ...

    def to_heads(
        self, operation: str, turn: tuple[int, int], part: Tensor, buffer: Tensor, chunk: int, chunks: int
    ) -> Pending:
        """Send ``part`` (the peer's heads of this rank's chunk of rows), receive the peer's chunk of rows into ``buffer``."""
        ...

    def to_sequence(
        self, operation: str, turn: tuple[int, int], buffer: Tensor, landing: Tensor, chunk: int, chunks: int
    ) -> Pending:
        """Send the peer's chunk of rows of ``buffer`` (this rank's heads), receive ``landing`` (the peer's heads of this rank's chunk)."""
        ...


class RoundsExchange:
    """``HeadExchange`` over P2P rounds; with ``rounds`` None (one rank) there are no peers and nothing is moved.

    Args:
        rounds: the P2P rounds of the context-parallel group.
        sequence: who holds which positions.
        rank: this rank in the group.
    """

    def __init__(self, rounds: P2PRounds | None, sequence: SequenceLayout, rank: int) -> None:
        self.rounds, self.sequence, self.rank = rounds, sequence, rank
        partners = [] if rounds is None else rounds.partners
        self.peers: list[tuple[int, int]] = [(i, peer) for i, peer in enumerate(partners) if peer is not None]

    def buffer(self, rows: int, batch: int, columns: int, like: Tensor) -> Tensor:
        return torch.empty((rows, batch, columns), dtype=like.dtype, device=like.device)

    def _rows_of(self, buffer: Tensor, rank: int, chunk: int, chunks: int) -> list[tuple[slice, Tensor]]:
        """(rows of the chunk, their place in a head-parallel buffer) for a rank's chunk of rows."""
        rows = self.sequence.chunk(rank, chunk, chunks)
        pieces = self.sequence.pieces(rank, rows)
        return [(slice(a.start - rows.start, a.stop - rows.start), buffer[b]) for a, b in pieces]

    def to_heads(
        self, operation: str, turn: tuple[int, int], part: Tensor, buffer: Tensor, chunk: int = 0, chunks: int = 1
    ) -> PendingRound:
        assert self.rounds is not None
        index, peer = turn
        mine = self.sequence.chunk(self.rank, chunk, chunks)
        # Cut the message as the receiver's places are cut: both sides see the same list of tensors.
        pieces = self.sequence.pieces(self.rank, mine)
        send = [part[a.start - mine.start : a.stop - mine.start] for a, _ in pieces]
        recv = [place for _, place in self._rows_of(buffer, peer, chunk, chunks)]
        return self.rounds.start(operation, index, send, recv)

    def to_sequence(
        self, operation: str, turn: tuple[int, int], buffer: Tensor, landing: Tensor, chunk: int = 0, chunks: int = 1
    ) -> PendingRound:
        assert self.rounds is not None
        index, peer = turn
        mine = self.sequence.chunk(self.rank, chunk, chunks)
        pieces = self.sequence.pieces(self.rank, mine)
        recv = [landing[a.start - mine.start : a.stop - mine.start] for a, _ in pieces]
        send = [place for _, place in self._rows_of(buffer, peer, chunk, chunks)]
        return self.rounds.start(operation, index, send, recv)
