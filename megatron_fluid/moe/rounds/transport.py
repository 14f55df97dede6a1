"""Round-robin P2P exchange: each peer's tokens are computed while the next peer's travel.

With 4 ranks, forward and backward of one call (`||`: at the same time)::

    dispatch 0 || local experts            grad dispatch 0 || queued dW of other layers, local dgrad
    dispatch 1 || experts of peer 0        grad dispatch 1 || dgrad of peer 0 -> its dX travels back
    dispatch 2, combine 0 || peer 1        ...
    combine 1 || peer 2                    last dX travelling || dW of fc2 and fc1
    combine 2

Use::

    plan = ExactPlan.from_topk(ids, num_experts, rounds)
    call = ExpertCall(x=x, probs=probs, w1=w1, w2=w2, num_experts=El)
    started = start_experts(call, RoundsTransport(plan, rounds, "layer 1"))   # first round leaves
    shared = shared_expert(x)               # anything else, while the first tokens travel
    y = started.finish() + shared

A caller that has permuted its tokens by expert makes its plan of counts, without a permutation.

Legend: N rows of this rank sorted by (destination rank, expert), El local experts, H hidden, F1 / F
widths of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import Matrices, RowGroups, grouped_product
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["P2PExchange", "P2PTransport", "RoundsTransport"]


@dataclass
class _Arrival:
    """What a peer sends in a round: its rows of each tensor, readable after `pending.wait()`."""

    peer: int
    pending: PendingRound
    tensors: list[Tensor]


def _chunk_bounds(rows: int, index: int, chunks: int) -> tuple[int, int]:
    """Begin and end of one of nearly equal chunks; sender and receiver cut alike."""
    return index * rows // chunks, (index + 1) * rows // chunks


def _segment(tensors: Sequence[Tensor], groups: RowGroups, index: int) -> Segment:
    """tensors: rows, and their probabilities if those travel."""
    return Segment(tensors[0], groups, tensors[1] if len(tensors) > 1 else None, index)


class P2PTransport(TokenTransport):
    """A transport over P2P rounds: `start` launches the forward's dispatch, and a backward may
    leave dX in flight. Collective over the group.

    Args:
        plan: of this call. Keep it and pass it again in a recomputation.
        rounds: of the group.
        name: of the layer, to identify exchanges: use another for each layer.
        scheduler: of the call, None for the process-wide one.

    Attributes:
        exchange: the class of both directions' exchanges.
        returning: the exchange of a backward whose dX is still travelling.
    """

    exchange: type[P2PExchange]
    recomputable = ("hidden",)  # rows that arrive are no fewer than rows that are sent
    starts_ahead = True

    def __init__(
        self, plan: Any, rounds: P2PRounds, name: str, scheduler: WeightGradScheduler | None = None
    ) -> None:
        self.plan, self.rounds, self.name = plan, rounds, name
        self.scheduler = get_backward_scheduler() if scheduler is None else scheduler
        self.probs_like: tuple[torch.Size, torch.dtype] | None = None
        self.returning: P2PExchange | None = None
        self._started: P2PExchange | None = None

    def check_experts(self, activation: Activation, num_experts: int, biased: bool) -> None:
        allowed = self.plan.num_local_experts
        if num_experts != allowed:
            raise ConfigError.of(f"{self.name}: experts of a rank", num_experts, allowed)

    def start(self, x: Tensor, probs: Tensor | None) -> None:
        """Launch the first sends of the forward."""
        self.probs_like = None if probs is None else (probs.shape, probs.dtype)
        sent = [x] if probs is None else [x, probs]
        self._started = self.exchange(self, sent, [torch.empty_like(x)], False)
        self._started.launch()

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> P2PExchange:
        exchange, self._started = self._started, None
        assert exchange is not None, "a started call is finished once"
        exchange.keep = keep
        return exchange

    def backward(self, grad: Tensor, keep: bool) -> P2PExchange:
        grad = grad.contiguous()
        results = [torch.empty_like(grad)]
        if self.probs_like is not None:
            shape, dtype = self.probs_like
            results.append(grad.new_empty(shape, dtype=dtype))
        exchange = self.exchange(self, [grad], results, True)
        exchange.keep = keep
        self.scheduler.run_during(exchange.launch())
        return exchange

    def wait_returning(self) -> None:
        exchange, self.returning = self.returning, None
        if exchange is not None:
            exchange.complete()


class P2PExchange(Exchange):
    """Dispatch and combine of one call and direction over P2P rounds.

    Args:
        sent: what goes to the experts, together. each [N, ...] or [T, ...]
        results: what comes back, finished by `complete`. each [N, ...] or [T, ...]
        backward: whether gradients are exchanged.

    Attributes:
        keep: whether the caller holds the segments' rows after the exchange.
    """

    keep = False

    def __init__(
        self, transport: Any, sent: Sequence[Tensor], results: list[Tensor], backward: bool
    ) -> None:
        self.transport, self.sent, self.results = transport, sent, results
        self.plan, self.rounds = transport.plan, transport.rounds

    def launch(self) -> Sequence[PendingRound]:
        """Start what needs no other rank's computation. Returns what queued weight gradients of
        other layers may overlap with."""
        raise NotImplementedError

    def complete(self) -> None:
        """Wait for all results."""
        raise NotImplementedError

    def finish(self, later: bool = False) -> None:
        if not later or torch.is_anomaly_enabled():  # which looks for NaN in dX at once
            self.complete()
            return
        self.transport.returning = self
        self.sent = ()  # all is dispatched, and the layers below need the memory
        # Its node in the graph waits, unless autograd was asked for other inputs only.
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(self.transport.wait_returning)


class _RoundsExchange(P2PExchange):
    """Dispatch and combine in rounds. In the backward each source's results are computed and sent
    back in chunks.

    Dispatch runs one round ahead of what is computed. The dispatch two rounds ahead is launched
    before a combine: it waits for nobody's computation, the combine does.
    """

    def __init__(
        self, transport: RoundsTransport, sent: Sequence[Tensor], results: list[Tensor],
        backward: bool,
    ) -> None:  # fmt: skip
        super().__init__(transport, sent, results, backward)
        self.chunks = transport.dx_chunks if backward else 1
        dispatch, combine = ("grad dispatch", "dX") if backward else ("dispatch", "combine")
        self.dispatch, self.combine = f"{transport.name} {dispatch}", f"{transport.name} {combine}"
        self.arrivals: list[_Arrival | None] = []
        self.returning: list[PendingRound] = []

    def launch(self) -> list[PendingRound]:
        self.launch_dispatch()
        return [arrival.pending for arrival in self.arrivals if arrival is not None]

    def launch_dispatch(self) -> None:
        """Start the next round of the dispatch, if there is one: its partner (none in a bye) gets
        its rows, and sends those for this rank's experts."""
        rounds, plan, index = self.rounds, self.plan, len(self.arrivals)
        if index == len(rounds.partners):
            return
        peer = rounds.partners[index]
        if peer is None:
            rounds.start(self.dispatch, index, [], [])
            self.arrivals.append(None)
            return
        received = [rows.new_empty((plan.recv_rows[peer], *rows.shape[1:])) for rows in self.sent]
        sent = [rows[plan.send_slice(peer)] for rows in self.sent]
        pending = rounds.start(self.dispatch, index, sent, received)
        self.arrivals.append(_Arrival(peer, pending, received))

    def _groups(self, source: int) -> RowGroups:
        plan = self.plan
        offsets = plan.recv_offsets(source, self.sent[0].device)
        return RowGroups.of_counts(plan.recv_counts[source], offsets)

    def segments(self) -> Iterator[Segment]:
        plan, partners = self.plan, self.rounds.partners
        own = [tensor[plan.send_slice(plan.rank)] for tensor in self.sent]
        if self.keep and plan.world_size > 1:
            own[0] = own[0].clone()  # else a segment keeps all of this rank's rows alive
        yield _segment(own, self._groups(plan.rank), -1)
        del own
        self.launch_dispatch()
        for index in range(len(partners)):
            if len(self.arrivals) < index + 2:
                self.launch_dispatch()  # no combine has: they all come after the last segment
            arrival = self.arrivals[index]
            if arrival is None:
                self.launch_dispatch()
                continue
            arrival.pending.wait()
            self.arrivals[index] = None  # the segment is its caller's
            segment = _segment(arrival.tensors, self._groups(arrival.peer), index)
            del arrival
            yield segment
            del segment

    def combine_product(
        self, segment: Segment, x: Tensor | Fp8Rows, matrices: Matrices,
        row_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert isinstance(x, Tensor), "rounds carry no fp8"

        def product(begin: int, end: int) -> Tensor:
            return grouped_product(x[begin:end], matrices, segment.groups.part(begin, end))

        self._send_back(segment, x.shape[0], product, row_grad)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        self._send_back(segment, rows.shape[0], lambda begin, end: rows[begin:end], row_grad)

    def _send_back(
        self, segment: Segment, count: int, rows: Callable[[int, int], Tensor],
        row_grad: Tensor | None,
    ) -> None:  # fmt: skip
        """Send the `count` rows of a segment back, in chunks: rows(begin, end) makes each."""
        plan, rounds = self.plan, self.rounds
        peer = plan.rank if segment.index < 0 else rounds.partners[segment.index]
        assert peer is not None  # a bye has no segment
        mine = plan.send_slice(peer)
        for chunk in range(self.chunks):
            begin, end = _chunk_bounds(count, chunk, self.chunks)
            made = rows(begin, end)
            parts = [made] if row_grad is None else [made, row_grad[begin:end]]
            first, last = _chunk_bounds(mine.stop - mine.start, chunk, self.chunks)
            back = [result[mine.start + first : mine.start + last] for result in self.results]
            if segment.index < 0:
                for target, part in zip(back, parts, strict=True):
                    target.copy_(part)
                continue
            if chunk == 0:
                self.launch_dispatch()
            name = f"{self.combine} {chunk}"
            self.returning.append(rounds.start(name, segment.index, parts, back))

    def run_queued(self, scheduler: WeightGradScheduler, submit: Callable[[], None]) -> None:
        submit()
        # One overlapped with this exchange; the other is for the next layer's first one.
        scheduler.run_during(self.returning, max_tasks=1)

    def complete(self) -> None:
        for pending in self.returning:
            pending.wait()
        self.returning = []


class RoundsTransport(P2PTransport):
    """Moves the rows of one call in rounds. Each source's rows are a segment, own rows first.

    Args:
        plan: the counts of this call.
        rounds, name, scheduler: as of P2PTransport.
        dx_chunks: pieces in which each peer's dX is computed and sent back in backward.

    Raises:
        ConfigError: the plan is another rank's or group's, or dx_chunks is not at least 1.
    """

    permutes = True
    exchange = _RoundsExchange

    def __init__(
        self, plan: ExactPlan, rounds: P2PRounds, name: str, dx_chunks: int = 1,
        scheduler: WeightGradScheduler | None = None,
    ) -> None:  # fmt: skip
        if isinstance(dx_chunks, bool) or not isinstance(dx_chunks, int) or dx_chunks < 1:
            raise ConfigError.of("dx_chunks", dx_chunks, "an integer of at least 1")
        if plan.world_size != rounds.world_size or plan.rank != rounds.rank:
            raise ConfigError(
                f"{name}: the plan is for rank {plan.rank} of {plan.world_size}, the group's rank "
                f"is {rounds.rank} of {rounds.world_size}"
            )
        super().__init__(plan, rounds, name, scheduler)
        self.dx_chunks = dx_chunks

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [T, H] and probabilities [T, K], or rows [N, H] and [N] where the plan has no
        permutation. Probabilities travel with the rows."""
        return self.plan.enter(self.name, x, probs)

    def leave(self, y: Tensor) -> Tensor:
        return self.plan.leave(y)
