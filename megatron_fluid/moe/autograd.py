"""The experts of an MoE layer as one differentiable function, over any transport.

    forward:  dispatch x -> fc1 -> activation * probability -> fc2 -> combine
    backward: dispatch dy -> dgrad of fc2 -> backward of the activation -> dgrad of fc1 -> combine
              dx, and the weight gradients while dx travels

The transport (moe/transport.py) hands over rows segment by segment and decides what overlaps with
what.

Shapes: N expert rows of this rank, El local experts, H hidden, F1 width of fc1's output, F width of
fc2's input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.deferred_linear import graph_anchor
from megatron_fluid.backward.functions import apply, goes_on_to, graph_is_kept, once_differentiable
from megatron_fluid.backward.readiness import Readiness, readiness_of
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows, fp8_unsupported_reason
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.biases import ExpertBiases
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import (
    RowGroups,
    activated_product,
    activation_backward,
    activation_forward,
    add_to_main_grads,
    grouped_product,
    merge_rows,
    weight_grads,
)
from megatron_fluid.moe.kept import KeptPart, Offload, keep
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["Call", "make_call", "run_experts"]


@dataclass(slots=True)
class Call:
    """Everything about one call but its tensors: made in forward, read in backward, shared with no
    other call.

    Attributes:
        deferred: whether the scheduler delivers the weight gradients.
        fused_main_grad: whether weight gradients are added to main_grad.
        ready: how gradients that bypass autograd are delivered and counted.
        recompute: what the backward computes again: "rows", "hidden".
        biases: of fc1 and fc2, or None. Their gradients are autograd's in any case.
        fp8: whether forward and dgrad are computed in fp8 (moe/fp8_experts.py).
        fp8_weight_grads: whether weight gradients are, too (moe/fp8_weight_grads.py).
        offload: what puts rows or hidden away between forward and backward, or None.
    """

    transport: TokenTransport
    activation: Activation
    fc1: ExpertWeights
    fc2: ExpertWeights
    scheduler: WeightGradScheduler
    name: str
    deferred: bool
    fused_main_grad: bool
    ready: Readiness
    recompute: Collection[str]
    biases: tuple[ExpertBiases, ExpertBiases] | None = None
    fp8: bool = False
    fp8_weight_grads: bool = False
    offload: Offload | None = None

    @property
    def packs(self) -> bool:
        """Whether tokens and gradients are cast to fp8 before they are dispatched."""
        return self.fp8 and self.transport.carries_packed_rows

    @property
    def bypasses_autograd(self) -> bool:
        """Whether the parameters are no inputs of the function."""
        return self.deferred or self.ready.direct

    def versions(self) -> list[int]:
        """Counts of the weights' changes in place. The weights are not saved tensors of autograd,
        which would cost a detour for each of Megatron's parameters, but are held to the same rule.
        """
        found = self.fc1.versions() + self.fc2.versions()
        return found + [param._version for param in self.bias_params()]

    def bias_params(self) -> tuple[Tensor, ...]:
        if self.biases is None:
            return ()
        return *self.biases[0].params, *self.biases[1].params


def make_call(
    transport: TokenTransport,
    activation: Activation,
    projections: tuple[ExpertWeights, ExpertWeights],
    scheduler: WeightGradScheduler | None = None,
    name: str = "moe",
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    biases: tuple[ExpertBiases, ExpertBiases] | None = None,
    fp8: bool = False,
    fp8_weight_grads: bool = True,
    offload: Offload | None = None,
) -> Call:
    """The call of a layer under the settings of this moment.

    Args:
        transport: of this call alone.
        activation: of the experts.
        projections: fc1 and fc2 (see expert_projections).
        scheduler: None takes the process-wide one. If it is enabled and the weights are leaves,
            their gradients are deferred.
        name: of the layer, for errors.
        fused_main_grad: add weight gradients straight to `param.main_grad` (Megatron's gradient
            accumulation fusion). Parameters with an owner (backward/readiness.py) get theirs there
            in any case.
        recompute: what the backward makes again in place of keeping it: "rows", the dispatched
            tokens (by another dispatch), "hidden", the output of fc1 (by another GEMM).
        biases: of fc1 and fc2.
        fp8: compute forward and dgrad in fp8 e4m3 with a scale for each block.
        fp8_weight_grads: with fp8: compute weight gradients so, too. False: in bf16.
        offload: what puts rows or hidden away between forward and backward. Its parts are not
            recomputed.

    Raises:
        ConfigError: the transport cannot recompute what is asked for; fp8 of experts that cannot be
            computed so, or on a GPU that is no Hopper.
    """
    if not set(recompute) <= set(transport.recomputable):
        allowed = f"some of {', '.join(transport.recomputable)}"
        raise ConfigError.of("recompute", sorted(recompute), allowed)
    if offload is not None:
        recompute = set(recompute).difference(offload.parts)
    fc1, fc2 = projections
    if fp8:
        kind = activation.name if activation.built_in else f"{activation.name}, the caller's own"
        weight = fc1.params[0]
        given = (fc1.in_width, fc2.in_width, kind, weight.dtype, weight.device)
        reason = fp8_unsupported_reason(*given) or (biases and "fp8 experts have no biases")
        if reason is None and offload is not None:
            reason = "what fp8 experts keep cannot be put away"
        if reason is not None:
            raise ConfigError.of(f"{name}: fp8_recipe", "blockwise", f"None, because {reason}")
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    learning = torch.is_grad_enabled()
    leaves = learning and fc1.deferrable() and fc2.deferrable()
    trained = [fc.params for fc in (fc1, fc2) if leaves and fc.requires_grad()]
    ready = readiness_of(*trained)
    deferred = leaves and ready.bypass and scheduler.is_enabled()
    if fused_main_grad and not ready.direct:
        params = (*fc1.params, *fc2.params)
        fused_main_grad = learning and all(hasattr(param, "main_grad") for param in params)
    settings = scheduler, name, deferred, fused_main_grad, ready, recompute
    precision = fp8, fp8 and fp8_weight_grads
    return Call(transport, activation, fc1, fc2, *settings, biases, *precision, offload)


def run_experts(call: Call, x: Tensor, probs: Tensor | None) -> Tensor:
    """Dispatch, experts and combine of one call; what x and probs are, its transport says."""
    params = () if call.bypasses_autograd else (*call.fc1.params, *call.fc2.params)
    params = (*params, *call.bias_params())
    trained = call.bypasses_autograd and (call.fc1.requires_grad() or call.fc2.requires_grad())
    inputs = (x, *params) if probs is None else (x, probs, *params)
    if not (torch.is_grad_enabled() and (trained or any(t.requires_grad for t in inputs))):
        if call.offload is not None:
            for part in call.offload.parts:
                call.offload.put(part, ())
        return forward_pass(call, x, probs, keep=False)[0]
    # The anchor keeps the function in the graph where the weights are no inputs of it.
    anchor = graph_anchor(x.device) if trained else None
    return apply(_Experts, x, probs, anchor, call, *params)


type _Rows = Tensor | Fp8Rows
# What the backward needs of one segment: its rows, how they are divided and weighed, and fc1's
# output [n, F1], None if recomputed.
type _Kept = tuple[_Rows, Segment, _Rows | None]
type _Pairs = list[tuple[_Rows, _Rows]]  # of each segment: gradient of the output, input


def forward_pass(
    call: Call, x: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, list[_Kept]]:
    """The result, and with `keep` what the backward needs."""
    exchange = call.transport.forward(_sent(call, x), probs, keep)
    kept: list[_Kept] = []
    keep_hidden = keep and "hidden" not in call.recompute
    for segment in exchange.segments():
        rows = _arrived(call, segment.rows)
        groups = segment.groups
        hidden: _Rows | None
        if call.fp8:
            given = (rows, call.fc1, call.fc2, groups, segment.probs, keep_hidden)
            rows, hidden, cast, matrices = _fp8().forward_product(*given)
            exchange.combine_product(segment, cast, matrices)
        elif call.biases is None:
            hidden, activated = activated_product(
                segment.rows, call.fc1, groups, call.activation, segment.probs, keep_hidden
            )
            exchange.combine_product(segment, activated, call.fc2.forward_matrices)
        else:
            hidden = _hidden(call, rows, groups)
            bias = call.biases[0].of_rows(groups, hidden.shape[0])
            activated = activation_forward(
                call.activation, hidden, segment.probs, groups.count, bias
            )
            product = grouped_product(activated, call.fc2.forward_matrices, groups)
            exchange.combine_rows(segment, call.biases[1].add_to(product, groups, segment.probs))
            hidden = hidden if keep_hidden else None
        if keep:
            kept.append((rows, segment, hidden))
    exchange.finish()
    return exchange.results[0], kept


def _fp8() -> Any:
    """moe/fp8_experts.py, which needs Triton."""
    from megatron_fluid.moe import fp8_experts

    return fp8_experts


def _sent(call: Call, x: Tensor) -> Tensor:
    """Tokens or gradients [T, H] as the transport is given them."""
    if call.packs:
        x = _fp8().packed_tokens(x)
    return x


def _arrived(call: Call, rows: Tensor) -> _Rows:
    """A segment's rows [n, H] as the experts are given them."""
    if call.packs:
        found: _Rows = _fp8().arrived_rows(rows, call.fc1.in_width)
        return found
    return rows


def _recomputed(call: Call, x: Tensor) -> list[_Rows]:
    """The rows of the forward's segments by another dispatch of its tokens x [T, H]."""
    return [_arrived(call, rows) for rows in call.transport.recompute_rows(_sent(call, x))]


def _hidden(call: Call, rows: _Rows, groups: RowGroups) -> Tensor:
    """The output of fc1 without its bias, which the activation adds. [N, F1]"""
    if call.fp8:
        found: Tensor = _fp8().hidden_product(rows, call.fc1, groups)
        return found
    return grouped_product(rows, call.fc1.forward_matrices, groups)


def backward_pass(
    call: Call,
    grad: Tensor,
    routes: Sequence[tuple[Tensor | None, RowGroups]],
    hidden: Sequence[_Rows],
    consume: bool,
) -> tuple[Exchange, list[_Rows], _Pairs]:
    """The exchange of dX, on its way; of each segment dh, the gradient of fc1's output [n, F1], and
    what dW of fc2 is made of.

    routes: probabilities and groups of the forward's segments. hidden: fc1's outputs, without
    biases. consume: these are not asked for again.
    """
    exchange = call.transport.backward(_sent(call, grad), call.deferred)
    fc1: list[_Rows] = []
    fc2: _Pairs = []
    # zip asks the exchange first, and so to its end.
    for segment, (probs, groups), h in zip(exchange.segments(), routes, hidden, strict=True):
        dy = _arrived(call, segment.rows)
        if call.fp8:
            given = (dy, h, call.fc1, call.fc2, groups, probs, call.fp8_weight_grads)
            cast, matrices, dh, pair, dprobs = _fp8().backward_product(*given)
            exchange.combine_product(segment, cast, matrices, dprobs)
            fc1.append(dh)
            fc2.append(pair)
            continue
        assert isinstance(h, Tensor) and isinstance(dy, Tensor)
        da = grouped_product(dy, call.fc2.backward_matrices, segment.groups)
        bias = None if call.biases is None else call.biases[0].of_rows(groups, h.shape[0])
        dh, activated, dprobs = activation_backward(
            call.activation, h, da, probs, groups, consume, bias
        )
        if call.biases is not None and dprobs is not None:
            call.biases[1].add_products(dprobs, dy, groups)
        exchange.combine_product(segment, dh, call.fc1.backward_matrices, dprobs)
        fc1.append(dh)
        fc2.append((dy, activated))
    return exchange, fc1, fc2


def _weight_grads(
    call: Call, fc: ExpertWeights, pairs: Callable[[], _Pairs], groups: Sequence[RowGroups]
) -> list[Tensor] | None:
    """dW of one projection, one tensor for each of its parameters; None where it is reported."""
    compute: Callable[..., list[Tensor]] = weight_grads
    add: Callable[..., None] = add_to_main_grads
    rows: tuple[Any, ...]
    if call.fp8_weight_grads:
        from megatron_fluid.moe import fp8_weight_grads  # needs Triton

        compute, add = fp8_weight_grads.weight_grads, fp8_weight_grads.add_to_main_grads
        rows = pairs(), groups
    else:
        found: Any = _fp8().in_bf16(pairs(), groups) if call.fp8 else pairs()
        rows = merge_rows(found, groups)
        del found
    if not (call.ready.direct or call.ready.captured):
        return compute(fc, *rows, call.fused_main_grad)
    add(fc, *rows)
    return None


def _bias_grads(
    call: Call, fc1: Sequence[_Rows], fc2: _Pairs, routes: Sequence[tuple[Tensor | None, RowGroups]]
) -> list[Tensor]:
    """Gradients of the biases of fc1, then of fc2: one tensor for each of their parameters. fc1: of
    each segment the gradient of fc1's output. routes: the probabilities of each segment's rows, and
    their division among the experts."""
    if call.biases is None:
        return []
    # Of several segments in fp32, rounded once.
    found: list[Tensor] = []
    for dh, (dy, _), (probs, groups) in zip(fc1, fc2, routes, strict=True):
        assert isinstance(dh, Tensor) and isinstance(dy, Tensor)  # fp8 experts have no biases
        sums = [call.biases[0].sums(dh, groups), call.biases[1].sums(dy, groups, probs)]
        found = [a.add_(b) for a, b in zip(found, sums, strict=True)] if found else sums
    pairs = zip(call.biases, found, strict=True)
    return [gradient for biases, sums in pairs for gradient in biases.as_gradients(sums)]


class _Experts(torch.autograd.Function):
    """Autograd's view of forward_pass and backward_pass: it saves, restores and orders.

    Inputs: x, probs, the anchor, the call, the weights (none where the scheduler delivers their
    gradients), and the biases.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, anchor: Tensor | None, call: Call,
        *params: Tensor,
    ) -> Tensor:  # fmt: skip
        out, kept = forward_pass(call, x, probs, keep=True)
        rows = [x] if "rows" in call.recompute else [own for own, _, _ in kept]
        first, ctx.rows = keep("rows", rows, call.offload)
        second, ctx.hidden = keep("hidden", [hidden for _, _, hidden in kept], call.offload)
        ctx.save_for_backward(*second, *first)
        ctx.routes = [(segment.probs, segment.groups) for _, segment, _ in kept]
        ctx.call, ctx.versions = call, call.versions()
        # Of ctx.next_functions, which know tensors only; 0 without an anchor.
        ctx.anchor = 0 if anchor is None else 1 + (probs is not None)
        if call.bypasses_autograd:
            call.ready.enter(ctx)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The first access refuses a second backward of a graph that was not kept.
        saved = iter(ctx.saved_tensors)
        call: Call = ctx.call
        kept_rows: KeptPart = ctx.rows
        kept_hidden: KeptPart = ctx.hidden
        if call.versions() != ctx.versions:
            what = "expert weights were changed in place between forward and backward"
            raise RuntimeError(f"{call.name}: {what}")
        groups = [groups for _, groups in ctx.routes]
        hidden = kept_hidden.values(saved)
        # What nothing is recomputed from, dW of fc1 alone needs: it may take its time to come back.
        rows = kept_rows.values(saved) if call.recompute else []
        # Rows that only dW of fc1 needs are gathered when it is their turn.
        later = call.transport.regathers and set(call.recompute) == {"rows"}
        if "rows" in call.recompute and not later:
            rows = _recomputed(call, rows[0])
        if "hidden" in call.recompute:
            hidden = [_hidden(call, x, g) for x, g in zip(rows, groups, strict=True)]
        consume = "hidden" in call.recompute or not graph_is_kept()
        exchange, dh, pairs2 = backward_pass(call, grad, ctx.routes, hidden, consume)
        del hidden
        rows = rows or kept_rows.values(saved)

        def pairs1(rows: Sequence[Any] = rows, dh: Sequence[_Rows] = dh) -> _Pairs:
            found = _recomputed(call, rows[0]) if later else rows
            return list(zip(dh, found, strict=True))

        needed = ctx.needs_input_grad[4:]
        db: list[Any] = [None] * len(call.bias_params())
        if any(needed[len(needed) - len(db) :]):
            db = _bias_grads(call, dh, pairs2, ctx.routes)
        fc1 = functools.partial(_weight_grads, call, call.fc1, pairs1, groups)
        second: Callable[[], _Pairs] = functools.partial(list, pairs2)
        fc2 = functools.partial(_weight_grads, call, call.fc2, second, groups)
        del saved, rows, dh, pairs1, pairs2, second

        dw: list[Tensor | None] = []
        wanted = bool(ctx.anchor) and goes_on_to(ctx.next_functions[ctx.anchor])
        if call.deferred:

            def submit() -> None:
                for number, fc, compute in ((2, call.fc2, fc2), (1, call.fc1, fc1)):
                    if wanted and fc.requires_grad():
                        call.scheduler.submit(f"{call.name} fc{number}", fc.params, compute)

            exchange.run_queued(call.scheduler, submit)
        elif call.ready.direct:
            if wanted and call.fc2.requires_grad():
                fc2()
            del fc2
            if wanted and call.fc1.requires_grad():
                fc1()
            del fc1
        else:
            split, end = len(call.fc1.params), len(needed) - len(db)
            none: list[Any] = [None]
            dw2 = fc2() if any(needed[split:end]) else None
            del fc2  # and what dw2 was made of: dw1 may have the memory
            dw1 = fc1() if any(needed[:split]) else None
            del fc1
            dw = [*(dw1 or none * split), *(dw2 or none * len(call.fc2.params))]
        if wanted:
            call.ready.leave(ctx)
        if not graph_is_kept():
            ctx.call = None  # who keeps the output keeps this, and the weights' memory with it
        # Not before, so that what comes back for a layer below does not meet this one's tensors.
        kept_hidden.finish()
        kept_rows.finish()
        exchange.finish(later=ctx.needs_input_grad[0])
        dx, dprobs = (*exchange.results, None)[:2]
        return dx, dprobs, None, None, *dw, *db
