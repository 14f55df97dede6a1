"""Attention whose exchanges run beside its projections: Ulysses in rounds, forward and backward.

Legend: S sequence, s local rows, B batch, H hidden, D head dim, W ranks, p a peer, g a head group, C columns of a packed part.

Forward, per head group::

    project p's heads -> send to p      (the next peer's heads are projected meanwhile; own heads last)
    arrival of p's rows -> rotate them  (the next peer's rows move meanwhile)
    attend                              (other head groups' rows move meanwhile)
    send p its rows of the output, in ``output_chunks`` chunks
    arrival of a chunk from all peers -> output projection of its rows (the next chunk moves meanwhile)

Backward, dX first: the gradient of the attention output is projected in ``dx_chunks`` chunks of rows per peer, each sent while
the next is computed; the gradients of q, k, v go back in the same chunks, and dX of a chunk is projected while the next moves. dW of
the output projection runs beside the first exchange, dW of the QKV projection last; with the deferred scheduler on, both are queued
and run beside later exchanges (of the layers below).

What arrives is laid out by heads, so that each projection of a chunk of rows is one product over all heads: its partial sums stay
in the accumulators of one GEMM and are rounded once. Summing one product per peer in a float32 matrix instead lets each start as
soon as that peer's rows are there, but costs more than it hides (H200, bf16, 4096 x 4096 in four parts: 0.41 ms against 0.19).

The mathematics stands in ``forward`` and ``backward``, on plain tensors and a typed state for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.core_attention import CoreCase, CoreKernel
from megatron_fluid.attention.exchange import HeadExchange, Pending
from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.attention.packed import (
    RotaryTable,
    expand_shared,
    normalize,
    normalize_backward,
    pack_gradients,
    rotate_,
    split,
)
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import FluidError

__all__ = [
    "AttentionCall",
    "AttentionState",
    "AttentionWeights",
    "Gradients",
    "backward",
    "forward",
    "overlapped_attention",
]


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of self-attention: w_qkv [(Hq + 2 Hkv) D, H] in Megatron's row order, w_out [H, Hq D]; the rest is optional."""

    w_qkv: Tensor
    w_out: Tensor
    b_qkv: Tensor | None = None
    b_out: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def all(self) -> tuple[Tensor | None, ...]:
        return self.w_qkv, self.w_out, self.b_qkv, self.b_out, self.q_norm, self.k_norm


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call that is not a tensor to differentiate. ``kernel`` attends ``case``; ``name`` is for errors."""

    heads: HeadLayout
    sequence: SequenceLayout
    exchange: HeadExchange
    kernel: CoreKernel
    case: CoreCase
    table: RotaryTable | None = None
    output_chunks: int = 1
    dx_chunks: int = 1
    norm_eps: float = 1e-6
    name: str = "attention"


@dataclass
class GroupState:
    """One head group's share of what backward needs."""

    raw: Tensor | None  # packed [S, B, C] before q/k norm; None without
    leaves: tuple[Tensor, Tensor, Tensor]  # q, k, v as the kernel saw them
    attended: Tensor  # the kernel's result, with its graph


@dataclass
class AttentionState:
    """What backward needs of a call."""

    groups: list[GroupState]
    gathered: Tensor  # [s, B, Hq D]: the attention output of all heads on this rank's rows


@dataclass
class Gradients:
    """Gradients of x and of AttentionWeights' members; None where not asked for or deferred."""

    x: Tensor | None = None
    w_qkv: Tensor | None = None
    w_out: Tensor | None = None
    b_qkv: Tensor | None = None
    b_out: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def _flat(tensor: Tensor) -> Tensor:
    """[rows, B, C] as [rows B, C]."""
    return tensor.reshape(-1, tensor.shape[-1])


def _project(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [r, B, C] = x [r, B, K] @ matrix [K, C] + bias [C]."""
    flat = out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(_flat(x), matrix, out=flat)
    else:
        torch.addmm(bias, _flat(x), matrix, out=flat)


Matrix = tuple[Tensor, Tensor | None]


def _send_projection(
    operation: str,
    call: AttentionCall,
    x: Tensor,
    group: int,
    matrix_of: Callable[[HeadPart], Matrix],
    chunks: int,
) -> tuple[Tensor, dict[tuple[int, int], Pending]]:
    """Project each peer's part from ``x`` [s, B, K] and send it while the next is projected; own part last.

    ``matrix_of`` gives a part's matrix [K, C] and its bias [C]. Returns the head-parallel buffer [S, B, C] with own rows in
    place, and what is under way by (chunk, peer).
    """
    exchange, rank = call.exchange, call.exchange.rank
    own_matrix, own_bias = matrix_of(call.heads.part(rank, group))
    theirs = {peer: matrix_of(call.heads.part(peer, group)) for _, peer in exchange.peers}
    buffer = exchange.buffer(call.sequence.length, x.shape[1], own_matrix.shape[1], x)
    pending: dict[tuple[int, int], Pending] = {}
    for chunk in range(chunks):
        rows = call.sequence.chunk(rank, chunk, chunks)
        for turn in exchange.peers:
            matrix, bias = theirs[turn[1]]
            part = exchange.buffer(rows.stop - rows.start, x.shape[1], matrix.shape[1], x)
            _project(x[rows], matrix, bias, part)
            pending[chunk, turn[1]] = exchange.to_heads(operation, turn, part, buffer, chunk, chunks)
    for local, positions in call.sequence.pieces(rank):
        _project(x[local], own_matrix, own_bias, buffer[positions])
    return buffer, pending


Returning = dict[tuple[int, int], tuple[Pending, Tensor]]


def _send_heads(operation: str, call: AttentionCall, buffer: Tensor, widths: Sequence[int], chunks: int) -> Returning:
    """Send each peer its rows of ``buffer`` [S, B, C], chunk by chunk; ``widths`` are the columns of every rank's part.

    Returns what is under way, and where it lands [rows of the chunk, B, the peer's columns], by (chunk, peer).
    """
    exchange = call.exchange
    returning: Returning = {}
    for chunk in range(chunks):
        rows = call.sequence.chunk(exchange.rank, chunk, chunks)
        for turn in exchange.peers:
            landing = exchange.buffer(rows.stop - rows.start, buffer.shape[1], widths[turn[1]], buffer)
            returning[chunk, turn[1]] = exchange.to_sequence(operation, turn, buffer, landing, chunk, chunks), landing
    return returning


def _arrivals(call: AttentionCall, returning: Sequence[Returning], chunk: int) -> Iterator[tuple[HeadPart, Tensor]]:
    """Wait for a chunk of every head group from every peer; each is let go once it was used."""
    for group, back in enumerate(returning):
        for _, peer in call.exchange.peers:
            arrival, landing = back.pop((chunk, peer))
            arrival.wait()
            yield call.heads.part(peer, group), landing


def _prepare(
    call: AttentionCall, part: HeadPart, weights: AttentionWeights, buffer: Tensor, target: Tensor, rank: int
) -> None:
    """Normalise (into ``target``, which is ``buffer`` without q/k norm) and rotate the rows that ``rank`` sent."""
    for _, rows in call.sequence.pieces(rank):
        if weights.q_norm is not None and weights.k_norm is not None:
            normalize(buffer[rows], target[rows], part, weights.q_norm, weights.k_norm, call.norm_eps)
        rotate_(target[rows], part, None if call.table is None else call.table.rows(rows))


def _attend(
    call: AttentionCall, part: HeadPart, packed: Tensor, keep: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Attend the heads of a packed buffer; with ``keep`` the result carries the graph to the returned leaves."""
    q, k, v = (t.detach().requires_grad_(keep) for t in split(packed, part))
    with torch.set_grad_enabled(keep):
        if q.numel() == 0:
            return (q, k, v), q * 1.0
        return (q, k, v), call.kernel.run(q, expand_shared(k, part), expand_shared(v, part), call.case)


def forward(
    x: Tensor, weights: AttentionWeights, call: AttentionCall, keep: bool
) -> tuple[Tensor, AttentionState | None]:
    """Self-attention of this rank's rows: x [s, B, H] -> y [s, B, H], and what backward needs if ``keep``."""
    rank, heads, length = call.exchange.rank, call.heads, call.sequence.length
    rows, batch, hidden = x.shape

    def qkv_of(part: HeadPart) -> Matrix:
        return part.weight(weights.w_qkv).t(), None if weights.b_qkv is None else part.weight(weights.b_qkv)

    sent = [_send_projection(f"{call.name} qkv {g}", call, x, g, qkv_of, 1) for g in range(heads.groups)]
    gathered = None if heads.single else x.new_empty((rows, batch, heads.num_heads * heads.head_dim))
    states, returning = [], []
    for g, (buffer, pending) in enumerate(sent):
        part = heads.part(rank, g)
        packed = buffer if weights.q_norm is None else torch.empty_like(buffer)
        _prepare(call, part, weights, buffer, packed, rank)
        for (_, peer), arrival in pending.items():
            arrival.wait()
            _prepare(call, part, weights, buffer, packed, peer)
        leaves, attended = _attend(call, part, packed, keep)
        output = attended.detach().contiguous().view(length, batch, part.output_width)
        widths = [heads.part(p, g).output_width for p in range(heads.world)]
        returning.append(_send_heads(f"{call.name} output {g}", call, output, widths, call.output_chunks))
        if gathered is None:
            gathered = output
        else:
            for local, positions in call.sequence.pieces(rank):
                gathered[local, :, part.output_columns] = output[positions]
        if keep:
            states.append(GroupState(None if weights.q_norm is None else buffer, leaves, attended))
        del buffer, packed, leaves, attended, output
    assert gathered is not None
    y = x.new_empty((rows, batch, hidden))
    for chunk in range(call.output_chunks):
        now = call.sequence.chunk(rank, chunk, call.output_chunks)
        for part, landing in _arrivals(call, returning, chunk):
            gathered[now, :, part.output_columns] = landing
        _project(gathered[now], weights.w_out.t(), weights.b_out, y[now])
    return y, AttentionState(states, gathered) if keep else None


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [C, K] of y = x W^T from dy [s, B, C] and x [s, B, K]."""
    return torch.mm(_flat(dy).t(), _flat(x))


@dataclass(frozen=True)
class Deferral:
    """Where weight gradients go when they are queued: the scheduler, and the parameters they belong to (None: not wanted)."""

    scheduler: WeightGradScheduler
    w_qkv: Tensor | None
    w_out: Tensor | None


def backward(
    dy: Tensor,
    x: Tensor,
    weights: AttentionWeights,
    state: AttentionState,
    call: AttentionCall,
    wanted: frozenset[str],
    deferral: Deferral | None = None,
    retain: bool = False,
) -> Gradients:
    """Gradients of ``forward`` for dy [s, B, H].

    Args:
        wanted: names of the members of Gradients to compute.
        deferral: queue dW of both projections there instead of computing it here.
        retain: keep the attention kernel's graph for another call.
    """
    rank, heads, chunks = call.exchange.rank, call.heads, call.dx_chunks
    dy, gathered = dy.contiguous(), state.gathered
    result = Gradients()

    def output_of(part: HeadPart) -> Matrix:
        return weights.w_out[:, part.output_columns], None

    sent = [_send_projection(f"{call.name} d-output {g}", call, dy, g, output_of, chunks) for g in range(heads.groups)]
    under_way = [arrival for _, pending in sent for arrival in pending.values()]
    if deferral is not None:
        deferral.scheduler.run_beside(under_way)  # tasks of the layers above, while the gradient moves
        if deferral.w_out is not None:
            _submit(deferral, call, "output", deferral.w_out, lambda: weight_gradient(dy, gathered))
    elif "w_out" in wanted:
        result.w_out = weight_gradient(dy, gathered)
    if "b_out" in wanted:
        result.b_out = _flat(dy).sum(0)

    packed: list[Tensor] = []
    returning: list[Returning] = []
    for g, (gradient, pending) in enumerate(sent):
        for arrival in pending.values():
            arrival.wait()
        packed.append(_attend_backward(call, heads.part(rank, g), weights, state.groups[g], gradient, retain, result))
        widths = [heads.part(p, g).width for p in range(heads.world)]
        returning.append(_send_heads(f"{call.name} d-qkv {g}", call, packed[g], widths, chunks))
    del sent
    if deferral is not None:
        deferral.scheduler.run_beside([arrival for back in returning for arrival, _ in back.values()])
    result.x, fused = _input_gradient(x, weights.w_qkv, call, packed, returning, "x" in wanted)
    if deferral is not None and deferral.w_qkv is not None:
        _submit(deferral, call, "qkv", deferral.w_qkv, lambda: weight_gradient(fused, x))
    elif deferral is None and "w_qkv" in wanted:
        result.w_qkv = weight_gradient(fused, x)
    if "b_qkv" in wanted:
        result.b_qkv = _flat(fused).sum(0)
    if weights.q_norm is not None and result.q_norm is not None and result.k_norm is not None:
        result.q_norm, result.k_norm = (t.to(weights.q_norm.dtype) for t in (result.q_norm, result.k_norm))
    return result


def _attend_backward(
    call: AttentionCall,
    part: HeadPart,
    weights: AttentionWeights,
    group: GroupState,
    gradient: Tensor,
    retain: bool,
    result: Gradients,
) -> Tensor:
    """The packed gradient [S, B, C] before rotation and norm, from that of the attention output [S, B, columns]."""
    shaped = gradient.view(group.attended.shape)
    dq, dk, dv = torch.autograd.grad(group.attended, group.leaves, shaped, retain_graph=retain)
    packed = call.exchange.buffer(gradient.shape[0], gradient.shape[1], part.width, gradient)
    pack_gradients(dq, dk, dv, part, call.table, packed)
    if group.raw is not None and weights.q_norm is not None and weights.k_norm is not None:
        of_q, of_k = normalize_backward(group.raw, packed, part, weights.q_norm, weights.k_norm, call.norm_eps)
        result.q_norm = of_q if result.q_norm is None else result.q_norm + of_q
        result.k_norm = of_k if result.k_norm is None else result.k_norm + of_k
    return packed


def _input_gradient(
    x: Tensor,
    w_qkv: Tensor,
    call: AttentionCall,
    packed: Sequence[Tensor],
    returning: Sequence[Returning],
    wanted: bool,
) -> tuple[Tensor | None, Tensor]:
    """dX [s, B, H], and the gradient of the QKV projection's result for all heads on this rank's rows, [s, B, (Hq + 2 Hkv) D].

    Args:
        packed: per head group [S, B, C], the packed gradients of this rank's heads.
        returning: per head group, the other ranks' heads on their way.
    """
    rank, heads, sequence = call.exchange.rank, call.heads, call.sequence
    rows, batch, _ = x.shape
    if heads.single:
        total = packed[0]
    elif heads.disjoint:
        total = x.new_empty((rows, batch, heads.qkv_rows))
    else:  # key/value heads that ranks share: their gradients are summed wide, and rounded once
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = x.new_zeros((rows, batch, heads.qkv_rows), dtype=wide)
    if not heads.single:
        for g, gradient in enumerate(packed):
            for local, positions in sequence.pieces(rank):
                _into_columns(total[local], heads.part(rank, g), gradient[positions], heads.disjoint)
    fused = total if total.dtype == x.dtype else torch.empty_like(total, dtype=x.dtype)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else None
    for chunk in range(call.dx_chunks):
        now = sequence.chunk(rank, chunk, call.dx_chunks)
        for part, landing in _arrivals(call, returning, chunk):
            _into_columns(total[now], part, landing, heads.disjoint)
        if fused is not total:
            fused[now] = total[now]
        if dx is not None:
            _project(fused[now], w_qkv, None, dx[now])
    return dx, fused


def _into_columns(total: Tensor, part: HeadPart, piece: Tensor, disjoint: bool) -> None:
    """Put (or, for shared heads, add) a part's packed columns where the fused weight has their rows."""
    start = 0
    for rows in part.qkv_rows:
        columns = piece[..., start : start + rows.stop - rows.start]
        start += rows.stop - rows.start
        if disjoint:
            total[..., rows] = columns
        else:
            total[..., rows] += columns


def _submit(deferral: Deferral, call: AttentionCall, what: str, param: Tensor, compute: Callable[[], Tensor]) -> None:
    deferral.scheduler.submit(f"{call.name} dW {what}", [param], lambda: [compute()])


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
        weights = AttentionWeights(*members)  # type: ignore[arg-type]
        y, state = forward(x, weights, call, keep)
        if keep:
            ctx.save_for_backward(x, *members)
            ctx.call, ctx.state, ctx.deferral = call, state, deferral
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *members = ctx.saved_tensors
        if ctx.state is None:
            raise FluidError(f"{ctx.call.name}: a second backward through a graph that was not retained")
        names = ("x", "w_qkv", "w_out", "b_qkv", "b_out", "q_norm", "k_norm")
        wanted = frozenset(name for name, need in zip(names, ctx.needs_input_grad[4:], strict=True) if need)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        result = backward(grads[0], x, AttentionWeights(*members), ctx.state, ctx.call, wanted, ctx.deferral, retain)
        if not retain:
            ctx.state = None  # free the activations now, not when the loss goes out of scope
        return None, None, None, None, *(getattr(result, name) if name in wanted else None for name in names)


def overlapped_attention(
    x: Tensor, weights: AttentionWeights, call: AttentionCall, scheduler: WeightGradScheduler | None = None
) -> Tensor:
    """Self-attention of this rank's rows with overlapped exchanges, differentiable once.

    Args:
        x: [s, B, H], this rank's rows, in the order of ``call.sequence``.
        weights: the same on every rank. Their gradients are this rank's share: sum them over the group.
        call: layout, transport and kernel; every rank of the group calls with an equal one.
        scheduler: where dW of the two projections is queued while it is enabled; None computes it in this backward.

    Returns:
        y [s, B, H].

    Raises:
        PeerTimeoutError: a peer did not answer within the exchange's timeout.
    """
    members = list(weights.all())
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *members))
    deferral, anchor = None, None
    if keep and scheduler is not None and scheduler.is_enabled():
        # Queued weights are no inputs of the node, so that their gradients arrive once, from the queue.
        mine = [t if t is not None and t.requires_grad else None for t in members[:2]]
        deferral = Deferral(scheduler, mine[0], mine[1])
        members[:2] = [t.detach() for t in members[:2] if t is not None]
        if any(t is not None for t in mine):
            anchor = x.new_zeros((), requires_grad=True)  # keeps the node in the graph when x needs no gradient
    y: Tensor = _OverlappedAttention.apply(call, keep, deferral, anchor, x, *members)  # type: ignore[no-untyped-call]
    return y
