"""The transport of a group of one rank: no token leaves it.

On a GPU the kernels of kernel_plan.py plan and move the tokens, and with stacked weights the host
reads nothing. Elsewhere torch's index operations do the same.

    plan = plan_local(x, topk_ids, probs, El, activation)
    y = run_experts(call, LocalTransport(plan))

A recomputed layer keeps its routing: it plans once, outside the checkpoint.

Shapes: T tokens, K top-k, El experts (all of them), H hidden, N expert rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm.launch import groups_on_device
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.experts import have_triton
from megatron_fluid.moe.permute import Permutation, count_choices
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport, check_tokens

if TYPE_CHECKING:
    from megatron_fluid.moe.local.kernel_plan import KernelPlan

__all__ = ["LocalPlan", "LocalTransport", "plan_local"]


@dataclass(frozen=True)
class LocalPlan:
    """The routing of one call by torch's index operations, on any device and in any dtype: the
    permutation of the kept choices, sorted by expert, and their division among the experts.
    KernelPlan is the same by kernels."""

    permutation: Permutation
    groups: RowGroups

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, in_order: bool = False) -> LocalPlan:
        """From ids [T, K], -1 where dropped. On a GPU the host reads the row counts. in_order: as
        in Permutation."""
        keys, histogram = count_choices(ids, num_experts)
        offsets = histogram.cumsum(0, dtype=torch.int32)
        ends = offsets.tolist()
        permutation = Permutation.of(keys, ids.shape, in_order).first(ends[-1])
        return cls(permutation, RowGroups(offsets, ends))

    @property
    def shape(self) -> torch.Size:
        """[T, K]"""
        return self.permutation.slot_row.shape

    def wide_probs(self, probs: Tensor) -> Tensor:
        """Probabilities in the dtype that their gradients have: fp32 or better."""
        return probs.to(torch.promote_types(probs.dtype, torch.float32))

    def row_probs(self, probs: Tensor) -> Tensor:
        """The probability of each row: [T, K] -> [N]"""
        return self.permutation.gather_choices(probs)

    def permute(self, x: Tensor) -> Tensor:
        """x [T, H] in expert order: [N, H]"""
        return self.permutation.gather(x)

    def unpermute(self, rows: Tensor, row_grad: Tensor | None = None) -> list[Tensor]:
        """The sum of each token's rows [N, H] -> [T, H], and the gradients [N] by choice [T, K]."""
        found = [self.permutation.sum_choices(rows)]
        return found if row_grad is None else [*found, self.permutation.spread_choices(row_grad)]


class LocalTransport(TokenTransport):
    """Moves the tokens of one call within this rank, as plan_local has planned it."""

    recomputable = ("rows", "hidden")
    regathers = True
    carries_packed_rows = True

    def __init__(self, plan: LocalPlan | KernelPlan) -> None:
        self.plan = plan

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H], probs [T, K]"""
        check_tokens(x, probs, self.plan.shape)
        return x, None if probs is None else self.plan.wide_probs(probs)

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _LocalExchange:
        return _LocalExchange(self.plan, x, probs)

    def backward(self, grad: Tensor, keep: bool) -> _LocalExchange:
        return _LocalExchange(self.plan, grad)

    def recompute_rows(self, x: Tensor) -> list[Tensor]:
        return [self.plan.permute(x)]


class _LocalExchange(Exchange):
    def __init__(
        self, plan: LocalPlan | KernelPlan, x: Tensor, probs: Tensor | None = None
    ) -> None:
        self.plan, self.x, self.probs = plan, x, probs
        self.results: list[Tensor] = []

    def segments(self) -> Iterator[Segment]:
        probs = None if self.probs is None else self.plan.row_probs(self.probs)
        yield Segment(self.plan.permute(self.x), self.plan.groups, probs)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        self.results = self.plan.unpermute(rows, row_grad)


def _kernels_serve(x: Tensor, activation: Activation | None, dtype: torch.dtype) -> bool:
    """Whether the kernels of kernel_plan.py take a call with tokens like x, of `dtype`."""
    if x.device.type != "cuda" or not have_triton():
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
    *,
    activation: Activation | None = None,
    stacked: bool = True,
    dtype: torch.dtype | None = None,
    in_order: bool = False,
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
        in_order: a token's rows are summed choice by choice. The kernels always do so.
    """
    if probs.shape != topk_ids.shape:
        found = f"{list(topk_ids.shape)}, {list(probs.shape)}"
        raise ConfigError.of("topk_ids, probs", found, "[T, K], [T, K]")
    dtype = x.dtype if dtype is None else dtype
    if not _kernels_serve(x, activation, dtype):
        return LocalPlan.of(topk_ids, experts, in_order)
    from megatron_fluid.moe.local.kernel_plan import make_plan

    read_ends = not (stacked and groups_on_device(x.device, dtype))
    return make_plan(topk_ids, probs, experts, read_ends)
