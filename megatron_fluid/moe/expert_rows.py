"""The experts alone: rows that somebody else has dispatched, sorted by expert, go through fc1,
activation and fc2, and somebody else combines the results.

    y = expert_rows(rows, probs, counts, w1, w2, "swiglu")

The same autograd function as behind our own transports (moe/autograd.py): grouped GEMMs, one kernel
for activation and probability, weight gradients in main_grad or deferred. Nothing is exchanged.

Shapes: N expert rows of this rank, El local experts, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.autograd import make_call, run_experts
from megatron_fluid.moe.biases import GivenBiases, expert_biases
from megatron_fluid.moe.expert_weights import (
    ExpertWeights,
    GivenWeights,
    Matrices,
    expert_projections,
)
from megatron_fluid.moe.experts import RowGroups, grouped_product
from megatron_fluid.moe.kept import Offload
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["expert_rows"]


class _InPlace(TokenTransport):
    """Moves nothing: the caller's rows are the one segment, its gradients the other."""

    def __init__(self, groups: RowGroups) -> None:
        self.groups = groups

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _Rows:
        return _Rows(Segment(x, self.groups, None if probs is None else probs.detach()))

    def backward(self, grad: Tensor, keep: bool) -> _Rows:
        return _Rows(Segment(grad.contiguous(), self.groups))


class _Rows(Exchange):
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.results: list[Tensor] = []

    def segments(self) -> Iterator[Segment]:
        yield self._segment

    def combine_product(
        self, segment: Segment, x: Tensor | Fp8Rows, matrices: Matrices,
        row_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.combine_rows(segment, grouped_product(x, matrices, segment.groups), row_grad)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        self.results = [rows] if row_grad is None else [rows, row_grad[: rows.shape[0]]]


def expert_rows(
    rows: Tensor,
    probs: Tensor | None,
    counts: Sequence[int],
    w1: GivenWeights | ExpertWeights,
    w2: GivenWeights | ExpertWeights,
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu",
    *,
    scheduler: WeightGradScheduler | None = None,
    fused_main_grad: bool = False,
    recompute: Collection[str] = (),
    name: str = "moe",
    biases: GivenBiases | None = None,
    fp8: bool = False,
    fp8_weight_grads: bool = True,
    offload: Offload | None = None,
) -> Tensor:
    """What the experts make of their rows: [N, H]. Differentiable in rows, probs, weights and
    biases.

    Args:
        rows: of expert 0, of expert 1, ... [N, H]
        probs: what each row's activation is multiplied with, None for ones. [N]
        counts: rows of each expert, on the host. [El]
        w1, w2: [El, F1, H] and [El, H, F], stacked or one matrix for each expert.
        activation: a name in moe.activations.ACTIVATIONS, or a callable.
        scheduler, fused_main_grad, recompute, name, fp8, fp8_weight_grads, offload: see
            moe.autograd.make_call; of recompute "hidden" alone can be had, since the rows are the
            caller's.
        biases: of fc1 [El, F1] and fc2 [El, H] (see moe/biases.py), or None.

    Raises:
        ConfigError: shapes or dtypes do not fit, or the counts are not those of the rows.
    """
    if rows.dim() != 2 or sum(counts) != rows.shape[0]:
        found = f"{list(rows.shape)}, {sum(counts)} counted"
        raise ConfigError.of(f"{name}: expert rows", found, "[N, H], N counted")
    act = resolve_activation(activation)
    rows = rows.contiguous()
    fcs = expert_projections(w1, w2, len(counts), rows, act, name)
    if probs is not None:
        probs = probs.reshape(-1).to(torch.promote_types(probs.dtype, torch.float32)).contiguous()
    groups = RowGroups.of_counts(counts)
    groups.offsets = groups.offsets.to(rows.device, non_blocking=True)
    added = expert_biases(biases, *fcs, name)
    settings = scheduler, name, fused_main_grad, recompute, added, fp8, fp8_weight_grads, offload
    call = make_call(_InPlace(groups), act, fcs, *settings)
    plain = contextlib.nullcontext()
    if torch.is_autocast_enabled(rows.device.type):
        plain = torch.autocast(rows.device.type, enabled=False)  # type: ignore[assignment]
    with plain:
        return run_experts(call, rows, probs)
