"""The forward of Megatron's MoELayer on one expert-parallel rank: no token leaves it.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.moe.local.transport import LocalPlan, local_moe, plan_local
from megatron_fluid.moe.nvlink.buffers import RoutingHandle
from megatron_fluid.patches.moe.expert_parameters import resolve
from megatron_fluid.patches.moe.overlapped import ChosenExpertsLayer, Compute

__all__ = ["LocalLayer"]


class LocalLayer(ChosenExpertsLayer):
    """One layer whose rank has all experts."""

    backend = "local"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        self.activation = resolve(layer.config)

    def route(
        self,
        layer: MoELayer,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        recompute: bool,
    ) -> tuple[Compute, torch.Tensor]:
        """As OverlappedLayer's; probs are [T, K], of the chosen experts."""
        ids, probs = self.choices(layer, hidden_states, padding_mask)
        plan = None
        if recompute:
            tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
            fcs = self.matrices()
            stacked = all(fc.stack is not None for fc in fcs)
            experts = fcs[0].num_experts
            plan = plan_local(self.group, tokens, ids, probs, experts, self.activation, stacked)
        return functools.partial(self._experts, layer, ids, plan), probs

    def _experts(
        self,
        layer: MoELayer,
        ids: torch.Tensor,
        plan: LocalPlan | RoutingHandle | None,
        hidden_states: torch.Tensor,
        probs: torch.Tensor,
    ) -> torch.Tensor:
        w1, w2 = self.matrices()
        shared = self._shared_experts(layer, hidden_states)
        output = local_moe(
            self.group,
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            ids,
            probs,
            w1,
            w2,
            self.activation,
            plan=plan,
            fused_main_grad=self.fused_main_grad,
            recompute=moe_recompute(self.config),
            name=self.name,
        ).view(hidden_states.shape)
        return output if shared is None else output + shared()
