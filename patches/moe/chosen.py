"""What the forwards share that take the chosen experts of each token as they are, [T, K]: the
choices, and the parameters as grouped GEMMs take them.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden, W ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.patches.moe.overlapped import OverlappedLayer
from megatron_fluid.patches.moe.router import route

__all__ = ["ChosenExpertsLayer"]


class ChosenExpertsLayer(OverlappedLayer):
    """One layer whose transport takes choices and not maps."""

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        # Of each expert, its index in the order of `columns`. [E] int32
        self._indices: torch.Tensor | None = None
        self._prepared: tuple[ExpertWeights, ExpertWeights] | None = None
        self._addresses: list[int] = []

    def start(self, descends: Sequence[bool]) -> None:
        """As OverlappedLayer's."""
        super().start(descends)
        self._indices = None if self.columns is None else self.columns.argsort().int()

    def choices(
        self, layer: MoELayer, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices of the chosen experts in the order in which ranks keep them [T, K], -1 where
        dropped; fp32 probs [T, K])."""
        probs, chosen, compact = route(layer, hidden_states, padding_mask)
        if not compact:
            return _chosen_of(probs, chosen, self.top_k, self.columns)
        return chosen if self._indices is None else self._indices.take(chosen), probs.float()

    def matrices(self) -> tuple[ExpertWeights, ExpertWeights]:
        """The parameters as grouped GEMMs take them, looked at again only when one was replaced or
        moved."""
        w1, w2 = self.weights.current()
        # Of a hundred parameters in every call: map, whose loop is in C.
        addresses = [*map(torch.Tensor.data_ptr, w1), *map(torch.Tensor.data_ptr, w2)]
        found = self._prepared
        if found is None or addresses != self._addresses or not _same(found, (w1, w2)):
            first, second = (ExpertWeights(w, len(w), name=n) for w, n in ((w1, "w1"), (w2, "w2")))
            found = self._prepared = first, second
            self._addresses = addresses
        return found


def _same(prepared: tuple[ExpertWeights, ...], found: tuple[Sequence[torch.Tensor], ...]) -> bool:
    """Whether the objects are the same; comparing tuples would go on to the values."""
    return all(
        all(map(operator.is_, held.params, now)) for held, now in zip(prepared, found, strict=True)
    )


def _chosen_of(
    probs: torch.Tensor, routing_map: torch.Tensor, top_k: int, columns: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of maps [T, E]: by a kernel on a GPU, else by torch."""
    if probs.is_cuda:
        from megatron_fluid.moe.fused_router import chosen_of

        return chosen_of(probs, routing_map, top_k, columns)
    if columns is not None:
        probs, routing_map = probs.index_select(1, columns), routing_map.index_select(1, columns)
    # Stable: the chosen experts in ascending order, then the others.
    kept, ids = routing_map.int().sort(dim=1, descending=True, stable=True)
    kept, ids = kept[:, :top_k], ids[:, :top_k]
    return torch.where(kept != 0, ids, -1), probs.gather(1, ids).float()
