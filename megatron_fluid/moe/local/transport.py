"""The transport of a group of one rank: no token leaves it.

On a GPU the kernels of moe/nvlink plan and move the tokens, in plain memory: tokens are gathered
from where they are, the GEMM before a combine writes each row where its token is summed, and with
stacked weights the host reads nothing. Elsewhere torch's index operations do the same.

    y = local_moe(group, x, topk_ids, probs, w1, w2, "swiglu")

A recomputed layer keeps its routing: `plan = plan_local(group, x, ids, probs, El, "swiglu")` once,
outside the checkpoint, and `plan=plan` inside.

Shapes: T tokens, K top-k, El experts (all of them), H hidden, N expert rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.simulated import SimulatedWorkspace
from megatron_fluid.cuda.triton_launch import power_of_two
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm import Fp8Rows
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.autograd import make_call, run_experts
from megatron_fluid.moe.expert_weights import ExpertWeights, Matrices, expert_projections
from megatron_fluid.moe.experts import RowGroups, grouped_product, have_triton
from megatron_fluid.moe.rounds.plan import Permutation, count_choices
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

if TYPE_CHECKING:
    from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle

__all__ = ["LocalPlan", "LocalTransport", "local_moe", "local_unsupported_reason", "plan_local"]


def local_unsupported_reason(group: dist.ProcessGroup) -> str | None:
    """Return why the local transport cannot serve `group`, or None if it can."""
    ranks = group.size()
    return None if ranks == 1 else f"it is for one rank, and the group has {ranks}"


@dataclass(frozen=True)
class LocalPlan:
    """The routing of one call by torch's index operations: the permutation of the kept choices,
    sorted by expert, and their division among the experts."""

    permutation: Permutation
    groups: RowGroups

    @classmethod
    def of(cls, ids: Tensor, num_experts: int) -> LocalPlan:
        """From ids [T, K], -1 where dropped. On a GPU the host reads the row counts."""
        keys, histogram = count_choices(ids, num_experts)
        order = torch.argsort(keys, stable=True)
        offsets = histogram.cumsum(0, dtype=torch.int32)
        ends = offsets.tolist()
        return cls(Permutation.of(order, ends[-1], ids.shape), RowGroups(offsets, ends))


class LocalTransport(TokenTransport):
    """Moves the tokens of one call by torch's index operations, on any device and in any dtype."""

    recomputable = ("rows", "hidden")

    def __init__(self, plan: LocalPlan) -> None:
        self.plan = plan

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _LocalExchange:
        return _LocalExchange(self.plan, x, probs)

    def backward(self, grad: Tensor, keep: bool) -> _LocalExchange:
        return _LocalExchange(self.plan, grad)

    def recompute_rows(self, x: Tensor) -> list[Tensor]:
        return [self.plan.permutation.gather(x)]


class _LocalExchange(Exchange):
    def __init__(self, plan: LocalPlan, x: Tensor, probs: Tensor | None = None) -> None:
        self.plan, self.x, self.probs = plan, x, probs
        self.results: list[Tensor] = []

    def segments(self) -> Iterator[Segment]:
        permutation = self.plan.permutation
        probs = self.probs
        if probs is not None:
            probs = probs.reshape(-1).index_select(0, permutation.row_slot)
        yield Segment(permutation.gather(self.x), self.plan.groups, probs)

    def combine_product(
        self, segment: Segment, x: Tensor | Fp8Rows, matrices: Matrices,
        row_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        permutation = self.plan.permutation
        product = grouped_product(x, matrices, segment.groups)
        self.results = [permutation.sum_choices(product)]
        if row_grad is not None:
            dprobs = row_grad.new_zeros(permutation.slot_row.numel())
            dprobs.index_copy_(0, permutation.row_slot, row_grad)
            self.results.append(dprobs.view(permutation.slot_row.shape))


def _kernels_serve(x: Tensor, activation: Activation) -> bool:
    """Whether the kernels of moe/nvlink take the call."""
    if not x.is_cuda or not have_triton():
        return False
    from megatron_fluid.kernels.activation import ACTIVATIONS

    fits = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.shape[0] > 0
    return fits and x.shape[1] % 8 == 0 and activation.built_in and activation.name in ACTIVATIONS


def _buffers(group: dist.ProcessGroup, x: Tensor, top_k: int, experts: int) -> NvlinkBuffers:
    """The buffers of this shape, kept for the group. Numbers of tokens are rounded up, so that
    layers of many numbers share few. Calls use them one after the other, on one stream."""
    from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
    from megatron_fluid.moe.nvlink.schedule import Schedule

    device = x.device
    key = "moe local workspace", device
    workspace = group_resource(group, key, lambda: SimulatedWorkspace(1, device).rank(0))
    tokens, hidden = x.shape
    tokens = power_of_two(tokens) if tokens < 1024 else -(-tokens // 1024) * 1024
    shape, schedule = (tokens, hidden, top_k, experts, x.dtype), Schedule(sent_rows=True)
    return group_resource(
        group,
        ("moe local buffers", *shape, device),
        lambda: NvlinkBuffers(workspace, *shape, schedule=schedule),
    )


def plan_local(
    group: dist.ProcessGroup,
    x: Tensor,
    topk_ids: Tensor,
    probs: Tensor,
    experts: int,
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu",
    stacked: bool = True,
) -> LocalPlan | RoutingHandle:
    """The routing of one call, to be passed to local_moe and to its recomputation. Arguments as for
    local_moe; stacked: the host need not know the row counts."""
    if not _kernels_serve(x, resolve_activation(activation)):
        return LocalPlan.of(topk_ids, experts)
    from megatron_fluid.moe.nvlink.transport import plan_nvlink

    buffers = _buffers(group, x, topk_ids.shape[1], experts)
    return plan_nvlink(buffers, topk_ids, probs.float(), topk_ids.numel() if stacked else None)


def local_moe(
    group: dist.ProcessGroup,
    x: Tensor,
    topk_ids: Tensor,
    probs: Tensor,
    w1: Tensor | Sequence[Tensor] | ExpertWeights,
    w2: Tensor | Sequence[Tensor] | ExpertWeights,
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu",
    *,
    plan: LocalPlan | RoutingHandle | None = None,
    scheduler: WeightGradScheduler | None = None,
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    fp8: bool = False,
    name: str = "moe",
) -> Tensor:
    """sum over k of probs[t, k] * expert(topk_ids[t, k])(x[t]), on one rank: [T, H]. Differentiable
    in x, probs, w1 and w2.

    Args:
        group: of one rank; buffers are kept for it.
        x, topk_ids, probs, w1, w2: as for nvlink_moe (moe/nvlink/transport.py), in any dtype.
        activation: a name in moe.activations.ACTIVATIONS, or a callable.
        plan: of plan_local, in place of planning here.
        scheduler, fused_main_grad, recompute, fp8, name: see moe.autograd.make_call.

    Raises:
        ConfigError: the group has several ranks, or shapes or dtypes do not fit.
    """
    if (reason := local_unsupported_reason(group)) is not None:
        raise ConfigError.of("group of a local MoE layer", f"{group.size()} ranks", reason)
    if probs.shape != topk_ids.shape or x.dim() != 2 or x.shape[0] != topk_ids.shape[0]:
        found = f"{list(x.shape)}, {list(topk_ids.shape)}, {list(probs.shape)}"
        raise ConfigError.of(f"{name}: x, topk_ids, probs", found, "[T, H], [T, K], [T, K]")
    act = resolve_activation(activation)
    experts = w1.num_experts if isinstance(w1, ExpertWeights) else len(w1)
    x = x.contiguous()
    fcs = expert_projections(w1, w2, experts, x, act, name)
    if plan is None:
        stacked = all(isinstance(fc.forward_matrices, Tensor) for fc in fcs)
        plan = plan_local(group, x, topk_ids, probs, experts, act, stacked)
    transport: TokenTransport
    if isinstance(plan, LocalPlan):
        transport = LocalTransport(plan)
    else:
        from megatron_fluid.moe.nvlink.steps import aligned
        from megatron_fluid.moe.nvlink.transport import NvlinkTransport

        x, probs = aligned(x), probs.float()
        buffers = _buffers(group, x, topk_ids.shape[1], experts)
        transport = NvlinkTransport(buffers, topk_ids, plan)
    call = make_call(transport, act, fcs, scheduler, name, fused_main_grad, recompute, fp8)
    if not torch.is_autocast_enabled(x.device.type):
        return run_experts(call, x, probs)
    with torch.autocast(x.device.type, enabled=False):
        return run_experts(call, x, probs)
