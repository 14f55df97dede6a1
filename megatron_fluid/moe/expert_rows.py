"""The transport of experts alone: somebody else has dispatched their rows, sorted by expert, and
combines the results. Nothing is exchanged.

    call = ExpertCall(x=rows, probs=probs, w1=w1, w2=w2, num_experts=len(counts))
    y = run_experts(call, InPlace(counts))

Shapes: N expert rows of this rank, El local experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["InPlace"]


class InPlace(TokenTransport):
    """The caller's rows are the one segment, its gradients the other.

    Args:
        counts: rows of each expert, on the host. [El]
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._groups = RowGroups.of_counts(counts)

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """rows [N, H], of expert 0, of expert 1, ...; probs [N]"""
        counted = self._groups.num_rows
        if x.shape[0] != counted:
            found = f"{list(x.shape)}, {counted} counted"
            raise ConfigError.of("expert rows", found, "[N, H], N counted")
        if probs is not None:
            wide = torch.promote_types(probs.dtype, torch.float32)
            probs = probs.reshape(-1).to(wide).contiguous()
        self._groups.offsets = self._groups.offsets.to(x.device, non_blocking=True)
        return x.contiguous(), probs

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _InPlaceExchange:
        return _InPlaceExchange(Segment(x, self._groups, None if probs is None else probs.detach()))

    def backward(self, grad: Tensor, keep: bool) -> _InPlaceExchange:
        return _InPlaceExchange(Segment(grad.contiguous(), self._groups))


class _InPlaceExchange(Exchange):
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.results: list[Tensor] = []

    def segments(self) -> Iterator[Segment]:
        yield self._segment

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        self.results = [rows] if row_grad is None else [rows, row_grad[: rows.shape[0]]]
