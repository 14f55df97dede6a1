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
(of the layers below). P2P rounds also cut rows into chunks (``output_chunks``, ``dx_chunks``): one
is projected while the next moves.

Received rows are laid out by heads, so each projection of a chunk of rows is one GEMM over all
heads, whose sum is rounded once. One GEMM per peer into a float32 matrix could start earlier, but
reads and writes that matrix once a peer, which costs more than it hides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
from megatron_fluid.attention.exchange.protocol import (
    HeadExchange,
    Prepare,
    Projection,
    RowsInFlight,
    matmul,
)
from megatron_fluid.attention.layouts import HeadPart
from megatron_fluid.attention.packed import (
    Norm,
    RotaryTable,
    expand_shared,
    pack_backward,
    split,
    split_apart,
)
from megatron_fluid.backward.functions import apply, goes_on_to, once_differentiable
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import FluidError

__all__ = [
    "AttentionCall",
    "AttentionState",
    "AttentionWeights",
    "backward",
    "forward",
    "overlapped_attention",
    "weight_gradient",
]


@dataclass(frozen=True)
class AttentionWeights:
    """w_qkv [(Hq + 2 Hkv) D, H] in Megatron's row order, w_out [H, Hq D]; the rest is optional."""

    w_qkv: Tensor
    w_out: Tensor
    b_qkv: Tensor | None = None
    b_out: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def all(self) -> tuple[Tensor | None, ...]:
        return self.w_qkv, self.w_out, self.b_qkv, self.b_out, self.q_norm, self.k_norm


def _flat(tensor: Tensor) -> Tensor:
    """[rows, B, C] as [rows B, C]."""
    return tensor.reshape(-1, tensor.shape[-1])


def _at(tensor: Tensor, rows: slice) -> Tensor:
    """tensor[rows], without a view of all of it."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [C, K] of y = x W^T from dy [s, B, C] and x [s, B, K]."""
    return torch.mm(_flat(dy).t(), _flat(x))


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call that is not a tensor to differentiate. ``kernel`` attends ``case``;
    ``name`` is for errors.

    ``qkv_gradient`` and ``output_gradient`` compute dW of a projection, as ``weight_gradient``
    does; others may put it elsewhere (Megatron's main_grad) and give what stands in for it.
    """

    exchange: HeadExchange
    kernel: CoreKernel
    case: CoreCase
    table: RotaryTable | None = None
    output_chunks: int = 1
    dx_chunks: int = 1
    norm_eps: float = 1e-6
    name: str = "attention"
    qkv_gradient: Callable[[Tensor, Tensor], Tensor] = weight_gradient
    output_gradient: Callable[[Tensor, Tensor], Tensor] = weight_gradient

    def norm(self, weights: AttentionWeights) -> Norm | None:
        if weights.q_norm is None or weights.k_norm is None:
            return None
        return Norm(weights.q_norm, weights.k_norm, self.norm_eps)


@dataclass
class _Kept:
    """What an attention kernel's graph saves under saved-tensor hooks (checkpoints, offloading).

    The node around that graph saves these tensors instead. The graph's own backward is another pass
    of autograd's engine: under a checkpoint every head group would recompute the whole forward with
    its exchanges, and the hooks could free nothing, because the graph's leaves hold the tensors.
    """

    tensors: list[Tensor] = field(default_factory=list)
    count: int = 0

    def pack(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.detach())
        self.count += 1
        return self.count - 1

    def unpack(self, index: int) -> Tensor:
        return self.tensors[index]


@dataclass
class GroupState:
    """One head group's share of what backward needs."""

    raw: Tensor | None  # packed [S, B, C] before q/k norm; None without
    leaves: tuple[Tensor, Tensor, Tensor]  # q, k, v of the kernel; emptied where ``kept`` has them
    attended: Tensor | GradientEdge  # the kernel's result with its graph; with ``kept``, the graph
    shape: torch.Size  # of that result
    kept: _Kept | None = None


@dataclass
class AttentionState:
    """What backward needs of a call. Between forward and backward autograd saves the tensors
    (``release``, ``restore``), except those in the graph of an attention kernel."""

    groups: list[GroupState]
    gathered: Tensor | None  # [s, B, Hq D]: the attention output of all heads on this rank's rows

    def release(self) -> list[Tensor | None]:
        """Hand over the tensors, for autograd to save."""
        tensors: list[Tensor | None] = [self.gathered]
        self.gathered = None
        for group in self.groups:
            tensors.append(group.raw)
            group.raw = None
            if group.kept is not None:
                tensors += group.kept.tensors
                group.kept.tensors = []
        return tensors

    def restore(self, tensors: Sequence[Any]) -> None:
        """Take back what ``release`` handed over."""
        given = iter(tensors)
        self.gathered = next(given)
        for group in self.groups:
            group.raw = next(given)
            if group.kept is not None:
                group.kept.tensors = [next(given) for _ in range(group.kept.count)]


def _attend(
    call: AttentionCall, part: HeadPart, packed: Tensor, keep: bool
) -> tuple[Tensor, GroupState | None]:
    """Attend a packed buffer's heads: the result, and with ``keep`` what its backward needs."""
    q, k, v = split_apart(packed, part) if call.exchange.apart else split(packed, part)
    if not keep:
        return _run(call, part, q, k, v), None
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    kept = None if torch._C._autograd._top_saved_tensors_default_hooks(False) is None else _Kept()
    hooks: Any = contextlib.nullcontext()
    if kept is not None:
        hooks = saved_tensors_hooks(kept.pack, kept.unpack)
    with torch.enable_grad(), hooks:
        attended = _run(call, part, q, k, v)
    if kept is None:
        return attended, GroupState(None, (q, k, v), attended, attended.shape)
    for leaf in (q, k, v):
        leaf.data = leaf.new_empty(0)
    edge = get_gradient_edge(attended)
    return attended.detach(), GroupState(None, (q, k, v), edge, attended.shape, kept)


def _run(call: AttentionCall, part: HeadPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.numel() == 0:
        return q * (1.0 + k.sum() + v.sum())  # of all three, as autograd asks for
    return call.kernel.run(q, expand_shared(k, part), expand_shared(v, part), call.case)


def forward(
    x: Tensor, weights: AttentionWeights, call: AttentionCall, keep: bool
) -> tuple[Tensor, AttentionState | None]:
    """Self-attention of this rank's rows: x [s, B, H] -> y [s, B, H], and with ``keep`` what
    backward needs."""
    exchange, heads = call.exchange, call.exchange.heads
    length, batch = exchange.sequence.length, x.shape[1]
    prepare = Prepare(call.norm(weights), call.table)
    sent = exchange.project(f"{call.name} qkv", x, Projection(weights.w_qkv.t(), weights.b_qkv))
    states: list[GroupState] = []
    returning = []
    for g in range(heads.groups):
        part = heads.part(exchange.rank, g)
        raw, packed = sent.take(g, prepare)
        attended, state = _attend(call, part, packed, keep)
        output = attended.detach().contiguous().view(length, batch, part.output_width)
        rows = exchange.send_rows(f"{call.name} output", g, output, True, call.output_chunks)
        returning.append(rows)
        if state is not None:
            state.raw = raw
            states.append(state)
        del raw, packed, attended, state, output, rows
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = Projection(weights.w_out.t(), weights.b_out)
    gathered = None
    for now, gathered in exchange.collect(returning, True):
        matmul(_at(gathered, now), out, _at(y, now))
    assert gathered is not None
    return y, AttentionState(states, gathered) if keep else None


@dataclass(frozen=True)
class Deferral:
    """The queue of weight gradients, and the parameters "qkv" and "output" that want theirs."""

    scheduler: WeightGradScheduler
    parameters: dict[str, Tensor]

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
    """Gradients of ``forward`` for dy [s, B, H]: of "x" and of AttentionWeights' members that are
    wanted, by name. ``deferral`` queues dW of both projections; ``retain`` keeps the attention
    kernel's graph for another call."""
    exchange, heads, chunks = call.exchange, call.exchange.heads, call.dx_chunks
    dy, gathered = dy.contiguous(), state.gathered
    assert gathered is not None, "its tensors are restored"
    result: dict[str, Tensor] = {}

    out = Projection(weights.w_out, None, True)
    sent = exchange.project(f"{call.name} d-output", dy, out, chunks)
    if deferral is not None:
        # Tasks of the layers above, while the gradient moves.
        deferral.scheduler.run_during(sent.pending())
        deferral.submit(call, "output", lambda: call.output_gradient(dy, gathered))
    elif "w_out" in wanted and not exchange.late_weight_gradient:
        result["w_out"] = call.output_gradient(dy, gathered)
    if "b_out" in wanted:
        result["b_out"] = _flat(dy).sum(0)

    returning: list[RowsInFlight] = []
    for g, group in enumerate(state.groups):
        _, gradient = sent.take(g)
        part = heads.part(exchange.rank, g)
        packed, of_norms = _attend_backward(call, part, weights, group, gradient, retain)
        for name, of_norm in zip(("q_norm", "k_norm"), of_norms or (), strict=False):
            result[name] = result[name] + of_norm if name in result else of_norm
        returning.append(exchange.send_rows(f"{call.name} d-qkv", g, packed, False, chunks))
        del gradient, packed
    if deferral is not None:
        deferral.scheduler.run_during([arrival for back in returning for arrival in back.pending()])
    elif "w_out" in wanted and exchange.late_weight_gradient:
        result["w_out"] = call.output_gradient(dy, gathered)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if "x" in wanted else None
    fused = None
    for now, fused in exchange.collect(returning, False):
        if dx is not None:
            matmul(_at(fused, now), Projection(weights.w_qkv, None), _at(dx, now))
    assert fused is not None
    of_qkv = fused
    if dx is not None:
        result["x"] = dx
    if deferral is not None:
        deferral.submit(call, "qkv", lambda: call.qkv_gradient(of_qkv, x))
    elif "w_qkv" in wanted:
        result["w_qkv"] = call.qkv_gradient(fused, x)
    if "b_qkv" in wanted:
        result["b_qkv"] = _flat(fused).sum(0)
    for name in ("q_norm", "k_norm"):
        if name in result:
            result[name] = result[name].to(weights.q_norm.dtype)  # type: ignore[union-attr]
    return result


def _attend_backward(
    call: AttentionCall,
    part: HeadPart,
    weights: AttentionWeights,
    group: GroupState,
    gradient: Tensor,
    retain: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The packed gradient [S, B, C] before rotation and norm, from the attention output's, and
    those of the norms' weights."""
    shaped = gradient.view(group.shape)
    of_qkv = torch.autograd.grad(group.attended, group.leaves, shaped, retain_graph=retain)
    packed = gradient.new_empty((gradient.shape[0], gradient.shape[1], part.width))
    norm = call.norm(weights)
    dq, dk, dv = of_qkv
    return packed, pack_backward((dq, dk, dv), part, call.table, packed, norm, group.raw)


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
            assert state is not None
            ctx.save_for_backward(x, *members, *state.release())
            ctx.call, ctx.state, ctx.deferral = call, state, deferral
            ctx.has_anchor = anchor is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        names = ("x", "w_qkv", "w_out", "b_qkv", "b_out", "q_norm", "k_norm")
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
        alone = ctx.has_anchor and not goes_on_to(ctx.next_functions[0])
        deferral, weights = None if alone else ctx.deferral, AttentionWeights(*members)
        result = backward(grads[0], x, weights, state, ctx.call, wanted, deferral, retain)
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
        x: [s, B, H], this rank's rows, in the order of ``call.sequence``.
        weights: the same on every rank. Their gradients are this rank's share: sum them over the
            group.
        call: layout, transport and kernel; every rank of the group calls with an equal one.
        scheduler: where dW of the two projections is queued while it is enabled; None computes it
            in this backward.

    Returns:
        y [s, B, H].

    Raises:
        PeerTimeoutError: a peer did not answer within the exchange's timeout.
    """
    members = list(weights.all())
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *members))
    deferral, anchor = None, None
    if keep and scheduler is not None and scheduler.is_enabled():
        # Queued weights are no inputs of the node: their gradients arrive once, from the queue.
        named = zip(("qkv", "output"), members[:2], strict=True)
        mine = {name: t for name, t in named if t is not None and t.requires_grad}
        deferral = Deferral(scheduler, mine)
        members[:2] = [t.detach() for t in members[:2] if t is not None]
        if mine:  # keeps the node in the graph when x needs no gradient
            anchor = x.new_zeros((), requires_grad=True)
    y: Tensor = apply(_OverlappedAttention, call, keep, deferral, anchor, x, *members)
    return y
