"""Which parts of an MoE layer are megatron_fluid's, by the tables of limits.py, by the modules of a
built layer, and by the backend: exchange, experts, and both fused into one.

`fluid` is everywhere the settings that the layer keeps, not those in force.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig, names_exchange
from megatron_fluid.patches.limits import first_reason
from megatron_fluid.patches.moe.graphed_router import Held, held_by_graphs
from megatron_fluid.patches.moe.limits import (
    EXCHANGE_LIMITS,
    EXPERT_LIMITS,
    FUSION_LIMITS,
    LAYER_LIMITS,
    PHASES,
    activation_name,
)
from megatron_fluid.patches.versions import unknown_setting

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "PartReasons",
    "forward_reason",
    "fp8_reason",
    "nvlink_unsupported_reason",
    "part_reasons",
]


@dataclass(frozen=True, kw_only=True)
class PartReasons:
    """Why parts of a layer are not megatron_fluid's, None where they are: a sentence that starts
    with the setting (`setting=value: reason`) or names the module.

    Attributes:
        exchange: why the exchange is Megatron's.
        experts: why the experts are Megatron's.
        fusion: why exchange and experts, where neither is Megatron's, run phase by phase.
    """

    exchange: str | None = None
    experts: str | None = None
    fusion: str | None = None

    @property
    def by_phase(self) -> str | None:
        """Why a layer with this package's exchange runs phase by phase, or None."""
        return self.experts or self.fusion

    @property
    def fused(self) -> str | None:
        """Why the layer is not fused, or None where it is."""
        return self.exchange or self.by_phase


def part_reasons(
    config: TransformerConfig,
    fluid: FluidConfig,
    layer: MoELayer | None = None,
    backend: str | None = None,
    exchange: str | None = None,
) -> PartReasons:
    """Why the parts of a layer are not megatron_fluid's.

    Args:
        config: the model's configuration.
        fluid: the settings that the layer keeps.
        layer: a built layer, whose modules are checked too; None checks the settings alone.
        backend: who moves the tokens; None: any.
        exchange: why the exchange is Megatron's, if that is known already.
    """
    unknown = unknown_setting(config)
    exchange = exchange or first_reason(LAYER_LIMITS + EXCHANGE_LIMITS, config, fluid, backend)
    exchange = exchange or unknown
    experts = first_reason(LAYER_LIMITS + EXPERT_LIMITS, config, fluid, backend)
    experts = experts or fp8_reason(config, fluid) or unknown
    fusion = first_reason(FUSION_LIMITS, config, fluid, backend)
    if layer is not None:
        from megatron_fluid.patches.moe.expert_modules import expert_modules_reason

        exchange = exchange or _dispatcher_reason(layer, fluid)
        experts = experts or _overridden(layer, _EXPERT_PHASE)
        experts = experts or expert_modules_reason(layer.experts)
        fusion = fusion or next(filter(None, (_overridden(layer, p) for p in PHASES)), None)
    phases, graphed = experts or fusion, graphed_phases_reason(config)
    if exchange is None and phases and graphed:
        exchange = f"{phases}; and {graphed}"
    if layer is not None and experts is None and (exchange or fusion):
        experts = _separate_experts_reason(layer)
    return PartReasons(exchange=exchange, experts=experts, fusion=fusion)


def forward_reason(layer: MoELayer) -> str | None:
    """Why a layer is left alone as a whole: its class has a forward of its own; or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found = getattr(type(layer), "forward", MoELayer.forward)
    if found is MoELayer.forward or found.__module__.startswith("megatron_fluid."):
        return None
    return f"{type(layer).__name__}.forward is its own, and megatron_fluid leaves it alone"


def _separate_experts_reason(layer: MoELayer) -> str | None:
    """Why megatron_fluid's experts cannot stand alone in the phases of this layer; or None."""
    needs_patches = not getattr(layer, "needs_no_patch", False)
    if needs_patches and not patches.is_applied("moe-experts"):
        left_out = patches.off_reason("moe-experts")
        return f"the patch moe-experts is {f'left out: {left_out}' if left_out else 'not applied'}"
    delays = needs_patches and layer.config.delay_wgrad_compute
    if delays and not patches.is_applied("moe-delayed-gradients"):
        return "delay_wgrad_compute: the patch moe-delayed-gradients is not applied"
    return graphed_phases_reason(layer.config)


_EXPERT_PHASE = "routed_experts_compute"


def fp8_reason(config: TransformerConfig, fluid: FluidConfig) -> str | None:
    """Why the fp8 experts that a configuration asks for stay Megatron's, or None."""
    if not config.fp8:
        return None
    if fluid.moe_fp8 == "megatron":
        return f"fp8={config.fp8!r}: --fluid-moe-fp8 is megatron"
    from megatron_fluid.kernels.fp8_grouped_gemm.launch import fp8_unsupported_reason

    if os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "0":
        return "NVTE_FP8_BLOCK_SCALING_FP32_SCALES: megatron_fluid's scales are powers of two"
    widths = config.hidden_size, int(config.moe_ffn_hidden_size or config.ffn_hidden_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = "its own clamp or offset" if _bounds(config) else str(activation_name(config))
    reason = fp8_unsupported_reason(*widths, kind, config.params_dtype, device)
    if reason is None and config.add_bias_linear:
        reason = "fp8 experts have no biases"
    return None if reason is None else f"fp8={config.fp8!r}: {reason}"


def _bounds(config: TransformerConfig) -> bool:
    """Whether the gated activation is not the plain one."""
    interleaved = config.moe_mlp_glu_interleave_size is not None
    clamped = config.activation_func_clamp_value is not None
    return clamped or config.glu_linear_offset != 0.0 or interleaved


def graphed_phases_reason(config: TransformerConfig) -> str | None:
    """Why a layer with a part of megatron_fluid's cannot run phase by phase in a model with CUDA
    graphs that may hold a fused layer, or its router; or None."""
    held = held_by_graphs(config)
    if held.experts:
        return "cuda_graph_impl: row counts are read on the host between dispatch and experts"
    if held is not Held.ROUTER:
        return None
    names = {module.name for module in config.cuda_graph_modules} & {"moe_router", "moe_preprocess"}
    return (
        f"cuda_graph_impl: a graph holds {' and '.join(sorted(names))}, which a fused layer alone "
        "can do without"
    )


def nvlink_unsupported_reason(config: TransformerConfig) -> str | None:
    """Why symmetric memory cannot serve the exchange of a configuration, or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    from megatron_fluid.moe.choose import nvlink_layer_reason

    width = config.moe_latent_size or config.hidden_size
    return nvlink_layer_reason(width, None, config.params_dtype, torch.device("cuda"))


def _dispatcher_reason(layer: MoELayer, fluid: FluidConfig) -> str | None:
    """Why this layer's token dispatcher cannot be replaced, or None."""
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
        MoEFlexTokenDispatcher,
    )

    known: tuple[type, ...] = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
    if names_exchange(fluid):
        known = (*known, MoEFlexTokenDispatcher)
    dispatcher: Any = getattr(layer.token_dispatcher, "stock", layer.token_dispatcher)
    if type(dispatcher) not in known:
        return f"the token dispatcher is a {type(dispatcher).__name__}, not alltoall or allgather"
    if dispatcher.tp_size > 1:
        return f"experts are split over {dispatcher.tp_size} tensor-parallel ranks"
    return None


def _overridden(layer: MoELayer, phase: str) -> str | None:
    """Say that a phase of the layer is from elsewhere, or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    method = getattr(type(layer), phase)
    known = method is getattr(MoELayer, phase) or method.__module__.startswith("megatron_fluid.")
    if known and phase not in layer.__dict__:
        return None
    return f"{type(layer).__name__}.{phase} is overridden, and the overlapped path does not call it"
