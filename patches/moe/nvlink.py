"""The forward of Megatron's MoELayer over symmetric memory (megatron_fluid.moe.nvlink.transport),
and what it asks of a configuration.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden, W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.activation import ACTIVATIONS
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle, SizedBuffers
from megatron_fluid.moe.nvlink.transport import nvlink_moe, plan_nvlink
from megatron_fluid.patches.arguments import microbatch_room
from megatron_fluid.patches.moe.expert_parameters import activation_name
from megatron_fluid.patches.moe.overlapped import ChosenExpertsLayer, Compute

__all__ = ["NvlinkLayer", "configuration_reason"]


def configuration_reason(config: TransformerConfig) -> str | None:
    """Why symmetric memory cannot serve layers of this configuration, or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    if (name := activation_name(config)) not in ACTIVATIONS:
        return f"activation {name}: the NVLink path has {', '.join(ACTIVATIONS)}"
    if config.params_dtype != torch.bfloat16:
        return f"params_dtype {config.params_dtype}: the NVLink path is for torch.bfloat16"
    if config.moe_apply_probs_on_input:
        return "moe_apply_probs_on_input: the NVLink path applies probabilities before fc2"
    if config.hidden_size % 8:
        return f"hidden_size {config.hidden_size} is no multiple of 8"
    if config.variable_seq_lengths:
        return "variable_seq_lengths: the NVLink path's buffers are sized by the first forward"
    return None


class NvlinkLayer(ChosenExpertsLayer):
    """One layer over symmetric memory."""

    backend = "nvlink"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        name = activation_name(layer.config)
        assert name is not None  # configuration_reason looked
        self.activation = name
        experts, ffn = int(layer.config.num_moe_experts), int(layer.config.moe_ffn_hidden_size)
        self._buffers = SizedBuffers(
            self.group, self.name, ffn, self.top_k, experts, microbatch_room()
        )

    def start(self, descends: Sequence[bool]) -> None:
        """As OverlappedLayer's; and the GPUs must reach each other's memory."""
        reason = symmetric_unsupported_reason(self.group)
        if reason is not None:
            allowed = f"auto, rounds or megatron, because {reason}"
            raise ConfigError.of("moe_backend", "nvlink", allowed)
        super().start(descends)

    def route(
        self,
        layer: MoELayer,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        recompute: bool,
    ) -> tuple[Compute, torch.Tensor]:
        """As OverlappedLayer's; probs are [T, K], of the chosen experts."""
        ids, row_probs = self.choices(layer, hidden_states, padding_mask)
        hidden = hidden_states.shape[-1]
        buffers = self._buffers.of(hidden_states.numel() // hidden, hidden, hidden_states.dtype)
        handle = plan_nvlink(buffers, ids, row_probs) if recompute else None
        return functools.partial(self._experts, layer, buffers, ids, handle), row_probs

    def _experts(
        self,
        layer: MoELayer,
        buffers: NvlinkBuffers,
        ids: torch.Tensor,
        handle: RoutingHandle | None,
        hidden_states: torch.Tensor,
        row_probs: torch.Tensor,
    ) -> torch.Tensor:
        w1, w2 = self.matrices()
        shared = self._shared_experts(layer, hidden_states)
        output = nvlink_moe(
            buffers,
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            ids,
            row_probs,
            w1,
            w2,
            self.activation,
            handle=handle,
            fused_main_grad=self.fused_main_grad,
            recompute=moe_recompute(self.config),
            name=self.name,
        ).view(hidden_states.shape)
        return output if shared is None else output + shared()
