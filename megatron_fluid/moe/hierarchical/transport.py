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

from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound, SeveralRounds, Transfer
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.hierarchical.plan import Batch, HierarchicalPlan
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport, check_tokens

__all__ = ["HierarchicalTransport"]

# On a GPU exchanges run one after the other: so many pieces cross before the first is handed on.
_AHEAD = 2


@dataclass
class _Returning:
    """Results of this rank's tokens on their way. `parts`: of each source of them (a rank of this
    host, or another host) the rows that come, one tensor for each result."""

    pending: PendingRound
    tokens: Sequence[Tensor]
    parts: Sequence[list[Tensor]]


class HierarchicalTransport(TokenTransport):
    """Moves the tokens of one call over two levels. Each batch of the plan is a segment. Collective
    over the group.

    Args:
        plan: of plan_hierarchical. Keep it and pass it again in a recomputation.
        rounds, name, scheduler: as for RoundsTransport.
    """

    recomputable = ("hidden",)
    starts_ahead = True

    def __init__(
        self, plan: HierarchicalPlan, rounds: P2PRounds, name: str,
        scheduler: WeightGradScheduler | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.rounds, self.name = plan, rounds, name
        self.scheduler = get_backward_scheduler() if scheduler is None else scheduler
        self.probs_dtype: torch.dtype | None = None
        self.returning: _HierarchicalExchange | None = None
        self._started: _HierarchicalExchange | None = None

    def check_experts(self, activation: Activation, num_experts: int, biased: bool) -> None:
        allowed = self.plan.num_local_experts
        if num_experts != allowed:
            raise ConfigError.of(f"{self.name}: experts of a rank", num_experts, allowed)

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H], probs [T, K]"""
        check_tokens(x, probs, (self.plan.num_tokens, self.plan.top_k))
        if probs is not None:
            probs = probs.to(torch.promote_types(probs.dtype, torch.float32)).contiguous()
        return x.contiguous(), probs

    def start(self, x: Tensor, probs: Tensor | None) -> None:
        """Launch the first pieces of the forward."""
        self.probs_dtype = None if probs is None else probs.dtype
        sent = [x] if probs is None else [x, probs]
        self._started = _HierarchicalExchange(self, sent, [torch.empty_like(x)], "")
        self._started.launch()

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _HierarchicalExchange:
        exchange, self._started = self._started, None
        assert exchange is not None, "a started call is finished once"
        return exchange

    def backward(self, grad: Tensor, keep: bool) -> _HierarchicalExchange:
        grad = grad.contiguous()
        results = [torch.empty_like(grad)]
        if self.probs_dtype is not None:
            shape = self.plan.num_tokens, self.plan.top_k
            results.append(grad.new_empty(shape, dtype=self.probs_dtype))
        exchange = _HierarchicalExchange(self, [grad], results, "grad ")
        exchange.launch()
        self.scheduler.run_during(list(exchange.crossing.values())[:1])
        return exchange

    def wait_returning(self) -> None:
        exchange, self.returning = self.returning, None
        if exchange is not None:
            exchange.complete()


class _HierarchicalExchange(Exchange):
    """Dispatch and combine of one call and direction.

    Args:
        sent: what goes to the experts, together. each [T, ...]
        results: what comes back, completed by `complete`. each [T, ...]
        direction: begins the operations' names.
    """

    def __init__(
        self, transport: HierarchicalTransport, sent: Sequence[Tensor], results: list[Tensor],
        direction: str,
    ) -> None:  # fmt: skip
        self.transport, self.sent, self.results = transport, sent, results
        self.plan, self.rounds = transport.plan, transport.rounds
        self.name = f"{transport.name} {direction}"
        self.crossing: dict[int, PendingRound] = {}
        # By piece: tokens to hand on; where results of this rank's own tokens will arrive.
        self._held: dict[int, list[Tensor]] = {}
        self._results: dict[int, tuple[PendingRound, dict[int, list[Tensor]]]] = {}
        # By piece: the tokens that the ranks of this host hand to this one.
        self._handed: dict[int, tuple[PendingRound, list[Tensor]]] = {}
        self._returning: dict[int, _Returning] = {}
        # Of piece 0, which is computed in two batches: its tokens, and what the first has made.
        self._own: list[Tensor] | None = None
        self._made: list[Tensor] | None = None
        self._next = 1

    # Dispatch

    def launch(self) -> None:
        """Start what needs no other rank's computation: tokens cross, own ones are handed out."""
        pieces = self.plan.pieces
        if self.rounds.asks_ahead:
            for index in range(1, len(pieces)):
                self._expect(index)
        all_at_once = self.rounds.device.type != "cuda" or len(pieces[0].hands) == 1
        ahead = len(pieces) if all_at_once else _AHEAD
        for _ in range(ahead):
            self._cross()
        tokens = pieces[0].tokens
        assert tokens is not None
        self._hand_on(0, [t.index_select(0, tokens) for t in self.sent])

    def _expect(self, index: int) -> None:
        """Ask for what a piece brings this rank, and for the results of its own tokens. gloo sends
        nothing that has not been asked for, and a question waits behind the data that is being
        sent: asked at once, data never wait for questions."""
        piece, name = self.plan.pieces[index], self.name
        held = self._room_to_hold(index)
        questions = _transfers({}, _by_peer(piece.receives, held))
        self._held[index] = held
        self.crossing[index] = self.rounds.exchange(f"{name}dispatch", index, questions)
        results = self._room_for_results(index)
        questions = _transfers({}, results)
        self._results[index] = self.rounds.exchange(f"{name}combine", index, questions), results

    def _room_to_hold(self, index: int) -> list[Tensor]:
        """Where the tokens of a piece arrive that this rank hands on."""
        rows = self.plan.pieces[index].num_held
        return [t.new_empty((rows, *t.shape[1:])) for t in self.sent]

    def _room_for_results(self, index: int) -> dict[int, list[Tensor]]:
        return {
            gateway: [r.new_empty((len(tokens), *r.shape[1:])) for r in self.results]
            for gateway, tokens in self.plan.pieces[index].sends
        }

    def _cross(self) -> None:
        """Let the next piece cross to the gateways of other hosts, if there is one."""
        index = self._next
        if index >= len(self.plan.pieces):
            return
        self._next += 1
        piece = self.plan.pieces[index]
        outgoing = {
            gateway: [t.index_select(0, tokens) for t in self.sent]
            for gateway, tokens in piece.sends
        }
        incoming: dict[int, list[Tensor]] = {}
        expected = self.crossing.get(index)
        if expected is None:
            held = self._room_to_hold(index)
            self._held[index], incoming = held, _by_peer(piece.receives, held)
        transfers = _transfers(outgoing, incoming)
        pending = self.rounds.exchange(f"{self.name}dispatch", index, transfers)
        self.crossing[index] = pending
        if expected is not None:  # what was sent needs a wait, too, but not now
            self.crossing[index], (asked, results) = expected, self._results[index]
            self._results[index] = SeveralRounds([pending, asked]), results

    def _hand_on(self, index: int, held: list[Tensor]) -> None:
        """Give held tokens to the ranks of this host that have experts for them."""
        piece, rank = self.plan.pieces[index], self.plan.rank
        if len(piece.arrivals) == 1:  # a lone rank, which computes all that it holds
            self._handed[index] = PendingRound(), held
            return
        outgoing = {
            member: [tensor.index_select(0, positions) for tensor in held]
            for member, positions in piece.hands
        }
        arrived = [t.new_empty((piece.num_arrived, *t.shape[1:])) for t in self.sent]
        incoming = _by_peer(piece.arrivals, arrived)
        for target, source in zip(incoming.pop(rank), outgoing.pop(rank), strict=True):
            target.copy_(source)
        transfers = _transfers(outgoing, incoming)
        pending = self.rounds.exchange(f"{self.name}hand on", index, transfers)
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
            self.crossing.pop(index).wait()
            self._hand_on(index, self._held.pop(index))
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
            found.append(dprobs.to(self.transport.probs_dtype))
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
            sums = [r.new_empty((piece.num_held, *r.shape[1:])) for r in self.results]
            _sum_into(sums, zip(returned.tokens, returned.parts, strict=True))
        outgoing, found = _by_peer(piece.receives, sums), self._results.pop(index, None)
        pending, incoming = found or (None, self._room_for_results(index))
        transfers = _transfers(outgoing, incoming if pending is None else {})
        sent = self.rounds.exchange(f"{self.name}combine", index, transfers)
        pending = sent if pending is None else SeveralRounds([pending, sent])
        tokens = [places for _, places in piece.sends]
        self._returning[index] = _Returning(pending, tokens, list(incoming.values()))

    def _return_to_gateways(self, index: int, parts: list[Tensor]) -> _Returning:
        """Send the sums of this rank's experts back to who handed the tokens on; what comes from
        the ranks of this host for the tokens that this rank handed on."""
        piece, rank = self.plan.pieces[index], self.plan.rank
        outgoing = _by_peer(piece.arrivals, parts)
        mine = outgoing.pop(rank)
        incoming = {
            member: [part.new_empty((len(positions), *part.shape[1:])) for part in parts]
            for member, positions in piece.hands
            if member != rank
        }
        pending = self.rounds.exchange(
            f"{self.name}hand back", index, _transfers(outgoing, incoming)
        )
        found = {**incoming, rank: mine}
        members = [member for member, _ in piece.hands]
        positions = [positions for _, positions in piece.hands]
        return _Returning(pending, positions, [found[member] for member in members])

    def run_queued(self, scheduler: WeightGradScheduler, submit: Callable[[], None]) -> None:
        submit()
        # All of them: the next layer's first exchange is hidden by its own host's tokens.
        scheduler.run_during([returned.pending for returned in self._returning.values()])

    def finish(self, later: bool = False) -> None:
        if not later:
            self.complete()
            return
        self.transport.returning = self
        # Its node in the graph completes it, unless autograd was asked for other inputs only.
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self.transport.wait_returning)

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


def _by_peer(
    blocks: Sequence[tuple[int, int]], tensors: Sequence[Tensor]
) -> dict[int, list[Tensor]]:
    """The consecutive blocks of tensors by (peer, rows)."""
    found: dict[int, list[Tensor]] = {}
    begin = 0
    for peer, rows in blocks:
        found[peer] = [tensor[begin : begin + rows] for tensor in tensors]
        begin += rows
    return found


def _transfers(
    outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]]
) -> list[Transfer]:
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
