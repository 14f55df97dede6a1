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

__all__ = ["RoundsTransport"]


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


class RoundsTransport(TokenTransport):
    """Moves the rows of one call in rounds. Each source's rows are a segment, own rows first.
    Collective over the group.

    Args:
        plan: the counts of this call. Keep it and pass it again in a recomputation.
        rounds: of the group.
        name: of the layer, to identify exchanges: use another for each layer.
        dx_chunks: pieces in which each peer's dX is computed and sent back in backward.
        scheduler: of the call, None for the process-wide one.

    Attributes:
        returning: rounds of a backward whose dX is still travelling.

    Raises:
        ConfigError: the plan is another rank's or group's, or dx_chunks is not at least 1.
    """

    recomputable = ("hidden",)  # rows that arrive are no fewer than rows that are sent
    starts_ahead = True
    permutes = True

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
        self.plan, self.rounds, self.name, self.dx_chunks = plan, rounds, name, dx_chunks
        self.scheduler = get_backward_scheduler() if scheduler is None else scheduler
        self.probs_dtype: torch.dtype | None = None
        self.returning: list[PendingRound] = []
        self._started: _RoundsExchange | None = None

    def check_experts(self, activation: Activation, num_experts: int, biased: bool) -> None:
        allowed = self.plan.num_local_experts
        if num_experts != allowed:
            raise ConfigError.of(f"{self.name}: experts of a rank", num_experts, allowed)

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [T, H] and probabilities [T, K], or rows [N, H] and [N] where the plan has no
        permutation. Probabilities travel with the rows."""
        return self.plan.enter(self.name, x, probs)

    def leave(self, y: Tensor) -> Tensor:
        return self.plan.leave(y)

    def start(self, x: Tensor, probs: Tensor | None) -> None:
        """Launch the first round of the forward."""
        rows = [x] if probs is None else [x, probs]
        self.probs_dtype = None if probs is None else probs.dtype
        self._started = _RoundsExchange(self, rows, [torch.empty_like(x)])
        self._started.launch_dispatch()

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _RoundsExchange:
        exchange, self._started = self._started, None
        assert exchange is not None, "a started call is finished once"
        exchange.keep = keep
        return exchange

    def backward(self, grad: Tensor, keep: bool) -> _RoundsExchange:
        grad = grad.contiguous()
        results = [torch.empty_like(grad)]
        if self.probs_dtype is not None:
            results.append(grad.new_empty(self.plan.num_rows, dtype=self.probs_dtype))
        exchange = _RoundsExchange(self, [grad], results, self.dx_chunks, "grad dispatch", "dX")
        exchange.keep = keep
        exchange.launch_dispatch()
        self.scheduler.run_during([a.pending for a in exchange.arrivals if a is not None])
        return exchange

    def wait_returning(self) -> None:
        returning, self.returning = self.returning, []
        for pending in returning:
            pending.wait()


class _RoundsExchange(Exchange):
    """Dispatch and combine of one call and direction, in rounds.

    Dispatch runs one round ahead of what is computed. The dispatch two rounds ahead is launched
    before a combine: it waits for nobody's computation, the combine does.

    Args:
        rows: what is sent to the experts, which travels together. each [N, ...]
        results: where the results come back, one for each tensor that is sent back. each [N, ...]
        chunks: pieces in which each source's results are computed and sent back.
        dispatch, combine: names of the operations.
    """

    def __init__(
        self, transport: RoundsTransport, rows: Sequence[Tensor], results: list[Tensor],
        chunks: int = 1, dispatch: str = "dispatch", combine: str = "combine",
    ) -> None:  # fmt: skip
        self.transport, self.rows, self.results, self.chunks = transport, rows, results, chunks
        name = transport.name
        self.dispatch, self.combine = f"{name} {dispatch}", f"{name} {combine}"
        self.keep = False
        self.arrivals: list[_Arrival | None] = []
        self.returning: list[PendingRound] = []

    def launch_dispatch(self) -> None:
        """Start the next round of the dispatch, if there is one: its partner (none in a bye) gets
        its rows, and sends those for this rank's experts."""
        rounds, plan, index = self.transport.rounds, self.transport.plan, len(self.arrivals)
        if index == len(rounds.partners):
            return
        peer = rounds.partners[index]
        if peer is None:
            rounds.start(self.dispatch, index, [], [])
            self.arrivals.append(None)
            return
        received = [rows.new_empty((plan.recv_rows[peer], *rows.shape[1:])) for rows in self.rows]
        sent = [rows[plan.send_slice(peer)] for rows in self.rows]
        pending = rounds.start(self.dispatch, index, sent, received)
        self.arrivals.append(_Arrival(peer, pending, received))

    def _groups(self, source: int) -> RowGroups:
        plan = self.transport.plan
        offsets = plan.recv_offsets(source, self.rows[0].device)
        return RowGroups.of_counts(plan.recv_counts[source], offsets)

    def segments(self) -> Iterator[Segment]:
        plan, partners = self.transport.plan, self.transport.rounds.partners
        own = [tensor[plan.send_slice(plan.rank)] for tensor in self.rows]
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
        plan, rounds = self.transport.plan, self.transport.rounds
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

    def finish(self, later: bool = False) -> None:
        transport = self.transport
        transport.returning, self.returning = self.returning, []
        if later:
            # Its node in the graph waits, unless autograd was asked for other inputs only.
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(transport.wait_returning)
        else:
            transport.wait_returning()
