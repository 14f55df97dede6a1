"""The experts of an MoE layer as one differentiable function, over any transport.

    call = ExpertCall(x=x, probs=probs, w1=w1, w2=w2, num_experts=El)
    y = run_experts(call, transport)

    forward:  dispatch x -> fc1 -> activation * probability -> fc2 -> combine
    backward: dispatch dy -> dgrad of fc2 -> backward of the activation -> dgrad of fc1 -> combine
              dx, and the weight gradients while dx travels

The transport (moe/transport.py) hands over rows segment by segment and decides what overlaps with
what. The experts (PlainExperts of moe/experts.py, or a subclass with biases or in fp8) compute a
segment.

Shapes: N expert rows of this rank, El local experts, H hidden, F1 width of fc1's output, F width of
fc2's input.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.autograd import (
    Readiness,
    apply,
    graph_is_kept,
    once_differentiable,
    readiness_of,
    weights_wanted,
)
from megatron_fluid.backward.deferred_linear import graph_anchor
from megatron_fluid.backward.main_grad import mark_added_to_main_grad
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.call import ExpertCall, Offload, Offloaded, in_dtype
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups, expert_projections
from megatron_fluid.moe.experts import Hidden, PlainExperts, Route, Rows, merge_rows
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["StartedCall", "prepare", "run_experts", "start_experts"]

_PROCESS_WIDE = get_backward_scheduler()


@dataclass(kw_only=True, slots=True)
class _State:
    """Everything about one call except its tokens. The forward makes it and the backward reads it;
    no two calls share one.

    Attributes:
        deferred: whether the weight gradients are queued in the scheduler.
        fused_main_grad: whether weight gradients are added to main_grad.
        ready: tells main_grad's owner when gradients that bypass autograd are complete.
    """

    experts: PlainExperts
    scheduler: WeightGradScheduler
    name: str
    deferred: bool
    fused_main_grad: bool
    ready: Readiness
    recompute: Collection[str]
    offload: Offload | None
    transport: TokenTransport

    @property
    def bypasses_autograd(self) -> bool:
        """Whether the weights are left out of the inputs of the autograd function."""
        return self.deferred or self.ready.direct

    def sent(self, x: Tensor) -> Tensor:
        """Convert tokens or gradients [T, H] to what the transport sends, packed if it can."""
        return self.experts.packed(x) if self.transport.carries_packed_rows else x

    def arrived(self, rows: Tensor) -> Rows:
        """Convert the received rows of a segment to what the experts take."""
        return self.experts.unpacked(rows) if self.transport.carries_packed_rows else rows

    def recomputed(self, x: Tensor) -> list[Rows]:
        """Dispatch the tokens x [T, H] again and return the rows of the forward's segments."""
        return [self.arrived(rows) for rows in self.transport.recompute_rows(self.sent(x))]


def prepare(call: ExpertCall) -> tuple[Tensor, PlainExperts]:
    """Check a call and, under autocast, cast its tokens, weights and biases. This precedes the
    transport, so the checks are the same for all transports. Returns the tokens and the experts.

    Raises:
        ConfigError: shapes or dtypes do not fit together; fp8 is requested for experts that do not
            support it, or on a GPU other than Hopper.
    """
    x, w1, w2, biases = call.x, call.w1, call.w2, call.biases
    layout = w1.layout if isinstance(w1, ExpertWeights) else call.layout
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w1, w2 = x.to(dtype), in_dtype(w1, dtype), in_dtype(w2, dtype)
        if biases is not None:
            biases = in_dtype(biases[0], dtype), in_dtype(biases[1], dtype)
    if x.dim() != 2:
        raise ConfigError.of(f"{call.name}: dimensions of the tokens", x.dim(), 2)
    act = call.activation
    if not isinstance(act, Activation):
        act = resolve_activation(act)
    fcs = expert_projections(w1, w2, call.num_experts, x, act, call.name, layout)
    if call.batch_invariant:
        x = x if x.data_ptr() % 16 == 0 else x.clone()  # kernels for Hopper take no others
        act = replace(act, by_rows=True)
        for fc in fcs:
            fc.fixed_tiles = True
    if call.fp8:
        from megatron_fluid.moe.fp8_experts import Fp8Experts  # needs Triton

        return x, Fp8Experts(
            *fcs, act, call.fp8_weight_grads, name=call.name,
            biased=biases is not None, offloaded=call.offload is not None,
        )  # fmt: skip
    if biases is not None:
        from megatron_fluid.moe.biases import BiasedExperts

        return x, BiasedExperts(*fcs, act, biases, call.name)
    return x, PlainExperts(*fcs, act)


def _state_of(call: ExpertCall, experts: PlainExperts, transport: TokenTransport) -> _State:
    """Make the state of a call from the current grad mode, scheduler and gradient owner."""
    fc1, fc2, recompute = experts.fc1, experts.fc2, call.recompute
    if recompute and not set(recompute) <= set(transport.recomputable):
        allowed = f"some of {', '.join(transport.recomputable)}"
        raise ConfigError.of("recompute", sorted(recompute), allowed)
    if call.offload is not None:
        recompute = set(recompute).difference(call.offload.parts)
    scheduler = _PROCESS_WIDE if call.scheduler is None else call.scheduler
    learning = torch.is_grad_enabled()
    leaves = learning and fc1.deferrable() and fc2.deferrable()
    trained = [fc.params for fc in (fc1, fc2) if leaves and fc.requires_grad()]
    ready, fused = readiness_of(*trained), call.fused_main_grad
    deferred = leaves and ready.bypass and scheduler.enabled
    if fused and not ready.direct:
        params = (*fc1.params, *fc2.params)
        fused = learning and all(hasattr(param, "main_grad") for param in params)
    return _State(
        experts=experts,
        scheduler=scheduler,
        name=call.name,
        deferred=deferred,
        fused_main_grad=fused,
        ready=ready,
        recompute=recompute,
        offload=call.offload,
        transport=transport,
    )


@dataclass(slots=True)
class StartedCall:
    """A call whose dispatch may be under way. Call `finish` exactly once."""

    _state: _State
    _x: Tensor
    _probs: Tensor | None

    def finish(self) -> Tensor:
        """Compute the experts, combine, and return the result [T, H]."""
        device = self._x.device.type
        if not torch.is_autocast_enabled(device):
            return _finished(self._state, self._x, self._probs)
        with torch.autocast(device, enabled=False):
            return _finished(self._state, self._x, self._probs)


def start_experts(call: ExpertCall, transport: TokenTransport) -> StartedCall:
    """Start a call over a transport that serves this call alone. If the transport `starts_ahead`,
    work launched before `finish` overlaps with the dispatch. Collective if the transport is.

    Raises:
        ConfigError: as for prepare; the transport does not take these tokens or experts, or cannot
            recompute what is asked for.
        PeerTimeoutError: a peer did not answer (on a CPU; on a GPU the monitor reports it).
    """
    tokens, experts = prepare(call)
    count, biased = experts.fc1.num_experts, bool(experts.bias_params)
    transport.check_experts(experts.activation, count, biased)
    state = _state_of(call, experts, transport)
    x, probs = transport.accept(tokens, call.probs)
    if transport.starts_ahead:
        wanted = x.requires_grad or (probs is not None and probs.requires_grad)
        if wanted and torch.is_grad_enabled():
            x, probs = _WaitForDx.apply(transport, x, probs)
        transport.start(x.detach(), None if probs is None else probs.detach())
    return StartedCall(state, x, probs)


def run_experts(call: ExpertCall, transport: TokenTransport) -> Tensor:
    """start_experts, followed at once by `finish`."""
    return start_experts(call, transport).finish()


def _finished(call: _State, x: Tensor, probs: Tensor | None) -> Tensor:
    """Dispatch, compute and combine one call. x and probs are in the transport's layout."""
    y = _computed(call, x, probs)
    return call.transport.leave(y) if call.transport.permutes else y


def _computed(call: _State, x: Tensor, probs: Tensor | None) -> Tensor:
    experts = call.experts
    params = () if call.bypasses_autograd else (*experts.fc1.params, *experts.fc2.params)
    params = (*params, *experts.bias_params)
    trained = call.bypasses_autograd and any(
        fc.requires_grad() for fc in (experts.fc1, experts.fc2)
    )
    inputs = (x, *params) if probs is None else (x, probs, *params)
    if not (torch.is_grad_enabled() and (trained or any(t.requires_grad for t in inputs))):
        if call.offload is not None:
            for part in call.offload.parts:
                call.offload.put(part, ())
        return forward_pass(call, x, probs, keep=False)[0]
    # The anchor keeps the function in the graph if the weights are not among its inputs.
    anchor = graph_anchor(x.device) if trained else None
    return apply(_Experts, x, probs, anchor, call, *params)


class _WaitForDx(torch.autograd.Function):
    """Identity in forward; the backward waits for dX. Autograd runs the latest nodes first, so the
    nodes recorded between this one and the experts run their backward while dX travels."""

    @staticmethod
    def forward(
        ctx: Any, transport: TokenTransport, tokens: Tensor, probs: Tensor | None
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


# What the backward needs of one segment: fc1's input rows, the segment itself (row groups, probs),
# and fc1's output [n, F1], or None if that is recomputed.
type _KeptSegment = tuple[Rows, Segment, Hidden | None]
type _Pairs = list[tuple[Rows, Rows]]  # operands of dW, by segment: output gradient, input


def forward_pass(
    call: _State, x: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, list[_KeptSegment]]:
    """Return the result [T, H] and, with `keep`, what the backward needs of each segment."""
    exchange = call.transport.forward(call.sent(x), probs, keep)
    kept: list[_KeptSegment] = []
    keep_hidden = keep and "hidden" not in call.recompute
    for segment in exchange.segments():
        rows = call.arrived(segment.rows)
        rows, hidden = call.experts.forward(rows, segment, exchange, keep_hidden)
        if keep:
            kept.append((rows, segment, hidden))
    exchange.finish()
    return exchange.results[0], kept


def backward_pass(
    call: _State, grad: Tensor, routes: Sequence[Route], hidden: Sequence[Hidden], consume: bool
) -> tuple[Exchange, list[Rows], _Pairs]:
    """Start sending dX. Returns its exchange and, for each segment, dh (the gradient of fc1's
    output [n, F1]) and the operands of fc2's dW.

    routes: those of the forward's segments. hidden: fc1's outputs without biases. consume: the
    caller does not need `hidden` afterwards.
    """
    exchange = call.transport.backward(call.sent(grad), call.deferred)
    fc1: list[Rows] = []
    fc2: _Pairs = []
    # segments() must be exhausted: as zip's first argument it is.
    for segment, route, h in zip(exchange.segments(), routes, hidden, strict=True):
        dy = call.arrived(segment.rows)
        dh, pair = call.experts.backward(dy, h, route, segment, exchange, consume)
        fc1.append(dh)
        fc2.append(pair)
    return exchange, fc1, fc2


def _weight_grads(
    call: _State, fc: ExpertWeights, pairs: Callable[[], _Pairs], groups: Sequence[RowGroups]
) -> list[Tensor] | None:
    """Compute one projection's weight gradients and return what autograd gets for each parameter:
    dW, or a placeholder if dW was added to main_grad. None if main_grad's owner is told itself."""
    operands = merge_rows(pairs(), groups)
    reported = call.ready.captured or call.ready.takes_main_grads()
    if not (reported or call.fused_main_grad):
        return call.experts.weight_grads(fc, *operands)
    call.experts.add_to_main_grads(fc, *operands)
    return None if reported else mark_added_to_main_grad(fc.params)


@dataclass(slots=True)
class _KeptPart:
    """One part of what a call keeps for its backward: "rows" or "hidden". Autograd saves it, or an
    Offload holds it.

    Autograd's hooks for saved tensors are not used: they unpack all tensors of a function at once.
    Here the backward takes each part when it needs it, and says when it is done with it.

    Attributes:
        kinds: for each value its type if it is a named tuple of two tensors, else None.
        count: number of tensors that autograd saves.
        away: handle to the offloaded tensors, or None if autograd saves them.
    """

    kinds: tuple[Any, ...]
    count: int
    away: Offloaded | None

    def values(self, saved: Iterator[Tensor]) -> list[Any]:
        """Return what `_keep` was given. saved: autograd's tensors, from this part's first on."""
        found = itertools.islice(saved, self.count) if self.away is None else iter(self.away.take())
        return [kind(next(found), next(found)) if kind else next(found) for kind in self.kinds]

    def finish(self) -> None:
        """Tell the Offload that the backward is done with the values."""
        if self.away is not None:
            self.away.finish()


def _keep(
    part: str, values: Sequence[Any], offload: Offload | None
) -> tuple[list[Tensor | None], _KeptPart]:
    """Keep a part of a call. A value is a tensor, a named tuple of two, or None (not if offloaded).
    Returns the tensors that autograd has to save, and the part."""
    tensors: list[Tensor | None] = []
    for value in values:
        tensors += value if isinstance(value, tuple) else [value]
    kinds = tuple(type(value) if isinstance(value, tuple) else None for value in values)
    if offload is not None and part in offload.parts:
        given = [tensor for tensor in tensors if tensor is not None]
        if (away := offload.put(part, given)) is not None:
            return [], _KeptPart(kinds, 0, away)
    return tensors, _KeptPart(kinds, len(tensors), None)


class _Experts(torch.autograd.Function):
    """The autograd function around forward_pass and backward_pass. It saves and restores tensors
    and decides when weight gradients are computed.

    Inputs: x, probs, the anchor, the call, the weights unless they bypass autograd, the biases.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, anchor: Tensor | None, call: _State,
        *params: Tensor,
    ) -> Tensor:  # fmt: skip
        out, kept = forward_pass(call, x, probs, keep=True)
        rows = [x] if "rows" in call.recompute else [own for own, _, _ in kept]
        first, ctx.rows = _keep("rows", rows, call.offload)
        second, ctx.hidden = _keep("hidden", [hidden for _, _, hidden in kept], call.offload)
        ctx.save_for_backward(*second, *first)
        ctx.routes = [(segment.probs, segment.groups) for _, segment, _ in kept]
        ctx.call, ctx.versions = call, call.experts.versions()
        # The anchor's index in ctx.next_functions, which skips `call`; 0 without an anchor.
        ctx.anchor = 0 if anchor is None else 1 + (probs is not None)
        if call.bypasses_autograd:
            call.ready.enter(ctx)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Reading saved_tensors raises in a second backward of a graph that was not retained.
        saved = iter(ctx.saved_tensors)
        call: _State = ctx.call
        experts = call.experts
        kept_rows: _KeptPart = ctx.rows
        kept_hidden: _KeptPart = ctx.hidden
        if experts.versions() != ctx.versions:
            what = "expert weights were changed in place between forward and backward"
            raise RuntimeError(f"{call.name}: {what}")
        groups = [groups for _, groups in ctx.routes]
        hidden = kept_hidden.values(saved)
        # Without recompute only fc1's dW needs the rows, so they are fetched after dgrad.
        rows = kept_rows.values(saved) if call.recompute else []
        # If only fc1's dW needs the recomputed rows, they are gathered just before it.
        later = call.transport.regathers and set(call.recompute) == {"rows"}
        if "rows" in call.recompute and not later:
            rows = call.recomputed(rows[0])
        if "hidden" in call.recompute:
            hidden = [experts.hidden(x, g) for x, g in zip(rows, groups, strict=True)]
        consume = "hidden" in call.recompute or not graph_is_kept()
        exchange, dh, pairs2 = backward_pass(call, grad, ctx.routes, hidden, consume)
        del hidden
        rows = rows or kept_rows.values(saved)

        def pairs1(rows: Sequence[Any] = rows, dh: Sequence[Rows] = dh) -> _Pairs:
            found = call.recomputed(rows[0]) if later else rows
            return list(zip(dh, found, strict=True))

        needed = ctx.needs_input_grad[4:]
        db: list[Any] = [None] * len(experts.bias_params)
        if any(needed[len(needed) - len(db) :]):
            db = experts.bias_grads(dh, pairs2, ctx.routes)
        fc1 = functools.partial(_weight_grads, call, experts.fc1, pairs1, groups)
        second: Callable[[], _Pairs] = functools.partial(list, pairs2)
        fc2 = functools.partial(_weight_grads, call, experts.fc2, second, groups)
        del saved, rows, dh, pairs1, pairs2, second

        dw: list[Tensor | None] = []
        wanted = bool(ctx.anchor) and weights_wanted(ctx.next_functions[ctx.anchor])
        if call.deferred:

            def submit() -> None:
                for number, fc, compute in ((2, experts.fc2, fc2), (1, experts.fc1, fc1)):
                    if wanted and fc.requires_grad():
                        call.scheduler.submit(f"{call.name} fc{number}", fc.params, compute)

            exchange.run_queued(call.scheduler, submit)
        elif call.ready.direct:  # gradients come back where a hook came after the forward
            if wanted and experts.fc2.requires_grad() and (dw2 := fc2()) is not None:
                call.scheduler.submit(call.name, experts.fc2.params, functools.partial(list, dw2))
            del fc2
            if wanted and experts.fc1.requires_grad() and (dw1 := fc1()) is not None:
                call.scheduler.submit(call.name, experts.fc1.params, functools.partial(list, dw1))
            del fc1
        else:
            split, end = len(experts.fc1.params), len(needed) - len(db)
            none: list[Any] = [None]
            dw2 = fc2() if any(needed[split:end]) else None
            del fc2  # frees the operands of dw2, so that dw1 can use the memory
            dw1 = fc1() if any(needed[:split]) else None
            del fc1
            dw = [*(dw1 or none * split), *(dw2 or none * len(experts.fc2.params))]
        if wanted:
            call.ready.leave(ctx)
        if not graph_is_kept():
            ctx.call = None  # the output keeps ctx alive, and this would keep the weights
        # Last, so that tensors fetched for the layer below do not add to this layer's peak memory.
        kept_hidden.finish()
        kept_rows.finish()
        exchange.finish(later=ctx.needs_input_grad[0])
        dx, dprobs = (*exchange.results, None)[:2]
        return dx, dprobs, None, None, *dw, *db
