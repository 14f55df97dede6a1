"""Round-robin P2P exchange: each peer's tokens are computed while the next peer's travel.

With 4 ranks, forward and backward of one call (`||`: at the same time)::

    dispatch 0 || local experts            grad dispatch 0 || queued dW of other layers, local dgrad
    dispatch 1 || experts of peer 0        grad dispatch 1 || dgrad of peer 0 -> its dX travels back
    dispatch 2, combine 0 || peer 1        ...
    combine 1 || peer 2                    last dX travelling || dW of fc2 and fc1
    combine 2

Standalone use::

    plan = ExactPlan.from_topk(ids, num_experts, context.rounds(group))
    rows, row_probs = permute(x, plan), permute_probs(probs, plan)
    y = unpermute(overlapped_moe(rows, row_probs, plan, w1, w2, "swiglu", context), plan)

Under Megatron, whose dispatcher has permuted the tokens by expert, with its own parameters::

    plan = ExactPlan.from_counts(tokens_per_expert, context.rounds(ep_group))   # [E] of this rank
    w1 = [expert.linear_fc1.weight for expert in experts.local_experts]         # each [F1, H]
    y = overlapped_moe(permuted_tokens, permuted_probs, plan, w1, w2, "swiglu", context)

Something else (a shared expert) can be computed while the first tokens travel, forward and
backward::

    started = start_overlapped_moe(...)         # the first round leaves
    shared = shared_expert(x)
    y = started.finish() + shared

Legend: N rows of this rank sorted by (destination rank, expert), El local experts, H hidden, F1 / F
widths of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.functions import once_differentiable
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.overlap_context import MultiCardOverlapContext
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound
from megatron_fluid.config import shows_fields_of
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.autograd import Call, make_call, run_experts
from megatron_fluid.moe.biases import GivenBiases, expert_biases
from megatron_fluid.moe.expert_weights import (
    ExpertWeights,
    GivenWeights,
    Matrices,
    expert_projections,
    in_dtype,
)
from megatron_fluid.moe.experts import RowGroups, grouped_product
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["Arrive", "RoundsTransport", "StartedMoE", "overlapped_moe", "start_overlapped_moe"]


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

    Attributes:
        returning: rounds of a backward whose dX is still travelling.
    """

    recomputable = ("hidden",)  # rows that arrive are no fewer than rows that are sent

    def __init__(
        self, plan: ExactPlan, rounds: P2PRounds, name: str, dx_chunks: int,
        scheduler: WeightGradScheduler,
    ) -> None:  # fmt: skip
        self.plan, self.rounds, self.name = plan, rounds, name
        self.dx_chunks, self.scheduler = dx_chunks, scheduler
        self.probs_dtype: torch.dtype | None = None
        self.returning: list[PendingRound] = []
        self._started: _RoundsExchange | None = None

    def start(self, tokens: Tensor, probs: Tensor | None) -> None:
        """Launch the first round of the forward."""
        rows = [tokens] if probs is None else [tokens, probs]
        self.probs_dtype = None if probs is None else probs.dtype
        self._started = _RoundsExchange(self, rows, [torch.empty_like(tokens)])
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
        """Wait for the dX that a backward left travelling."""
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
        assert isinstance(x, Tensor), "make_call's caller leaves fp8 out"

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
            # Arrive waits, unless autograd was asked for other inputs only and leaves it out.
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(transport.wait_returning)
        else:
            transport.wait_returning()


class Arrive(torch.autograd.Function):
    """The identity in forward. Its backward waits for dX, so that whatever was recorded between it
    and the experts runs its own backward while dX travels: autograd goes through nodes latest
    first."""

    @staticmethod
    def forward(
        ctx: Any, transport: RoundsTransport, tokens: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.transport = transport
        ctx.set_materialize_grads(False)
        return tokens.view_as(tokens), None if probs is None else probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_tokens: Tensor | None, grad_probs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.transport.wait_returning()
        return None, grad_tokens, grad_probs


@dataclass
class StartedMoE:
    """A call whose first tokens are travelling. Finish it exactly once."""

    call: Call
    tokens: Tensor
    probs: Tensor | None

    def finish(self) -> Tensor:
        """Compute, combine, and give the result. [N, H]"""
        with torch.autocast(self.tokens.device.type, enabled=False):
            return run_experts(self.call, self.tokens, self.probs)


def start_overlapped_moe(
    tokens: Tensor,
    probs: Tensor | None,
    plan: ExactPlan,
    w1: GivenWeights | ExpertWeights,
    w2: GivenWeights | ExpertWeights,
    activation: str | Activation | Callable[[Tensor], Tensor],
    context: MultiCardOverlapContext | P2PRounds,
    dx_chunks: int = 1,
    scheduler: WeightGradScheduler | None = None,
    name: str = "moe",
    layout: str = "out_in",
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    biases: GivenBiases | None = None,
) -> StartedMoE:
    """Start to send rows to their experts, compute, and bring the results back, overlapped: the
    first round of tokens leaves. Collective over the group.

    Args:
        tokens: rows sorted by (destination rank, expert), as `permute` and Megatron's dispatcher
            give them. [N, H]
        probs: what each row's activation is multiplied with before fc2; they travel with the
            tokens. [N] or None
        plan: the counts of this call. Keep it and pass it again in a recomputation.
        w1, w2: weights of the local experts in tokens' dtype: stacked ([El, F1, H], [El, H, F]), or
            one matrix for each expert ([F1, H], [H, F]), e.g. Megatron's parameters; see `layout`.
            Never copied.
        activation: a name in moe.activations.ACTIVATIONS, or a callable.
        context: a MultiCardOverlapContext bound to the group, or the group's P2PRounds.
        dx_chunks: pieces in which each peer's dX is computed and sent back in backward.
        name: of this layer, for errors and to identify exchanges: use another for each layer.
        layout: "out_in" as above, or "in_out" ([El, H, F1], [El, F, H], also folded into two
            dimensions).
        scheduler, fused_main_grad, recompute: see moe.autograd.make_call. Only "hidden" can be
            recomputed.
        biases: of fc1 [El, F1] and fc2 [El, H], stacked or one for each expert (see
            moe/biases.py), or None.

    Raises:
        ConfigError: shapes, dtypes or the plan do not fit together.
        PeerTimeoutError: a peer did not answer (on a CPU; on a GPU the monitor reports it).
    """
    rounds = context if isinstance(context, P2PRounds) else context.rounds()
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    if isinstance(dx_chunks, bool) or not isinstance(dx_chunks, int) or dx_chunks < 1:
        raise ConfigError.of("dx_chunks", dx_chunks, "an integer of at least 1")
    if plan.world_size != rounds.world_size or plan.rank != rounds.rank:
        raise ConfigError(
            f"{name}: the plan is for rank {plan.rank} of {plan.world_size}, the group's rank is "
            f"{rounds.rank} of {rounds.world_size}"
        )
    count = plan.num_rows
    if tokens.dim() != 2 or tokens.shape[0] != count:
        allowed = f"[{count}, hidden] as the plan says"
        raise ConfigError.of(f"{name}: tokens", list(tokens.shape), allowed)
    if probs is not None and list(probs.shape) != [count]:
        allowed = f"[{count}], one for each row"
        raise ConfigError.of(f"{name}: probs", list(probs.shape), allowed)
    device_type = tokens.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tokens = tokens.to(dtype)
        w1, w2 = in_dtype(w1, dtype), in_dtype(w2, dtype)
        if biases is not None:
            biases = in_dtype(biases[0], dtype), in_dtype(biases[1], dtype)
    act = resolve_activation(activation)
    fcs = expert_projections(w1, w2, plan.num_local_experts, tokens, act, name, layout)
    transport = RoundsTransport(plan, rounds, name, dx_chunks, scheduler)
    added = expert_biases(biases, *fcs, name)
    call = make_call(transport, act, fcs, scheduler, name, fused_main_grad, recompute, added)
    tokens, probs = tokens.contiguous(), None if probs is None else probs.contiguous()
    wanted = tokens.requires_grad or (probs is not None and probs.requires_grad)
    if torch.is_grad_enabled() and wanted:
        tokens, probs = Arrive.apply(transport, tokens, probs)
    transport.start(tokens.detach(), None if probs is None else probs.detach())
    return StartedMoE(call, tokens, probs)


@shows_fields_of(start_overlapped_moe)
def overlapped_moe(*arguments: Any, **settings: Any) -> Tensor:
    """start_overlapped_moe, finished at once: rows to their experts and back. Collective over the
    group.

    Returns:
        The experts' results, in the order of tokens. [N, H]
    """
    return start_overlapped_moe(*arguments, **settings).finish()
