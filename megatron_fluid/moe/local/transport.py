"""The transport of a group of one rank: no token leaves it.

On a GPU the kernels of kernel_transport.py plan and move the tokens, and with stacked weights the
host reads nothing. Elsewhere torch's index operations do the same.

    y = local_moe(group, x, topk_ids, probs, w1, w2, "swiglu")

A recomputed layer keeps its routing: `plan = plan_local(x, ids, probs, El, "swiglu")` once,
outside the checkpoint, and `plan=plan` inside.

Shapes: T tokens, K top-k, El experts (all of them), H hidden, N expert rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.kernels.grouped_gemm.launch import groups_on_device
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.autograd import make_call, run_experts
from megatron_fluid.moe.biases import GivenBiases, expert_biases
from megatron_fluid.moe.expert_weights import (
    ExpertWeights,
    GivenWeights,
    Matrices,
    expert_projections,
)
from megatron_fluid.moe.experts import RowGroups, grouped_product, have_triton
from megatron_fluid.moe.kept import Offload
from megatron_fluid.moe.rounds.plan import Permutation, count_choices
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

if TYPE_CHECKING:
    from megatron_fluid.moe.local.kernel_transport import KernelPlan

__all__ = [
    "LocalPlan",
    "LocalTransport",
    "compile_local_ahead",
    "local_moe",
    "local_transport",
    "local_unsupported_reason",
    "plan_local",
]


# Of probabilities, as kernels read them; their gradients are rounded to the same.
_PROBS = (torch.float32, torch.bfloat16, torch.float16)


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
        self.combine_rows(segment, grouped_product(x, matrices, segment.groups), row_grad)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        permutation = self.plan.permutation
        self.results = [permutation.sum_choices(rows)]
        if row_grad is not None:
            dprobs = row_grad.new_zeros(permutation.slot_row.numel())
            dprobs.index_copy_(0, permutation.row_slot, row_grad)
            self.results.append(dprobs.view(permutation.slot_row.shape))


def _kernels_serve(x: Tensor, activation: Activation, device: torch.device | None = None) -> bool:
    """Whether the kernels of kernel_transport.py take a call with tokens x on `device`, by default
    x's own."""
    if (device or x.device).type != "cuda" or not have_triton():
        return False
    from megatron_fluid.kernels.activation.kernel import ACTIVATIONS

    fits = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.shape[0] > 0
    return fits and x.shape[1] % 8 == 0 and activation.built_in and activation.name in ACTIVATIONS


def compile_local_ahead(
    device: torch.device, dtype: torch.dtype, ids: torch.dtype, shape: tuple[int, int, int, int],
    activation: Activation, probs: torch.dtype = torch.float32, biased: bool = False,
    fp8: bool = False,
) -> None:  # fmt: skip
    """Begin to compile Triton's kernels of a local layer in the background, if its device runs
    them. shape: H, F, El, K. ids, probs: the dtypes of the choices and their probabilities. biased:
    whether the experts have biases. fp8: whether they are computed in fp8, whose casts but for that
    of the tokens are left to their first launches."""
    hidden, width, experts, top_k = shape
    if not _kernels_serve(torch.empty(1, hidden, device="meta", dtype=dtype), activation, device):
        return
    from megatron_fluid.moe import fused_activation
    from megatron_fluid.moe.local import kernel_transport

    kinds = ids, probs if probs in _PROBS else torch.float32
    packed = fp8 and hidden % 128 == 0
    kernel_transport.compile_ahead(device, dtype, *kinds, (hidden, top_k, experts), packed)
    if fp8:
        return
    kind = activation.name, activation.variant
    fused_activation.compile_ahead(device, dtype, width, experts, *kind, biased)


def plan_local(
    x: Tensor,
    topk_ids: Tensor,
    probs: Tensor,
    experts: int,
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu",
    stacked: bool = True,
) -> LocalPlan | KernelPlan:
    """The routing of one call, to be passed to local_moe and to its recomputation. Arguments as for
    local_moe; stacked: whether each projection's matrices lie in memory at equal distances, so that
    the host need not know the row counts."""
    if not _kernels_serve(x, resolve_activation(activation)):
        return LocalPlan.of(topk_ids, experts)
    from megatron_fluid.moe.local.kernel_transport import make_plan

    read_ends = not (stacked and groups_on_device(x.device, x.dtype))
    probs = probs if probs.dtype in _PROBS else probs.float()
    return make_plan(topk_ids, probs, experts, read_ends)


def _transport_of(plan: LocalPlan | KernelPlan, x: Tensor) -> tuple[Tensor, TokenTransport]:
    """x as the transport takes it, and the transport of a planned call."""
    if isinstance(plan, LocalPlan):
        return x, LocalTransport(plan)
    from megatron_fluid.cuda.triton_launch import aligned
    from megatron_fluid.moe.local.kernel_transport import KernelTransport

    return aligned(x), KernelTransport(plan)


def local_transport(
    x: Tensor, topk_ids: Tensor, probs: Tensor, experts: int
) -> tuple[Tensor, TokenTransport]:
    """For experts that this package does not compute (moe/open_exchange.py): x [T, H] as the
    transport takes it, and the transport of one call. Arguments as for local_moe; the host reads
    the row counts.
    """
    x = x.contiguous()
    return _transport_of(plan_local(x, topk_ids, probs, experts, stacked=False), x)


def local_moe(
    group: dist.ProcessGroup,
    x: Tensor,
    topk_ids: Tensor,
    probs: Tensor,
    w1: GivenWeights | ExpertWeights,
    w2: GivenWeights | ExpertWeights,
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu",
    *,
    plan: LocalPlan | KernelPlan | None = None,
    scheduler: WeightGradScheduler | None = None,
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    name: str = "moe",
    biases: GivenBiases | None = None,
    fp8: bool = False,
    fp8_weight_grads: bool = True,
    offload: Offload | None = None,
) -> Tensor:
    """sum over k of probs[t, k] * expert(topk_ids[t, k])(x[t]), on one rank: [T, H]. Differentiable
    in x, probs, w1 and w2.

    Args:
        group: of one rank.
        x, topk_ids, probs, w1, w2: as for nvlink_moe (moe/nvlink/transport.py), in any dtype.
        activation: a name in moe.activations.ACTIVATIONS, or a callable.
        plan: of plan_local, in place of planning here.
        scheduler, fused_main_grad, recompute, name, fp8, fp8_weight_grads, offload: see
            moe.autograd.make_call.
        biases: of fc1 [El, F1] and fc2 [El, H] (see moe/biases.py), or None.

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
        stacked = all(fc.stack is not None for fc in fcs)
        plan = plan_local(x, topk_ids, probs, experts, act, stacked)
    if isinstance(plan, LocalPlan):
        probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    elif probs.dtype not in _PROBS:
        probs = probs.float()
    x, transport = _transport_of(plan, x)
    added = expert_biases(biases, *fcs, name)
    settings = scheduler, name, fused_main_grad, recompute, added, fp8, fp8_weight_grads, offload
    call = make_call(transport, act, fcs, *settings)
    if not torch.is_autocast_enabled(x.device.type):
        return run_experts(call, x, probs)
    with torch.autocast(x.device.type, enabled=False):
        return run_experts(call, x, probs)
