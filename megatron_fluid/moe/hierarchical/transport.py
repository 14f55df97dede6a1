"""Two-level exchange: a token crosses the network once for each host that has an expert for it, and
is handed on there. Results are summed on the host before they cross back, once each.

With 2 hosts, forward of one call on one rank (`||`: at the same time; plan.py has the batches)::

    pieces 1, 2, ... leave   || first experts, own tokens
    piece 1 has crossed: handed on, computed, summed, and its sums cross back
                             || piece 2, which has crossed meanwhile
    ...
    the last sums cross back || other experts, own tokens

In the backward dy goes the tokens' way and dX the results' way; weight gradients run while the last
dX crosses.

Legend: T tokens of this rank, K top-k, H hidden, n rows of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.p2p_rounds import PendingRound, Transfer
from megatron_fluid.moe.hierarchical.plan import Batch
from megatron_fluid.moe.rounds.transport import P2PExchange, P2PTransport
from megatron_fluid.moe.transport import Segment, check_tokens

__all__ = ["HierarchicalTransport"]

type Blocks = dict[int, list[Tensor]]  # by peer: its rows of each tensor

# On a GPU exchanges run one after the other: so many pieces cross before the first is handed on.
_AHEAD = 2


@dataclass
class _Returning:
    """Results of this rank's tokens on their way. `parts`: of each source of them (a rank of this
    host, or another host) the rows that come, one tensor for each result."""

    pending: PendingRound
    tokens: Sequence[Tensor]
    parts: Sequence[list[Tensor]]


class _HierarchicalExchange(P2PExchange):
    """Dispatch and combine over two levels."""

    def __init__(
        self, transport: HierarchicalTransport, sent: Sequence[Tensor], results: list[Tensor],
        backward: bool,
    ) -> None:  # fmt: skip
        super().__init__(transport, sent, results, backward)
        self.name = f"{transport.name} grad " if backward else f"{transport.name} "
        self._call = next(self.rounds.calls)
        # By operation and piece: receives that were posted ahead, and where they put what arrives.
        # Then sends are apart, and nobody waits for them before the end.
        self._asked: dict[tuple[str, int], tuple[PendingRound, list[Tensor]]] = {}
        self._sending: list[PendingRound] = []
        # By piece: tokens that cross to this rank, which hands them on.
        self._crossing: dict[int, tuple[PendingRound, list[Tensor]]] = {}
        # By piece: the tokens that the ranks of this host hand to this one.
        self._handed: dict[int, tuple[PendingRound, list[Tensor]]] = {}
        self._returning: dict[int, _Returning] = {}
        # Of piece 0, which is computed in two batches: its tokens, and what the first has made.
        self._own: list[Tensor] | None = None
        self._made: list[Tensor] | None = None
        self._next = 1

    # Dispatch

    def launch(self) -> list[PendingRound]:
        """Start what needs no other rank's computation: tokens cross, own ones are handed out."""
        pieces = self.plan.pieces
        if self.rounds.asks_ahead:
            for index in range(1, len(pieces)):
                # gloo sends nothing that has not been asked for, and a request waits behind the
                # data that is being sent: posted at once, data never wait for requests.
                for operation in ("dispatch", "combine"):
                    self._asked[operation, index] = self._start(operation, index, {})
        all_at_once = self.rounds.device.type != "cuda" or len(pieces[0].hands) == 1
        ahead = len(pieces) if all_at_once else _AHEAD
        for _ in range(ahead):
            self._cross()
        tokens = pieces[0].tokens
        assert tokens is not None
        self._hand_on(0, self._tokens(tokens))
        return [pending for pending, _ in self._crossing.values()][:1]

    def _blocks(self, operation: str, index: int) -> Sequence[tuple[int, int]]:
        """(peer, rows) of a piece that crosses to this rank: tokens that it hands on ("dispatch"),
        or the results of its own ("combine")."""
        piece = self.plan.pieces[index]
        if operation == "dispatch":
            return piece.receives
        return [(gateway, len(tokens)) for gateway, tokens in piece.sends]

    def _start(
        self, operation: str, index: int, outgoing: Blocks, room: list[Tensor] | None = None
    ) -> tuple[PendingRound, list[Tensor]]:
        """Exchange a piece between hosts. Without ``room``, what crosses to this rank arrives in
        the tensors that are returned, block by block."""
        incoming: Blocks = {}
        if room is None:
            like = self.sent if operation == "dispatch" else self.results
            blocks = self._blocks(operation, index)
            room = _rows_like(like, sum(rows for _, rows in blocks))
            incoming = _by_peer(blocks, room)
        transfers = _transfers(outgoing, incoming)
        name = f"{self.name}{operation}"
        return self.rounds.exchange(name, index, transfers, self._call), room

    def _between_hosts(
        self, operation: str, index: int, outgoing: Blocks
    ) -> tuple[PendingRound, list[Tensor]]:
        """Send a piece to other hosts; what crosses to this rank may have been asked for."""
        asked = self._asked.pop((operation, index), None)
        if asked is None:
            return self._start(operation, index, outgoing)
        self._sending.append(self._start(operation, index, outgoing, asked[1])[0])
        return asked

    def _cross(self) -> None:
        """Let the next piece cross to the gateways of other hosts, if there is one."""
        index = self._next
        if index < len(self.plan.pieces):
            self._next += 1
            sends = self.plan.pieces[index].sends
            outgoing = {gateway: self._tokens(places) for gateway, places in sends}
            self._crossing[index] = self._between_hosts("dispatch", index, outgoing)

    def _tokens(self, places: Tensor) -> list[Tensor]:
        return [tensor.index_select(0, places) for tensor in self.sent]

    def _hand_on(self, index: int, held: list[Tensor]) -> None:
        """Give held tokens to the ranks of this host that have experts for them."""
        piece, rank = self.plan.pieces[index], self.plan.rank
        if len(piece.arrivals) == 1:  # a lone rank, which computes all that it holds
            self._handed[index] = PendingRound(), held
            return
        outgoing = {m: [t.index_select(0, places) for t in held] for m, places in piece.hands}
        arrived = _rows_like(self.sent, piece.num_arrived)
        incoming = _by_peer(piece.arrivals, arrived)
        for target, source in zip(incoming.pop(rank), outgoing.pop(rank), strict=True):
            target.copy_(source)
        transfers = _transfers(outgoing, incoming)
        pending = self.rounds.exchange(f"{self.name}hand on", index, transfers, self._call)
        self._handed[index] = pending, arrived

    def segments(self) -> Iterator[Segment]:
        for index, batch in enumerate(self.plan.batches):
            if self._own is not None and batch.piece == 0:
                tensors, self._own = self._own, None
            else:
                tensors = self._arrived(batch.piece)
            if not batch.last:
                self._own = tensors
            permutation = batch.permutation
            rows = tensors[0].index_select(0, permutation.row_token[batch.rows])
            probs = None
            if len(tensors) > 1:
                probs = tensors[1].reshape(-1).index_select(0, permutation.row_slot[batch.rows])
            del tensors
            yield Segment(rows, batch.groups, probs, index)
            del rows, probs

    def _arrived(self, index: int) -> list[Tensor]:
        """The tokens of a piece, when they are there: what was sent, each [n, ...]."""
        if self.plan.pieces[index].crosses:
            crossing, held = self._crossing.pop(index)
            crossing.wait()
            self._hand_on(index, held)
            self._cross()
        pending, arrived = self._handed.pop(index)
        pending.wait()
        return arrived

    # Combine

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        batch = self.plan.batches[segment.index]
        made = [rows] if row_grad is None else [rows, row_grad[: rows.shape[0]]]
        if not batch.last:
            self._made = made
            return
        if self._made is not None and batch.piece == 0:
            made = [torch.cat(parts) for parts in zip(self._made, made, strict=True)]
            self._made = None
        self._give_back(batch.piece, self._sums(batch, made))

    def _sums(self, batch: Batch, made: Sequence[Tensor]) -> list[Tensor]:
        """By arrived token: the sum over this rank's experts [n, H], and the gradients of its
        probabilities [n, K]."""
        found = [batch.permutation.sum_choices(made[0])]
        if len(made) > 1:
            dprobs = batch.permutation.spread_choices(made[1])
            found.append(dprobs.to(self.results[1].dtype))
        return found

    def _give_back(self, index: int, parts: list[Tensor]) -> None:
        """Send what this rank's experts made of a piece's tokens back to where these come from."""
        piece = self.plan.pieces[index]
        returned = self._return_to_gateways(index, parts)
        if not piece.crosses:
            self._returning[index] = returned
            return
        returned.pending.wait()
        if len(returned.parts) == 1:
            sums = [part.contiguous() for part in returned.parts[0]]
        else:
            sums = _rows_like(self.results, piece.num_held)
            _sum_into(sums, zip(returned.tokens, returned.parts, strict=True))
        pending, back = self._between_hosts("combine", index, _by_peer(piece.receives, sums))
        arrived = _by_peer(self._blocks("combine", index), back)
        tokens = [places for _, places in piece.sends]
        self._returning[index] = _Returning(pending, tokens, list(arrived.values()))

    def _return_to_gateways(self, index: int, parts: list[Tensor]) -> _Returning:
        """Send the sums of this rank's experts back to who handed the tokens on; what comes from
        the ranks of this host for the tokens that this rank handed on."""
        piece, rank = self.plan.pieces[index], self.plan.rank
        outgoing = _by_peer(piece.arrivals, parts)
        mine = outgoing.pop(rank)
        incoming = {m: _rows_like(parts, len(places)) for m, places in piece.hands if m != rank}
        transfers = _transfers(outgoing, incoming)
        pending = self.rounds.exchange(f"{self.name}hand back", index, transfers, self._call)
        positions = [places for _, places in piece.hands]
        back = [incoming.get(member, mine) for member, _ in piece.hands]
        return _Returning(pending, positions, back)

    def run_queued(self, scheduler: WeightGradScheduler, submit: Callable[[], None]) -> None:
        submit()
        # All of them: the next layer's first exchange is hidden by its own host's tokens.
        scheduler.run_during([returned.pending for returned in self._returning.values()])

    def complete(self) -> None:
        """Wait for all results, and sum those of each token: own host first, then by piece and
        host."""

        def parts() -> Iterator[tuple[Tensor, list[Tensor]]]:
            for index in sorted(self._returning):
                returned = self._returning.pop(index)
                returned.pending.wait()
                tokens = self.plan.pieces[index].tokens
                for places, rows in zip(returned.tokens, returned.parts, strict=True):
                    # Of own ones places are among the held tokens.
                    yield places if tokens is None else tokens.index_select(0, places), rows

        _sum_into(self.results, parts())
        for pending in self._sending:
            pending.wait()


class HierarchicalTransport(P2PTransport):
    """Moves the tokens of one call over two levels. Each batch of the plan is a segment; arguments
    as of P2PTransport."""

    exchange = _HierarchicalExchange

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H], probs [T, K]"""
        check_tokens(x, probs, (self.plan.num_tokens, self.plan.top_k))
        if probs is not None:
            probs = probs.to(torch.promote_types(probs.dtype, torch.float32)).contiguous()
        return x.contiguous(), probs


def _rows_like(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    return [tensor.new_empty((rows, *tensor.shape[1:])) for tensor in tensors]


def _by_peer(blocks: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> Blocks:
    """The consecutive blocks of tensors by (peer, rows)."""
    cuts = [tensor.split([rows for _, rows in blocks]) for tensor in tensors]
    return {peer: [cut[i] for cut in cuts] for i, (peer, _) in enumerate(blocks)}


def _transfers(outgoing: Blocks, incoming: Blocks) -> list[Transfer]:
    """What P2PRounds.exchange takes, peers in ascending order."""
    peers = sorted({*outgoing, *incoming})
    return [(peer, outgoing.get(peer, ()), incoming.get(peer, ())) for peer in peers]


def _sum_into(results: Sequence[Tensor], parts: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> None:
    """Set results to sums of rows, added in the order of the parts in fp32 or better.

    Args:
        parts: (which row of the results each of its rows is added to, rows for each result).
    """
    kinds = [torch.promote_types(r.dtype, torch.float32) for r in results]
    totals = [
        r.zero_() if r.dtype == wide else torch.zeros_like(r, dtype=wide)
        for r, wide in zip(results, kinds, strict=True)
    ]
    for places, rows in parts:
        for total, part in zip(totals, rows, strict=True):
            total.index_add_(0, places, part.to(total.dtype))
    for result, total in zip(results, totals, strict=True):
        if total is not result:
            result.copy_(total)
