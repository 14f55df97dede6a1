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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fluid.backward.deferred_linear import graph_anchor
from megatron_fluid.backward.functions import apply, goes_on_to, graph_is_kept, once_differentiable
from megatron_fluid.backward.main_grad import ReadyReport, ready_report
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm import Fp8Rows, fp8_unsupported_reason
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import (
    RowGroups,
    activated_product,
    activation_backward,
    add_to_main_grads,
    grouped_product,
    merge_rows,
    weight_grads,
)
from megatron_fluid.moe.transport import Exchange, TokenTransport

__all__ = ["Call", "make_call", "run_experts"]


@dataclass(slots=True)
class Call:
    """Everything about one call but its tensors: made in forward, read in backward, shared with no
    other call.

    Attributes:
        deferred: whether the scheduler delivers the weight gradients.
        fused_main_grad: whether weight gradients are added to main_grad.
        report: who is told then, in place of autograd, or None.
        recompute: what the backward computes again: "rows", "hidden".
        fp8: whether forward and dgrad are computed in fp8 (moe/fp8_experts.py).
    """

    transport: TokenTransport
    activation: Activation
    fc1: ExpertWeights
    fc2: ExpertWeights
    scheduler: WeightGradScheduler
    name: str
    deferred: bool
    fused_main_grad: bool
    report: ReadyReport | None
    recompute: Collection[str]
    fp8: bool = False

    @property
    def bypasses_autograd(self) -> bool:
        """Whether the parameters are no inputs of the function."""
        return self.deferred or self.report is not None

    def versions(self) -> list[int]:
        """Counts of the weights' changes in place. The weights are not saved tensors of autograd,
        which would cost a detour for each of Megatron's parameters, but are held to the same rule.
        """
        return [param._version for param in (*self.fc1.params, *self.fc2.params)]


def make_call(
    transport: TokenTransport,
    activation: Activation,
    projections: tuple[ExpertWeights, ExpertWeights],
    scheduler: WeightGradScheduler | None = None,
    name: str = "moe",
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    fp8: bool = False,
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
            accumulation fusion). Parameters with a ready report (backward/main_grad.py) get theirs
            there in any case.
        recompute: what the backward makes again in place of keeping it: "rows", the dispatched
            tokens (by another dispatch), "hidden", the output of fc1 (by another GEMM).
        fp8: compute forward and dgrad in fp8 e4m3 with a scale for each block.

    Raises:
        ConfigError: the transport cannot recompute what is asked for; fp8 of experts that cannot be
            computed so, or of a GPU that is no Hopper.
    """
    if not set(recompute) <= set(transport.recomputable):
        allowed = f"some of {', '.join(transport.recomputable)}"
        raise ConfigError.of("recompute", sorted(recompute), allowed)
    fc1, fc2 = projections
    if fp8:
        kind = activation.name if activation.built_in else f"{activation.name}, the caller's own"
        weight = fc1.params[0]
        given = (fc1.in_width, fc2.in_width, kind, weight.dtype, weight.device)
        if (reason := fp8_unsupported_reason(*given)) is not None:
            raise ConfigError.of(f"{name}: fp8_recipe", "blockwise", f"None, because {reason}")
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    learning = torch.is_grad_enabled()
    deferred = learning and scheduler.is_enabled() and fc1.deferrable() and fc2.deferrable()
    params = (*fc1.params, *fc2.params)
    if fused_main_grad:
        fused_main_grad = learning and all(hasattr(param, "main_grad") for param in params)
    report = None
    if learning and fc1.deferrable() and fc2.deferrable():
        report = ready_report(params)
    if report is not None and not report.accepts():
        report, deferred = None, False
    settings = scheduler, name, deferred, fused_main_grad, report, recompute, fp8
    return Call(transport, activation, fc1, fc2, *settings)


def run_experts(call: Call, x: Tensor, probs: Tensor | None) -> Tensor:
    """Dispatch, experts and combine of one call; what x and probs are, its transport says."""
    params = () if call.bypasses_autograd else (*call.fc1.params, *call.fc2.params)
    trained = call.bypasses_autograd and (call.fc1.requires_grad() or call.fc2.requires_grad())
    inputs = (x, *params) if probs is None else (x, probs, *params)
    if not (torch.is_grad_enabled() and (trained or any(t.requires_grad for t in inputs))):
        return forward_pass(call, x, probs, keep=False)[0]
    # The anchor keeps the function in the graph where the weights are no inputs of it.
    anchor = graph_anchor(x.device) if trained else None
    return apply(_Experts, x, probs, anchor, call, *params)


type _Rows = Tensor | Fp8Rows
type _Pairs = list[tuple[Tensor, _Rows]]  # of each segment: gradient of the output, input


class _Kept(NamedTuple):
    """What the backward needs of one segment: its rows, groups and probabilities, and fc1's output
    [n, F1], None if recomputed."""

    rows: _Rows
    groups: RowGroups
    probs: Tensor | None
    hidden: _Rows | None


def forward_pass(
    call: Call, x: Tensor, probs: Tensor | None, keep: bool
) -> tuple[Tensor, list[_Kept]]:
    """The result, and with `keep` what the backward needs."""
    exchange = call.transport.forward(x, probs, keep)
    kept: list[_Kept] = []
    keep_hidden = keep and "hidden" not in call.recompute
    for segment in exchange.segments():
        rows: _Rows = segment.rows
        groups = segment.groups
        if call.fp8:
            rows, hidden, activated, matrices = _fp8().forward_product(
                segment.rows, call.fc1, call.fc2, groups, segment.probs, keep_hidden
            )
            exchange.combine_product(segment, activated, matrices)
        else:
            hidden, activated = activated_product(
                segment.rows, call.fc1, groups, call.activation, segment.probs, keep_hidden
            )
            exchange.combine_product(segment, activated, call.fc2.forward_matrices)
        if keep:
            kept.append(_Kept(rows, groups, segment.probs, hidden))
    exchange.finish()
    return exchange.results[0], kept


def backward_pass(
    call: Call, grad: Tensor, kept: Sequence[_Kept], consume: bool
) -> tuple[Exchange, _Pairs, _Pairs]:
    """The exchange of dX, on its way, and what dW of fc1 and of fc2 are made of.

    consume: fc1's kept outputs are not asked for again.
    """
    exchange = call.transport.backward(grad, call.deferred)
    fc1: _Pairs = []
    fc2: _Pairs = []
    # zip asks the exchange first, and so to its end.
    for segment, own in zip(exchange.segments(), kept, strict=True):
        dy, groups = segment.rows, segment.groups
        if call.fp8:
            given = (dy, own.hidden, call.fc1, call.fc2, groups, own.probs)
            cast, matrices, dh, activated, dprobs = _fp8().backward_product(*given)
            exchange.combine_product(segment, cast, matrices, dprobs)
        else:
            assert isinstance(own.hidden, Tensor)
            da = grouped_product(dy, call.fc2.backward_matrices, groups)
            dh, activated, dprobs = activation_backward(
                call.activation, own.hidden, da, own.probs, groups, consume
            )
            exchange.combine_product(segment, dh, call.fc1.backward_matrices, dprobs)
        fc1.append((dh, own.rows))
        fc2.append((dy, activated))
    return exchange, fc1, fc2


def _weight_grads(
    call: Call, fc: ExpertWeights, pairs: _Pairs, groups: Sequence[RowGroups]
) -> list[Tensor] | None:
    """dW of one projection, one tensor for each of its parameters; None where it is reported."""
    bf16: Any = _fp8().in_bf16(pairs, groups) if call.fp8 else pairs
    rows = merge_rows(bf16, groups)
    if call.report is None:
        return weight_grads(fc, *rows, call.fused_main_grad)
    add_to_main_grads(fc, *rows)
    call.report(fc.params)
    return None


def _fp8() -> Any:
    """moe/fp8_experts.py, which needs Triton."""
    from megatron_fluid.moe import fp8_experts

    return fp8_experts


def _tensors(
    values: Sequence[Tensor | Fp8Rows | None],
) -> tuple[list[Tensor | None], tuple[bool, ...]]:
    """Values as autograd saves them, and which of them are fp8 rows: two tensors each."""
    fp8 = tuple(isinstance(value, Fp8Rows) for value in values)
    found: list[Tensor | None] = []
    for value in values:
        found += value if isinstance(value, Fp8Rows) else [value]
    return found, fp8


def _rows_of(saved: Sequence[Tensor], fp8: Sequence[bool]) -> list[Any]:
    """What _tensors was given."""
    left = iter(saved)
    return [Fp8Rows(next(left), next(left)) if cast else next(left) for cast in fp8]


class _Experts(torch.autograd.Function):
    """Autograd's view of forward_pass and backward_pass: it saves, restores and orders.

    Inputs: x, probs, the anchor, the call, and the parameters (none where the scheduler delivers
    their gradients).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, anchor: Tensor | None, call: Call,
        *params: Tensor,
    ) -> Tensor:  # fmt: skip
        out, kept = forward_pass(call, x, probs, keep=True)
        rows = [x] if "rows" in call.recompute else [own.rows for own in kept]
        saved, ctx.fp8 = _tensors((*rows, *(own.hidden for own in kept)))
        ctx.save_for_backward(*saved)
        ctx.routes = [(own.probs, own.groups) for own in kept]
        ctx.call, ctx.versions = call, call.versions()
        ctx.has_anchor = anchor is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        saved = _rows_of(ctx.saved_tensors, ctx.fp8)
        rows, hidden = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        if call.versions() != ctx.versions:
            what = "expert weights were changed in place between forward and backward"
            raise RuntimeError(f"{call.name}: {what}")
        groups = [groups for _, groups in ctx.routes]
        if "rows" in call.recompute:
            rows = call.transport.recompute_rows(rows[0])
            if call.fp8:
                rows = [_fp8().cast_segment(x, g) for x, g in zip(rows, groups, strict=True)]
        if "hidden" in call.recompute and call.fp8:
            rows_of = zip(rows, groups, strict=True)
            hidden = [_fp8().hidden_product(x, call.fc1, g) for x, g in rows_of]
        elif "hidden" in call.recompute:
            matrices = call.fc1.forward_matrices
            hidden = [grouped_product(x, matrices, g) for x, g in zip(rows, groups, strict=True)]
        consume = "hidden" in call.recompute or not graph_is_kept()
        kept = list(map(_Kept, rows, groups, (probs for probs, _ in ctx.routes), hidden))
        del saved, rows, hidden
        exchange, pairs1, pairs2 = backward_pass(call, grad, kept, consume)
        del kept
        fc1 = functools.partial(_weight_grads, call, call.fc1, pairs1, groups)
        fc2 = functools.partial(_weight_grads, call, call.fc2, pairs2, groups)
        del pairs1, pairs2

        dw: list[Tensor | None] = []
        wanted = ctx.has_anchor and goes_on_to(ctx.next_functions[-1])
        if call.deferred:

            def submit() -> None:
                for number, fc, compute in ((2, call.fc2, fc2), (1, call.fc1, fc1)):
                    if wanted and fc.requires_grad():
                        call.scheduler.submit(f"{call.name} fc{number}", fc.params, compute)

            exchange.run_queued(call.scheduler, submit)
        elif call.report is not None:
            if wanted and call.fc2.requires_grad():
                fc2()
            del fc2
            if wanted and call.fc1.requires_grad():
                fc1()
        else:
            needed, split = ctx.needs_input_grad[4:], len(call.fc1.params)
            none: list[Any] = [None]
            dw2 = fc2() if any(needed[split:]) else none * len(call.fc2.params)
            del fc2  # and what dw2 was made of: dw1 may have the memory
            dw1 = fc1() if any(needed[:split]) else none * split
            dw = [*(dw1 or ()), *(dw2 or ())]
        exchange.finish(later=ctx.needs_input_grad[0])
        dx, dprobs = (*exchange.results, None)[:2]
        return dx, dprobs, None, None, *dw
