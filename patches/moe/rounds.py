"""The forward of Megatron's MoELayer over round-robin P2P exchanges, on CPUs and between NVLink
domains.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.rounds.plan import ExactPlan, permute, permute_probs, unpermute
from megatron_fluid.moe.rounds.transport import start_overlapped_moe
from megatron_fluid.patches.moe.expert_parameters import resolve
from megatron_fluid.patches.moe.overlapped import Compute, OverlappedLayer

__all__ = ["RoundsLayer"]


class RoundsLayer(OverlappedLayer):
    """One layer over P2P exchanges."""

    backend = "rounds"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        self.activation = resolve(layer.config)
        self.probs_on_input = bool(layer.config.moe_apply_probs_on_input)

    def route(
        self,
        layer: MoELayer,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        recompute: bool,
    ) -> tuple[Compute, torch.Tensor]:
        """As OverlappedLayer's; probs are [T, E], zero where a token does not go to an expert."""
        probs, routing_map = layer.route(hidden_states, padding_mask)
        plan, ids = self._plan(routing_map)
        return functools.partial(self._experts, layer, plan, ids), probs

    def _plan(self, routing_map: torch.Tensor) -> tuple[ExactPlan, torch.Tensor]:
        """The routing plan of a routing map [T, E], and the expert of each choice, -1 where there
        is none [T, K]."""
        if self.columns is None:
            return ExactPlan.from_routing_map(routing_map, self.top_k, self.rounds)
        in_order = routing_map.index_select(1, self.columns)
        plan, ids = ExactPlan.from_routing_map(in_order, self.top_k, self.rounds)
        return plan, torch.where(ids < 0, ids, self.columns[ids])

    def _experts(
        self,
        layer: MoELayer,
        plan: ExactPlan,
        ids: torch.Tensor,
        hidden_states: torch.Tensor,
        probs: torch.Tensor,
    ) -> torch.Tensor:
        """Dispatch, experts and combine, and the shared experts while the first tokens travel."""
        rows = permute(hidden_states.reshape(-1, hidden_states.shape[-1]), plan)
        row_probs: torch.Tensor | None = permute_probs(probs.gather(1, ids.clamp(min=0)), plan)
        if self.probs_on_input:
            assert row_probs is not None
            rows, row_probs = (row_probs.unsqueeze(1) * rows).to(rows.dtype), None
        w1, w2 = self.weights.current()
        started = start_overlapped_moe(
            rows,
            row_probs,
            plan,
            w1,
            w2,
            self.activation,
            self.rounds,
            dx_chunks=self.config.dx_chunks,
            name=self.name,
            fused_main_grad=self.fused_main_grad,
        )
        shared = self._shared_experts(layer, hidden_states)
        output = unpermute(started.finish(), plan).view(hidden_states.shape)
        return output if shared is None else output + shared()
