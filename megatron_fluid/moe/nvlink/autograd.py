"""The MoE layer's experts over NVLink: dispatch, experts and combine, forward and backward, as one
differentiable function.

    domain = shared_buffers(group, max_tokens, hidden, ffn, top_k, num_experts)      # collective,
    once y = nvlink_moe(domain, x, topk_ids, probs, w1, w2, "swiglu")

Exact mode (capacity None) sizes activations by the rows that arrive; the host reads the experts'
row counts while tokens are on the wire. Bounded mode (capacity = rows for this rank) reads nothing
on the host where one GEMM takes all experts (bf16, stacked), so forward and backward can be
captured in a CUDA graph; rows over the capacity contribute nothing and are reported by
`domain.check_overflow()`. A graph holds the addresses of the moment: a larger domain that is made
on the same workspace afterwards frees them, so make the largest first.

A recomputed layer keeps its routing: `handle = plan_nvlink(domain, ids, probs)` once, outside the
checkpoint, and `handle=handle` inside.

Shapes: T tokens of this rank, K top-k, El local experts, H hidden, F ffn (F1 = 2F when gated: gate
first), N expert rows of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.deferred_linear import graph_anchor
from megatron_fluid.backward.functions import apply, goes_on_to, graph_is_kept, once_differentiable
from megatron_fluid.backward.weight_grads import (
    WeightGradScheduler,
    get_backward_scheduler,
    mark_all_added_to_main_grad,
)
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.activation import ACTIVATIONS
from megatron_fluid.kernels.grouped_gemm import (
    add_weight_grads,
    can_add_weight_grads,
    grouped_weight_grad,
    host_ends,
)
from megatron_fluid.moe.experts import (
    ExpertWeights,
    RowGroups,
    accumulate_weight_grad,
    adds_one_by_one,
)
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle
from megatron_fluid.moe.nvlink.forward_backward import (
    SavedForward,
    backward_dx,
    forward_pass,
    recompute_hidden,
    recompute_rows,
)
from megatron_fluid.moe.nvlink.steps import aligned, make_plan, publish

__all__ = ["nvlink_moe", "plan_nvlink"]

_RECOMPUTED = {"hidden", "rows"}


@dataclass
class _Call:
    """Everything about one call but its tensors: made in forward, read in backward, shared with no
    other call."""

    domain: NvlinkBuffers
    ids: Tensor
    handle: RoutingHandle | None
    fc1: ExpertWeights
    fc2: ExpertWeights
    activation: str
    capacity: int | None
    scheduler: WeightGradScheduler
    name: str
    deferred: bool
    fused_main_grad: bool
    recompute: frozenset[str]

    def versions(self) -> list[int]:
        """Counts of the weights' changes in place. They are not saved tensors of autograd, which
        would cost a detour for each of Megatron's parameters, but are held to the same rule."""
        return [param._version for param in (*self.fc1.params, *self.fc2.params)]


def _weight_grads(
    call: _Call, fc: ExpertWeights, dy: Tensor, x: Tensor, handle: RoutingHandle
) -> list[Tensor]:
    """dW of one projection, a tensor for each of its parameters, from dy [N, out] and x [N, in]."""
    programs = call.domain.sms
    if not call.fused_main_grad:
        return fc.as_gradients(grouped_weight_grad(dy, x, handle.offsets, handle.ends, programs))
    grads = fc.main_grads()
    alone = handle.ends is not None and adds_one_by_one(dy.shape[0], fc.num_experts)
    if not alone and can_add_weight_grads(dy, x, grads):
        for param, grad in zip(fc.params, grads, strict=False):
            if getattr(param, "overwrite_main_grad", False):
                (param.main_grad if fc.stacked else grad).zero_()  # type: ignore[attr-defined]
        add_weight_grads(dy, x, handle.offsets, fc.main_grad_addresses(grads), grads, programs)
        return mark_all_added_to_main_grad(fc.params)
    ends = host_ends(handle.offsets, handle.ends)
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return accumulate_weight_grad(dy, x, fc, RowGroups(counts, handle.offsets))


def _forward(call: _Call, x: Tensor, probs: Tensor, keep: bool) -> tuple[Tensor, SavedForward]:
    """y [T, H], and what a backward needs; the output of fc1 only where it is to `keep` it."""
    plan, bounded = call.handle is None, call.capacity is not None
    handle = (
        publish(call.domain, call.ids, probs, call.capacity) if call.handle is None else call.handle
    )
    weights = call.fc1, call.fc2
    return forward_pass(
        call.domain, handle, x, *weights, call.activation, plan=plan, bounded=bounded, keep=keep
    )


class _NvlinkMoE(torch.autograd.Function):
    """Autograd's view of forward_pass and backward_dx: it saves, restores and orders, and computes
    nothing.

    Inputs: x [T, H], probs [T, K], an anchor that keeps it in the graph, the call, and the
    parameters (ordinary inputs; none while the scheduler is enabled, which then delivers their
    gradients).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, anchor: Tensor | None, call: _Call, *params: Tensor
    ) -> Tensor:
        out, saved = _forward(call, x, probs, keep="hidden" not in call.recompute)
        ctx.save_for_backward(x if "rows" in call.recompute else saved.rows, saved.hidden)
        ctx.call, ctx.handle, ctx.versions = call, saved.handle, call.versions()
        ctx.has_anchor = anchor is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        handle: RoutingHandle = ctx.handle
        rows, hidden = ctx.saved_tensors
        if call.versions() != ctx.versions:
            raise RuntimeError(
                f"{call.name}: expert weights were changed in place between forward and backward"
            )
        if "rows" in call.recompute:
            rows = recompute_rows(call.domain, handle, rows)
        if "hidden" in call.recompute:
            hidden = recompute_hidden(call.domain, handle, rows, call.fc1)
        saved = SavedForward(handle, rows, hidden, call.activation)
        consume = "hidden" in call.recompute or not graph_is_kept()
        needed = ctx.needs_input_grad[4:]  # of the parameters; none where they are deferred
        split = len(call.fc1.params)
        result = backward_dx(call.domain, saved, aligned(grad), call.fc1, call.fc2, consume)
        del hidden, saved

        fc2 = functools.partial(_weight_grads, call, call.fc2, result.fc2[0], result.fc2[1], handle)
        fc1 = functools.partial(_weight_grads, call, call.fc1, result.grad_hidden, rows, handle)
        result.fc2.clear()

        dw: list[Tensor | None] = []
        if call.deferred:
            # What the layers before queued runs here, where this layer's dX is on its way; what
            # this one queues, in the next.
            call.scheduler.finish_batch()
            wanted = ctx.has_anchor and goes_on_to(ctx.next_functions[-1])
            if wanted and call.fc2.requires_grad():
                call.scheduler.submit(f"{call.name} fc2", call.fc2.params, fc2)
            if wanted and call.fc1.requires_grad():
                call.scheduler.submit(f"{call.name} fc1", call.fc1.params, fc1)
        else:
            dw2: list[Any] = list(fc2()) if any(needed[split:]) else [None] * len(call.fc2.params)
            del fc2  # and with it what dw2 was made of: dw1 may have the memory
            dw1: list[Any] = list(fc1()) if any(needed[:split]) else [None] * split
            dw = dw1 + dw2
        result.finish()
        return result.dx, result.dprobs, None, None, *dw


def plan_nvlink(
    domain: NvlinkBuffers, topk_ids: Tensor, probs: Tensor, capacity: int | None = None
) -> RoutingHandle:
    """The routing of one call, to be passed to nvlink_moe and passed again in its recomputation.
    Collective.

    topk_ids integers [T, K], -1 where dropped, and no expert twice for a token; probs fp32 [T, K]
    (their values are part of the plan). The nvlink_moe of this handle comes before the domain's
    next plan (and before any other call of the same workspace and stream): peers may still read
    what was published here until that call.
    """
    handle = publish(domain, topk_ids, probs.detach(), capacity)
    make_plan(domain, handle)
    if capacity is None:
        handle.ends = domain.read_offsets()
    return handle


def nvlink_moe(
    domain: NvlinkBuffers,
    x: Tensor,
    topk_ids: Tensor,
    probs: Tensor,
    w1: Tensor | Sequence[Tensor] | ExpertWeights,
    w2: Tensor | Sequence[Tensor] | ExpertWeights,
    activation: str = "swiglu",
    capacity: int | None = None,
    *,
    handle: RoutingHandle | None = None,
    scheduler: WeightGradScheduler | None = None,
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    name: str = "moe",
) -> Tensor:
    """sum over k of probs[t, k] * expert(topk_ids[t, k])(x[t]): [T, H]. Collective over the
    domain's ranks, in one stream order.

    Args:
        domain: the buffers; see megatron_fluid.moe.nvlink.shared.shared_buffers.
        x: tokens, of the domain's dtype. [T, H]
        topk_ids: integers, -1 where dropped. An expert may be named once by a token: of more rows
            than there are local experts a token's sum may leave some out. [T, K]
        probs: fp32; each multiplies its expert's activation before fc2. [T, K]
        w1, w2: [El, F1, H] and [El, H, F], strided as they may be, or El matrices each (Megatron's
            parameters). Matrices that lie in memory at equal distances are as good as a stacked
            tensor; others are computed one by one. An ExpertWeights made of them before spares
            looking at each again, as long as their memory stays.
        activation: a name in megatron_fluid.kernels.activation.ACTIVATIONS.
        capacity: None for exact mode, or the rows of bounded mode.
        handle: of plan_nvlink, in place of planning here; the ids and probs must be those it was
            made of.
        scheduler: None takes the process-wide one. If it is enabled and the weights are leaves,
            their gradients are deferred.
        fused_main_grad: add weight gradients straight to `param.main_grad` (Megatron's gradient
            accumulation fusion).
        recompute: what the backward makes again in place of keeping it: "rows", the dispatched
            tokens (by another dispatch of x), "hidden", the output of fc1 (by another GEMM).
        name: of this layer, for errors.

    Differentiable in x, probs, w1 and w2.

    Raises:
        ConfigError: an argument does not fit the domain.
        PeerTimeoutError: an earlier call of this rank waited for a peer in vain.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError.of("activation", activation, ", ".join(ACTIVATIONS))
    domain.workspace.check_errors()
    domain.check(x, topk_ids, probs)
    fc1 = (
        w1
        if isinstance(w1, ExpertWeights)
        else ExpertWeights(w1, domain.local_experts, name=f"{name}: w1")
    )
    fc2 = (
        w2
        if isinstance(w2, ExpertWeights)
        else ExpertWeights(w2, domain.local_experts, name=f"{name}: w2")
    )
    width = fc1.out_width // 2 if ACTIVATIONS[activation][1] else fc1.out_width
    if (fc1.in_width, fc2.out_width, fc2.in_width) != (domain.hidden, domain.hidden, width):
        found = f"w1 [{fc1.out_width}, {fc1.in_width}], w2 [{fc2.out_width}, {fc2.in_width}]"
        raise ConfigError.of(
            f"{name}: weights of an expert",
            found,
            f"w1 [F1, {domain.hidden}], w2 [{domain.hidden}, {width}]",
        )
    if not fc1.params[0].dtype == fc2.params[0].dtype == x.dtype:
        raise ConfigError.of(
            f"{name}: dtype of the weights", fc1.params[0].dtype, f"{x.dtype} as x"
        )
    if not set(recompute) <= _RECOMPUTED:
        raise ConfigError.of(
            "recompute", sorted(recompute), f"some of {', '.join(sorted(_RECOMPUTED))}"
        )
    scheduler = get_backward_scheduler() if scheduler is None else scheduler
    learning = torch.is_grad_enabled()
    deferred = learning and scheduler.is_enabled() and fc1.deferrable() and fc2.deferrable()
    fused = (
        learning
        and fused_main_grad
        and all(hasattr(p, "main_grad") for p in (*fc1.params, *fc2.params))
    )
    call = _Call(
        *(domain, topk_ids, handle, fc1, fc2, activation, capacity, scheduler, name, deferred),
        fused_main_grad=fused,
        recompute=frozenset(recompute),
    )
    trained = deferred and (fc1.requires_grad() or fc2.requires_grad())
    params = () if deferred else (*fc1.params, *fc2.params)
    if not (learning and (trained or any(tensor.requires_grad for tensor in (x, probs, *params)))):
        return _forward(call, aligned(x), probs, keep=False)[0]
    return apply(
        _NvlinkMoE, aligned(x), probs, graph_anchor(x.device) if trained else None, call, *params
    )
