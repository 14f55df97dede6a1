"""Experts behind a tournament of peer rounds: each peer's tokens are computed while the next peer's
travel.

With 4 ranks, forward and backward of one call (`||`: at the same time)::

    dispatch 0 || local experts            grad dispatch 0 || queued dW of other layers, local dgrad
    dispatch 1 || experts of peer 0        grad dispatch 1 || dgrad of peer 0 -> its dX travels back
    dispatch 2, combine 0 || peer 1        ...
    combine 1 || peer 2                    last dX travelling || dW of fc2 and fc1
    combine 2

Standalone use::

    plan = ExactPlan.from_topk(ids, num_experts, context.rounds(group))
    y = unpermute(overlapped_moe(permute(x, plan), permute_probs(probs, plan), plan, w1, w2,
    "swiglu", context), plan)

Under Megatron, whose dispatcher has permuted the tokens by expert, with its own parameters::

    plan = ExactPlan.from_counts(tokens_per_expert, context.rounds(ep_group))          # [E] rows of
    this rank w1 = [expert.linear_fc1.weight for expert in experts.local_experts]               #
    SequentialMLP; each [F1, H] w1 = [getattr(experts.linear_fc1, f"weight{i}") for i in
    range(num_local)]         # TEGroupedMLP; each [F1, H] y = overlapped_moe(permuted_tokens,
    permuted_probs, plan, w1, w2, "swiglu", context, name=f"layer {n} moe")

Something else (a shared expert) can be computed while the first tokens travel, forward and
backward::

    started = start_overlapped_moe(...)         # the first round leaves
    shared = shared_expert(x)
    y = started.finish() + shared

Legend: N rows of this rank sorted by (destination rank, expert), El local experts, H hidden, F1 / F
widths of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.deferred_linear import graph_anchor
from megatron_fluid.backward.functions import goes_on_to, once_differentiable
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.overlap_context import MultiCardOverlapContext
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.experts import (
    ExpertWeights,
    RowGroups,
    accumulate_weight_grad,
    activation_backward,
    expert_major,
    grouped_activated,
    grouped_input_grad,
    grouped_linear,
    grouped_weight_grad,
)
from megatron_fluid.moe.rounds.exchange import Arrival, chunk_bounds, combine_round, dispatch_round
from megatron_fluid.moe.rounds.plan import ExactPlan

__all__ = ["OverlappedMoE", "StartedMoE", "overlapped_moe", "start_overlapped_moe"]


@dataclass
class Segment:
    """One source's rows at this rank's experts, kept from forward to backward.

    Attributes:
        source: the rank that sent them.
        x: the rows. [n, H]
        h: output of fc1. [n, F1]
        probs: [n], or None without probabilities.
    """

    source: int
    x: Tensor
    h: Tensor
    probs: Tensor | None


@dataclass
class GradSegment:
    """What the weight gradients need of one source's rows. The task that computes them owns it."""

    source: int
    x: Tensor
    dh: Tensor
    a: Tensor
    dy: Tensor


@dataclass
class MoECall:
    """Everything about one call but its tensors: made in forward, read in backward, shared with no
    other call."""

    plan: ExactPlan
    rounds: P2PRounds
    activation: Activation
    fc1: ExpertWeights
    fc2: ExpertWeights
    dx_chunks: int
    scheduler: WeightGradScheduler
    name: str
    deferred: bool
    fused_main_grad: bool
    keep: bool
    arrivals: list[Arrival | None] = field(default_factory=list)
    returning: list[PendingRound] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def groups(self, source: int, device: torch.device) -> RowGroups:
        """How one source's rows are divided among the local experts."""
        offsets = self.plan.recv_offsets(source, device) if device.type == "cuda" else None
        return RowGroups(self.plan.recv_counts[source], offsets)


# ---- forward
# ---------------------------------------------------------------------------------------------------------


def launch_dispatch(call: MoECall, rows: Sequence[Tensor]) -> None:
    """Start the next round of the dispatch, if there is one."""
    index = len(call.arrivals)
    if index < len(call.rounds.partners):
        call.arrivals.append(
            dispatch_round(call.rounds, call.plan, f"{call.name} dispatch", index, rows)
        )


def experts_forward(
    call: MoECall, source: int, x: Tensor, probs: Tensor | None
) -> tuple[Segment, Tensor]:
    """One source's rows through fc1, activation and fc2: x [n, H] -> what backward needs, and y [n,
    H]."""
    groups = call.groups(source, x.device)
    h, activated = grouped_activated(x, call.fc1, groups, call.activation, probs)
    return Segment(source, x, h, probs), grouped_linear(activated, call.fc2, groups)


def forward_rounds(
    call: MoECall, tokens: Tensor, probs: Tensor | None
) -> tuple[Tensor, list[Segment]]:
    """The forward of one call: tokens [N, H], probs [N] or None -> out [N, H] and the segments, own
    rows first."""
    rows = [tokens] if probs is None else [tokens, probs]
    out = torch.empty_like(tokens)
    if not call.arrivals:
        launch_dispatch(call, rows)
    own = call.plan.send_slice(call.plan.rank)
    x, p = tokens[own], None if probs is None else probs[own]
    if call.keep and call.rounds.world_size > 1:
        x = x.clone()  # or the segment would keep all of this rank's tokens alive until backward
    segment, y = experts_forward(call, call.plan.rank, x, p)
    out[own] = y
    segments = [segment]
    launch_dispatch(call, rows)
    returning: list[PendingRound] = []
    for index in range(len(call.rounds.partners)):
        arrival = call.arrivals[index]
        results: list[Tensor] = []
        if arrival is not None:
            arrival.pending.wait()
            x, p = arrival.tensors[0], arrival.tensors[1] if probs is not None else None
            segment, y = experts_forward(call, arrival.peer, x, p)
            segments.append(segment)
            results = [y]
        # The dispatch two rounds ahead goes first: it waits for nobody's computation, the combine
        # does.
        launch_dispatch(call, rows)
        returning.append(
            combine_round(call.rounds, call.plan, f"{call.name} combine", index, results, [out])
        )
    for pending in returning:
        pending.wait()
    call.arrivals = []
    return out, segments


# ---- backward
# --------------------------------------------------------------------------------------------------------


def experts_dgrad(
    call: MoECall, segment: Segment, dy: Tensor, emit: Callable[[int, Tensor, Tensor | None], None]
) -> GradSegment:
    """One source's gradients: dy [n, H] -> dX, handed to `emit(chunk, dx, dprobs)` chunk by chunk,
    and what dW needs."""
    groups = call.groups(segment.source, dy.device)
    da = grouped_input_grad(dy, call.fc2, groups)
    dh, a, dprobs = activation_backward(call.activation, segment.h, da, segment.probs)
    for chunk in range(call.dx_chunks):
        begin, end = chunk_bounds(dy.shape[0], chunk, call.dx_chunks)
        dx = grouped_input_grad(dh[begin:end], call.fc1, groups.part(begin, end))
        emit(chunk, dx, None if dprobs is None else dprobs[begin:end])
    return GradSegment(segment.source, segment.x, dh, a, dy)


def backward_rounds(
    call: MoECall, grad_out: Tensor, segments: Sequence[Segment]
) -> tuple[list[Tensor], list[GradSegment]]:
    """dX of one call: grad_out [N, H] -> [dX [N, H], dprobs [N] if there are any], and what dW
    needs.

    The last rounds of dX are still travelling when it returns: they are in `call.returning`.
    """
    grad_out = grad_out.contiguous()
    by_source = {segment.source: segment for segment in segments}
    own_segment = by_source[call.plan.rank]
    grads = [torch.empty_like(grad_out)]
    if own_segment.probs is not None:
        grads.append(own_segment.probs.new_empty(call.plan.num_rows))
    arrivals: list[Arrival | None] = []
    call.returning = []

    def launch() -> None:
        index = len(arrivals)
        if index < len(call.rounds.partners):
            operation = f"{call.name} grad dispatch"
            arrivals.append(dispatch_round(call.rounds, call.plan, operation, index, [grad_out]))

    launch()
    call.scheduler.run_beside([arrival.pending for arrival in arrivals if arrival is not None])
    own = call.plan.send_slice(call.plan.rank)

    def keep(chunk: int, dx: Tensor, dprobs: Tensor | None) -> None:
        begin, end = chunk_bounds(own.stop - own.start, chunk, call.dx_chunks)
        for grad, part in zip(grads, [dx] if dprobs is None else [dx, dprobs], strict=True):
            grad[own.start + begin : own.start + end] = part

    dy = grad_out[own]
    if call.deferred and call.rounds.world_size > 1:
        dy = dy.clone()  # a queued task would keep all of grad_out alive
    grad_segments = [experts_dgrad(call, own_segment, dy, keep)]
    launch()
    for index in range(len(call.rounds.partners)):
        arrival = arrivals[index]
        if arrival is None:
            launch()
            continue
        arrival.pending.wait()

        def send(chunk: int, dx: Tensor, dprobs: Tensor | None, index: int = index) -> None:
            if chunk == 0:
                launch()  # before what waits for this computation, as in forward
            results, part = [dx] if dprobs is None else [dx, dprobs], (chunk, call.dx_chunks)
            operation = f"{call.name} dX {chunk}"
            call.returning.append(
                combine_round(call.rounds, call.plan, operation, index, results, grads, part)
            )

        grad_segments.append(experts_dgrad(call, by_source[arrival.peer], arrival.tensors[0], send))
    return grads, grad_segments


def weight_grads(
    call: MoECall, fc: ExpertWeights, pairs: Sequence[tuple[Tensor, Tensor]], sources: Sequence[int]
) -> list[Tensor]:
    """dW of one projection, a tensor for each of its parameters.

    Args:
        fc: the projection.
        pairs: (gradient of its output [n, out], its input [n, in]) of each source.
        sources: which ranks sent them.
    """
    counts = [call.plan.recv_counts[source] for source in sources]
    dy = expert_major([pair[0] for pair in pairs], counts)
    x = expert_major([pair[1] for pair in pairs], counts)
    totals = [sum(column) for column in zip(*counts, strict=True)]
    offsets = None
    if dy.is_cuda:
        table = torch.stack([call.plan.recv_offsets(source, dy.device) for source in sources])
        offsets = table.sum(0, dtype=torch.int32)
    groups = RowGroups(totals, offsets)
    if call.fused_main_grad:
        return accumulate_weight_grad(dy, x, fc, groups)
    return fc.as_gradients(grouped_weight_grad(dy, x, fc, groups))


class OverlappedMoE(torch.autograd.Function):
    """Autograd's view of forward_rounds and backward_rounds: it saves, restores and orders, and
    computes nothing.

    Inputs: tokens [N, H], probs [N] or None, an anchor that keeps it in the graph, the call, and
    the parameters (which are ordinary inputs; while the scheduler is enabled there are none, and
    the scheduler delivers their gradients).
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        probs: Tensor | None,
        anchor: Tensor | None,
        call: MoECall,
        *params: Tensor,
    ) -> Tensor:
        out, segments = forward_rounds(
            call, tokens.detach(), None if probs is None else probs.detach()
        )
        ctx.call, ctx.has_probs, ctx.has_anchor = call, probs is not None, anchor is not None
        call.sources = [segment.source for segment in segments]
        if not call.keep:
            return out
        saved: list[Tensor] = []
        for segment in segments:
            saved += [segment.x, segment.h] + ([segment.probs] if segment.probs is not None else [])
        weights = params or tuple(p.detach() for p in (*call.fc1.params, *call.fc2.params))
        ctx.save_for_backward(*saved, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call: MoECall = ctx.call
        saved = list(ctx.saved_tensors)
        width = 3 if ctx.has_probs else 2
        segments = [
            Segment(
                source,
                saved[i * width],
                saved[i * width + 1],
                saved[i * width + 2] if ctx.has_probs else None,
            )
            for i, source in enumerate(call.sources)
        ]
        grads, grad_segments = backward_rounds(call, grad_out, segments)
        del saved, segments
        sources = [segment.source for segment in grad_segments]

        def fc2() -> list[Tensor]:
            return weight_grads(call, call.fc2, [(s.dy, s.a) for s in grad_segments], sources)

        def fc1() -> list[Tensor]:
            return weight_grads(call, call.fc1, [(s.dh, s.x) for s in grad_segments], sources)

        needed = ctx.needs_input_grad[4:]
        dw: list[Tensor | None] = []
        if call.deferred:
            wanted = ctx.has_anchor and goes_on_to(ctx.next_functions[-1])
            if wanted and call.fc2.requires_grad():
                call.scheduler.submit(f"{call.name} fc2", call.fc2.params, fc2)
            if wanted and call.fc1.requires_grad():
                call.scheduler.submit(f"{call.name} fc1", call.fc1.params, fc1)
            # One beside this exchange; the other is for the next layer's first one.
            call.scheduler.run_beside(call.returning, max_tasks=1)
        else:
            split = len(call.fc1.params)
            dw2: list[Any] = list(fc2()) if any(needed[split:]) else [None] * len(call.fc2.params)
            dw1: list[Any] = list(fc1()) if any(needed[:split]) else [None] * split
            dw = dw1 + dw2
        if ctx.needs_input_grad[0]:
            # _Arrive waits, unless autograd was asked for other inputs only and leaves it out.
            torch.autograd.Variable._execution_engine.queue_callback(partial(wait_returning, call))  # type: ignore[attr-defined]
        else:
            wait_returning(call)
        return grads[0], grads[1] if ctx.has_probs else None, None, None, *dw


def wait_returning(call: MoECall) -> None:
    """Wait for what backward_rounds left travelling."""
    returning, call.returning = call.returning, []
    for pending in returning:
        pending.wait()


class _Arrive(torch.autograd.Function):
    """The identity in forward. Its backward waits for dX, so that whatever was recorded between it
    and OverlappedMoE runs its own backward while dX travels: autograd goes through nodes latest
    first."""

    @staticmethod
    def forward(
        ctx: Any, call: MoECall, tokens: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tokens.view_as(tokens), None if probs is None else probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_tokens: Tensor | None, grad_probs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        wait_returning(ctx.call)
        return None, grad_tokens, grad_probs


@dataclass
class StartedMoE:
    """A call whose first tokens are travelling. Finish it exactly once."""

    call: MoECall
    tokens: Tensor
    probs: Tensor | None

    def finish(self) -> Tensor:
        """Compute, combine, and give the result. [N, H]"""
        call = self.call
        params = () if call.deferred else (*call.fc1.params, *call.fc2.params)
        trained = call.fc1.requires_grad() or call.fc2.requires_grad()
        anchor = graph_anchor(self.tokens.device) if trained and torch.is_grad_enabled() else None
        with torch.autocast(self.tokens.device.type, enabled=False):
            return OverlappedMoE.apply(self.tokens, self.probs, anchor, call, *params)


def start_overlapped_moe(
    tokens: Tensor,
    probs: Tensor | None,
    plan: ExactPlan,
    w1: Tensor | Sequence[Tensor],
    w2: Tensor | Sequence[Tensor],
    activation: str | Activation | Callable[[Tensor], Tensor],
    context: MultiCardOverlapContext | P2PRounds,
    dx_chunks: int = 1,
    scheduler: WeightGradScheduler | None = None,
    name: str = "moe",
    layout: str = "out_in",
    fused_main_grad: bool = False,
) -> StartedMoE:
    """Start overlapped_moe: the first round of tokens leaves. The arguments are those of
    overlapped_moe."""
    rounds = context if isinstance(context, P2PRounds) else context.rounds()
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    if isinstance(dx_chunks, bool) or not isinstance(dx_chunks, int) or dx_chunks < 1:
        raise ConfigError.of("dx_chunks", dx_chunks, "an integer of at least 1")
    if plan.world_size != rounds.world_size or plan.rank != rounds.rank:
        raise ConfigError(
            f"{name}: the plan is for rank {plan.rank} of {plan.world_size}, the group's rank is "
            f"{rounds.rank} of "
            f"{rounds.world_size}"
        )
    if tokens.dim() != 2 or tokens.shape[0] != plan.num_rows:
        raise ConfigError.of(
            f"{name}: tokens", list(tokens.shape), f"[{plan.num_rows}, hidden] as the plan says"
        )
    if probs is not None and list(probs.shape) != [plan.num_rows]:
        raise ConfigError.of(
            f"{name}: probs", list(probs.shape), f"[{plan.num_rows}], one for each row"
        )
    device_type = tokens.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tokens = tokens.to(dtype)
        w1 = w1.to(dtype) if isinstance(w1, Tensor) else [w.to(dtype) for w in w1]
        w2 = w2.to(dtype) if isinstance(w2, Tensor) else [w.to(dtype) for w in w2]
    act = resolve_activation(activation)
    hidden, experts = tokens.shape[1], plan.num_local_experts
    fc1 = ExpertWeights(w1, experts, layout, f"{name}: weight1", in_width=hidden)
    fc2 = ExpertWeights(
        w2, experts, layout, f"{name}: weight2", in_width=act.ffn_width(fc1.out_width)
    )
    if fc1.in_width != hidden or fc2.out_width != hidden:
        raise ConfigError.of(
            f"{name}: hidden size of the weights",
            [fc1.in_width, fc2.out_width],
            f"{hidden} as tokens",
        )
    if fc2.in_width != act.ffn_width(fc1.out_width):
        raise ConfigError.of(
            f"{name}: width of weight2",
            fc2.in_width,
            f"{act.ffn_width(fc1.out_width)} ({act.name} of {fc1.out_width})",
        )
    if not fc1.params[0].dtype == fc2.params[0].dtype == tokens.dtype:
        raise ConfigError.of(
            f"{name}: dtype of the weights", fc1.params[0].dtype, f"{tokens.dtype} as tokens"
        )
    keep = torch.is_grad_enabled()
    deferred = keep and scheduler.is_enabled() and fc1.deferrable() and fc2.deferrable()
    fused = fused_main_grad and all(hasattr(p, "main_grad") for p in (*fc1.params, *fc2.params))
    call = MoECall(plan, rounds, act, fc1, fc2, dx_chunks, scheduler, name, deferred, fused, keep)
    tokens = tokens.contiguous()
    probs = None if probs is None else probs.contiguous()
    if torch.is_grad_enabled() and (
        tokens.requires_grad or (probs is not None and probs.requires_grad)
    ):
        tokens, probs = _Arrive.apply(call, tokens, probs)
    launch_dispatch(call, [t.detach() for t in (tokens, probs) if t is not None])
    return StartedMoE(call, tokens, probs)


def overlapped_moe(
    tokens: Tensor,
    probs: Tensor | None,
    plan: ExactPlan,
    w1: Tensor | Sequence[Tensor],
    w2: Tensor | Sequence[Tensor],
    activation: str | Activation | Callable[[Tensor], Tensor],
    context: MultiCardOverlapContext | P2PRounds,
    dx_chunks: int = 1,
    scheduler: WeightGradScheduler | None = None,
    name: str = "moe",
    layout: str = "out_in",
    fused_main_grad: bool = False,
) -> Tensor:
    """Send rows to their experts, compute, and bring the results back, overlapped. Collective over
    the group.

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
        scheduler: None takes the process-wide one. If it is enabled and the weights are leaves,
            their gradients are deferred; else they are computed beside this call's own exchange and
            returned to autograd.
        name: of this layer, for errors and for telling exchanges apart: use another for each layer.
        layout: "out_in" as above, or "in_out" ([El, H, F1], [El, F, H], also folded into two
            dimensions).
        fused_main_grad: add weight gradients straight to `param.main_grad` (Megatron's gradient
            accumulation fusion).

    Returns:
        The experts' results, in the order of tokens. [N, H]

    Raises:
        ConfigError: shapes, dtypes or the plan do not fit together.
        PeerTimeoutError: a peer did not answer (on a CPU; on a GPU the monitor reports it).
    """
    return start_overlapped_moe(
        tokens,
        probs,
        plan,
        w1,
        w2,
        activation,
        context,
        dx_chunks,
        scheduler,
        name,
        layout,
        fused_main_grad,
    ).finish()
