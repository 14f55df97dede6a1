"""The transport of a group of one rank: no token leaves it.

On a GPU the kernels of kernel_transport.py plan and move the tokens, and with stacked weights the
host reads nothing. Elsewhere torch's index operations do the same.

    plan = plan_local(x, topk_ids, probs, El, activation)
    y = run_experts(call, local_transport(plan))

A recomputed layer keeps its routing: it plans once, outside the checkpoint.

Shapes: T tokens, K top-k, El experts (all of them), H hidden, N expert rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm.launch import groups_on_device
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.experts import have_triton
from megatron_fluid.moe.rounds.plan import Permutation, count_choices
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport, check_tokens

if TYPE_CHECKING:
    from megatron_fluid.moe.local.kernel_transport import KernelPlan

__all__ = [
    "LocalPlan",
    "LocalTransport",
    "local_transport",
    "local_unsupported_reason",
    "plan_local",
]


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
    regathers = True
    carries_packed_rows = True

    def __init__(self, plan: LocalPlan) -> None:
        self.plan = plan

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H], probs [T, K]"""
        shape = self.plan.permutation.slot_row.shape
        check_tokens(x, probs, shape)
        if probs is not None:
            probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
        return x.contiguous(), probs

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

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        permutation = self.plan.permutation
        self.results = [permutation.sum_choices(rows)]
        if row_grad is not None:
            dprobs = row_grad.new_zeros(permutation.slot_row.numel())
            dprobs.index_copy_(0, permutation.row_slot, row_grad)
            self.results.append(dprobs.view(permutation.slot_row.shape))


def _kernels_serve(
    x: Tensor, activation: Activation | None, dtype: torch.dtype, device: torch.device | None = None
) -> bool:
    """Whether the kernels of kernel_transport.py take a call with tokens like x, of `dtype`, on
    `device`, by default x's own."""
    if (device or x.device).type != "cuda" or not have_triton():
        return False
    from megatron_fluid.kernels.activation.kernel import ACTIVATIONS

    fits = dtype in (torch.bfloat16, torch.float16, torch.float32) and x.shape[0] > 0
    fits = fits and x.shape[1] % 8 == 0
    if activation is None:
        return fits
    return fits and activation.built_in and activation.name in ACTIVATIONS


def plan_local(
    x: Tensor,
    topk_ids: Tensor,
    probs: Tensor,
    experts: int,
    activation: Activation | None = None,
    stacked: bool = True,
    dtype: torch.dtype | None = None,
) -> LocalPlan | KernelPlan:
    """The routing of one call.

    Args:
        x: tokens. [T, H]
        topk_ids: integers, -1 where dropped. [T, K]
        probs: their values are part of the plan. [T, K]
        experts: E.
        activation: of the experts; None where others compute them.
        stacked: whether each projection's matrices lie in memory at equal distances, so that the
            host need not know the row counts.
        dtype: in which the tokens are computed; None for their own.
    """
    if probs.shape != topk_ids.shape:
        found = f"{list(topk_ids.shape)}, {list(probs.shape)}"
        raise ConfigError.of("topk_ids, probs", found, "[T, K], [T, K]")
    dtype = x.dtype if dtype is None else dtype
    if not _kernels_serve(x, activation, dtype):
        return LocalPlan.of(topk_ids, experts)
    from megatron_fluid.moe.local.kernel_transport import PROB_DTYPES, make_plan

    read_ends = not (stacked and groups_on_device(x.device, dtype))
    probs = probs if probs.dtype in PROB_DTYPES else probs.float()
    return make_plan(topk_ids, probs, experts, read_ends)


def local_transport(plan: LocalPlan | KernelPlan) -> TokenTransport:
    """The transport of a planned call."""
    if isinstance(plan, LocalPlan):
        return LocalTransport(plan)
    from megatron_fluid.moe.local.kernel_transport import KernelTransport

    return KernelTransport(plan)
