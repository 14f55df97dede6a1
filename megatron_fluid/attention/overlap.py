"""Context-parallel self-attention (Ulysses), forward and backward, over any ``HeadExchange``.

Legend: S sequence, s local rows, B batch, H hidden, D head dim, p a peer, g a head group, C columns
of a packed part.

Forward::

    project p's heads -> send to p      overlaps with the projection of the next peer's heads
    take own heads, normalised and rotated
    attend g -> send every peer its rows      overlaps with attention of the next head group
    collect the rows of all heads -> output projection

Backward computes dX first. The gradient of the attention output is sent as heads are, those of q, k
and v as rows are, one head group while the next one's are computed. dW of the output projection
overlaps with the exchange that has less to hide behind (``late_weight_gradient``), dW of the QKV
projection is last. With the deferred scheduler on, both are queued and overlap with later exchanges
(of the layers below). P2P rounds also cut the rows of backward into chunks (``dx_chunks``): one is
projected while the next moves.

Received rows are laid out by heads, so each projection of a chunk of rows is one GEMM over all
heads, whose sum is rounded once. One GEMM per peer into a float32 matrix could start earlier, but
reads and writes that matrix once a peer, which costs more than it hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.call import (
    AttentionCall,
    AttentionState,
    AttentionWeights,
    GroupState,
    attend,
    attend_backward,
    core_name,
    flat,
    names_of,
    weight_gradient,
)
from megatron_fluid.attention.exchange.protocol import (
    Prepare,
    Projection,
    RowsInFlight,
    matmul,
    wide_dtype,
)
from megatron_fluid.attention.gate import gate_backward, gated, join_gate, split_gate
from megatron_fluid.backward.autograd import (
    Readiness,
    apply,
    once_differentiable,
    readiness_of,
    weights_wanted,
)
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import FluidError

__all__ = [
    "AttentionCall",
    "AttentionState",
    "AttentionWeights",
    "backward",
    "forward",
    "gather_slower_reason",
    "overlap_slower_reason",
    "overlapped_attention",
    "weight_gradient",
]


# `auto` on GPUs keeps projections around the exchange where overlapping them is slower. Reasons and
# figures: docs/tuning_notes.md#attention.
_REMEDY = "--fluid-cp-backend nvlink overlaps all the same"


def overlap_slower_reason(shards: int) -> str | None:
    """Return why self-attention is faster with its projections around the exchange, or None.

    Args:
        shards: tensor-parallel ranks that hold the rows of the sequence in parts, between linears
            that overlap the gathers and scatters of these rows with their GEMMs; 1: none.
    """
    if shards == 1:
        return None
    return f"auto: under sequence parallelism the linears overlap their own gathers ({_REMEDY})"


def gather_slower_reason(compressed: int, exchanged: int) -> str | None:
    """Return why latent attention is faster where heads are exchanged than where compressed rows
    are gathered and projected to a rank's heads, or None.

    A gather passes behind its projection, an exchange of heads does not: it may move up to twice
    the bytes.

    Args:
        compressed: columns of the rows that are gathered, for queries, keys and values.
        exchanged: columns of queries, keys and values of the heads of one rank.
    """
    if compressed < 2 * exchanged:
        return None
    return (
        f"auto: compressed rows have {compressed} columns, the heads of a rank {exchanged} "
        f"({_REMEDY})"
    )


def _at(tensor: Tensor, rows: slice) -> Tensor:
    """tensor[rows], without a view of all of it."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


def forward(
    x: Tensor, weights: AttentionWeights, call: AttentionCall, keep: bool
) -> tuple[Tensor, AttentionState | None]:
    """Self-attention of this rank's rows: x [s, B, H] -> y [s, B, H], and with ``keep`` what
    backward needs. With ``call.shards`` x is [s / T, B, H]."""
    if call.shards is not None:
        x = call.shards.gather(x)
    exchange, heads = call.exchange, call.exchange.heads
    length, batch = exchange.sequence.length, x.shape[1]
    prepare = Prepare(call.norm(weights), call.table)
    qkv, of_gate = _projections(weights, call)
    sent = exchange.project(f"{call.name} qkv", x, qkv)
    gate = None
    if of_gate is not None:  # while heads move
        gate = x.new_empty((*x.shape[:2], of_gate.matrix.shape[1]))
        matmul(x, of_gate, gate)
    states: list[GroupState] = []
    returning = []
    for g in range(heads.groups):
        part = heads.part(exchange.rank, g)
        raw, packed = sent.take(g, prepare)
        attended, state = attend(call, part, packed, weights.core, keep)
        output = attended.contiguous().view(length, batch, part.output_width)
        rows = exchange.send_rows(f"{call.name} output", g, output, True)
        returning.append(rows)
        if state is not None:
            state.raw = raw
            states.append(state)
        del raw, packed, attended, state, output, rows
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = Projection(weights.w_out.t(), weights.b_out)
    gathered = exchange.collect_all(returning, True)
    matmul(gathered if gate is None else gated(gathered, gate), out, y)
    return y, AttentionState(states, gathered, gate) if keep else None


def _projections(
    weights: AttentionWeights, call: AttentionCall
) -> tuple[Projection, Projection | None]:
    """Those of queries, keys and values, and of the output gate."""
    if not call.output_gate:
        return Projection(weights.w_qkv.t(), weights.b_qkv), None
    heads = call.exchange.heads
    qkv, gate = split_gate(weights.w_qkv, heads)
    biases = (None, None) if weights.b_qkv is None else split_gate(weights.b_qkv, heads)
    return Projection(qkv.t(), biases[0]), Projection(gate.t(), biases[1])


@dataclass(frozen=True)
class Deferral:
    """The queue of weight gradients, and the parameters "qkv" and "output" that want theirs."""

    scheduler: WeightGradScheduler
    parameters: dict[str, Tensor]
    ready: Readiness

    def submit(self, call: AttentionCall, what: str, compute: Callable[[], Tensor]) -> None:
        if (parameter := self.parameters.get(what)) is not None:
            name = f"{call.name} dW {what}"
            self.scheduler.submit(name, [parameter], lambda: [compute()])


def backward(
    dy: Tensor,
    x: Tensor,
    weights: AttentionWeights,
    state: AttentionState,
    call: AttentionCall,
    wanted: frozenset[str],
    deferral: Deferral | None = None,
    retain: bool = False,
) -> dict[str, Tensor]:
    """Gradients of ``forward`` for dy [s, B, H]: of "x", as it was given, and of AttentionWeights'
    members that are wanted, by name. ``deferral`` queues dW of both projections; ``retain`` keeps
    the attention kernel's graph for another call."""
    exchange, heads, chunks = call.exchange, call.exchange.heads, call.dx_chunks
    dy, gathered = dy.contiguous(), state.gathered
    assert gathered is not None, "its tensors are restored"
    result: dict[str, Tensor] = {}

    out = Projection(weights.w_out, None, True)
    of_gate: Tensor | None = None
    if state.gate is None:
        sent = exchange.project(f"{call.name} d-output", dy, out, chunks)
    else:
        of_output = torch.empty_like(gathered)
        matmul(dy, out, of_output)
        of_attended, of_gate = gate_backward(of_output, gathered, state.gate)
        sent = exchange.send_heads(f"{call.name} d-output", of_attended, True)
        gathered = gated(gathered, state.gate)  # what the output projection was given
        del of_output, of_attended
    projected = gathered
    if deferral is not None:
        # Tasks of the layers above, while the gradient moves.
        deferral.scheduler.run_during(sent.pending())
        deferral.submit(call, "output", lambda: call.output_gradient(dy, projected))
    elif "w_out" in wanted and not exchange.late_weight_gradient:
        result["w_out"] = call.output_gradient(dy, projected)
    if "b_out" in wanted:
        result["b_out"] = flat(dy).sum(0)
    if call.shards is not None and (deferral is not None or "w_qkv" in wanted):
        x = call.shards.gather(x)  # beside the exchange

    returning: list[RowsInFlight] = []
    for g, group in enumerate(state.groups):
        _, gradient = sent.take(g)
        part = heads.part(exchange.rank, g)
        packed, of_norms, of_core = attend_backward(call, part, weights, group, gradient, retain)
        shared = dict(zip(("q_norm", "k_norm"), of_norms or (), strict=False))
        shared |= {core_name(i): t.to(wide_dtype(t.dtype)) for i, t in enumerate(of_core)}
        for name, of_group in shared.items():
            result[name] = result[name] + of_group if name in result else of_group
        returning.append(exchange.send_rows(f"{call.name} d-qkv", g, packed, False, chunks))
        del gradient, packed
    if deferral is not None:
        deferral.scheduler.run_during([arrival for back in returning for arrival in back.waits])
    elif "w_out" in wanted and exchange.late_weight_gradient:
        result["w_out"] = call.output_gradient(dy, projected)
    dx = x.new_empty((*dy.shape[:2], weights.w_qkv.shape[1])) if "x" in wanted else None
    of_all: Tensor | None = None
    for now, fused in exchange.collect(returning, False):
        of_rows = _at(fused, now)
        if of_gate is not None:
            of_rows = join_gate(of_rows, _at(of_gate, now), heads)
            if of_all is None:
                of_all = x.new_empty((*dy.shape[:2], weights.w_qkv.shape[0]))
            of_all[now] = of_rows
        else:
            of_all = fused
        if dx is not None:
            matmul(of_rows, Projection(weights.w_qkv, None), _at(dx, now))
    assert of_all is not None
    of_qkv = of_all
    if dx is not None:
        result["x"] = dx if call.shards is None else call.shards.scatter_sum(dx)
    if deferral is not None:
        deferral.submit(call, "qkv", lambda: call.qkv_gradient(of_qkv, x))
    elif "w_qkv" in wanted:
        result["w_qkv"] = call.qkv_gradient(of_qkv, x)
    if "b_qkv" in wanted:
        result["b_qkv"] = flat(of_qkv).sum(0)
    for name in ("q_norm", "k_norm"):
        if name in result:
            result[name] = result[name].to(weights.q_norm.dtype)  # type: ignore[union-attr]
    for index, tensor in enumerate(weights.core):
        result[core_name(index)] = result[core_name(index)].to(tensor.dtype)
    return result


class _OverlappedAttention(torch.autograd.Function):
    """``forward`` and ``backward`` as one node; the state of a call lives in its context alone."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        keep: bool,
        deferral: Deferral | None,
        anchor: Tensor | None,
        x: Tensor,
        *members: Tensor | None,
    ) -> Tensor:
        weights = AttentionWeights.of(members)
        y, state = forward(x, weights, call, keep)
        if keep:
            assert state is not None
            ctx.save_for_backward(x, *members, *state.release())
            ctx.call, ctx.state, ctx.deferral = call, state, deferral
            ctx.has_anchor, ctx.anchor, ctx.core = anchor is not None, 0, len(weights.core)
            if deferral is not None:
                deferral.ready.enter(ctx)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        names = names_of(ctx.core)
        saved, state = ctx.saved_tensors, ctx.state
        if state is None:
            text = "a second backward through a graph that was not retained"
            raise FluidError(f"{ctx.call.name}: {text}")
        x, *members = saved[: len(names)]
        state.restore(saved[len(names) :])
        del saved
        needs = zip(names, ctx.needs_input_grad[4:], strict=True)
        wanted = frozenset(name for name, need in needs if need)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        alone = ctx.has_anchor and not weights_wanted(ctx.next_functions[ctx.anchor])
        deferral, weights = None if alone else ctx.deferral, AttentionWeights.of(members)
        result = backward(grads[0], x, weights, state, ctx.call, wanted, deferral, retain)
        if deferral is not None:
            deferral.ready.leave(ctx)
        if retain:
            state.release()
        else:
            ctx.state = None  # free the activations now, not when the loss goes out of scope
        results = (result.get(name) if name in wanted else None for name in names)
        return None, None, None, None, *results


def overlapped_attention(
    x: Tensor,
    weights: AttentionWeights,
    call: AttentionCall,
    scheduler: WeightGradScheduler | None = None,
) -> Tensor:
    """Self-attention of this rank's rows over ``call.exchange``, differentiable once.

    Args:
        x: [s, B, H], this rank's rows, in the order of ``call.sequence``; with ``call.shards`` a
            part of them.
        weights: the same on every rank. Their gradients are this rank's share: sum them over the
            group.
        call: layout, transport and kernel; every rank of the group calls with an equal one.
        scheduler: where dW of the two projections is queued while it is enabled and both weights
            are leaves of the graph; None computes it in this backward.

    Returns:
        y [s, B, H].

    Raises:
        PeerTimeoutError: a peer did not answer within the exchange's timeout.
    """
    members = list(weights.all())
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *members))
    deferral, anchor = None, None
    named = zip(("qkv", "output"), members[:2], strict=True)
    mine = {name: t for name, t in named if t is not None and t.requires_grad}
    if keep and scheduler is not None and scheduler.is_enabled():
        ready = readiness_of(*([weight] for weight in mine.values()))
        # Each dW of a computed weight would go on through the same graph, which the first frees.
        leaves = all(weight.is_leaf for weight in mine.values())
        # Queued weights are no inputs of the node: their gradients arrive once, from the queue.
        if ready.bypass and leaves:
            deferral = Deferral(scheduler, mine, ready)
    if deferral is not None:
        members[:2] = [t.detach() for t in members[:2] if t is not None]
        if mine:  # keeps the node in the graph when x needs no gradient
            anchor = x.new_zeros((), requires_grad=True)
    y: Tensor = apply(_OverlappedAttention, call, keep, deferral, anchor, x, *members)
    return y
