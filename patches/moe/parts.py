"""Which parts of an MoE layer are this package's, by the tables of limits.py, by the modules of a
built layer, and by the transport: exchange, experts, and both fused into one.

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
    bounds_rows,
    offloads_in_experts,
)
from megatron_fluid.patches.versions import unknown_setting

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "PartReasons",
    "forward_reason",
    "fp8_reason",
    "graphed_phases_reason",
    "graphed_reason",
    "nvlink_unsupported_reason",
    "part_reasons",
    "separate_experts_reason",
]


@dataclass(frozen=True, kw_only=True)
class PartReasons:
    """Why parts of a layer are not ours, None where they are: a sentence that starts with the
    setting (`setting=value: reason`) or names the module.

    Attributes:
        exchange: why the exchange is Megatron's.
        experts: why the experts are Megatron's.
        fusion: why exchange and experts, where both are ours, run phase by phase.
    """

    exchange: str | None
    experts: str | None
    fusion: str | None

    @property
    def by_phase(self) -> str | None:
        """Why a layer with our exchange runs phase by phase, or None."""
        return self.experts or self.fusion

    @property
    def fused(self) -> str | None:
        """Why the layer is not fused, exchange and experts ours; or None where it is."""
        return self.exchange or self.by_phase


def part_reasons(
    config: TransformerConfig,
    fluid: FluidConfig,
    layer: MoELayer | None = None,
    transport: str | None = None,
) -> PartReasons:
    """Why the parts of a layer are not ours.

    Args:
        config: the model's configuration.
        fluid: the settings that the layer keeps.
        layer: a built layer, whose modules are checked too; None checks the settings alone.
        transport: over which one; None: over any.
    """
    exchange = first_reason(LAYER_LIMITS + EXCHANGE_LIMITS, config, fluid)
    experts = first_reason(LAYER_LIMITS + EXPERT_LIMITS, config, fluid)
    experts = experts or fp8_reason(config, fluid)
    unknown = unknown_setting(config)
    exchange, experts = exchange or unknown, experts or unknown
    fusion = first_reason(FUSION_LIMITS, config, fluid)
    if layer is not None:
        from megatron_fluid.patches.moe.expert_modules import expert_modules_reason

        exchange = exchange or _dispatcher_reason(layer, fluid)
        experts = experts or _overridden(layer, _EXPERT_PHASE)
        experts = experts or expert_modules_reason(layer.experts)
        fusion = fusion or next(filter(None, (_overridden(layer, p) for p in PHASES)), None)
    if transport is not None:
        if experts is None and config.fp8 and transport in ("rounds", "hierarchical"):
            experts = f"fp8={config.fp8!r}: backend {transport} has experts in the parameters' "
            experts += "precision"
        fusion = fusion or _transport_fusion_reason(config, transport)
    return PartReasons(exchange=exchange, experts=experts, fusion=fusion)


def forward_reason(layer: MoELayer) -> str | None:
    """Why a layer is left alone as a whole: its class has a forward of its own; or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found = getattr(type(layer), "forward", MoELayer.forward)
    if found is MoELayer.forward or found.__module__.startswith("megatron_fluid."):
        return None
    return f"{type(layer).__name__}.forward is its own, and megatron_fluid leaves it alone"


def _transport_fusion_reason(config: TransformerConfig, transport: str) -> str | None:
    """Why a layer that may be fused over some transport runs phase by phase over this one; or
    None."""
    if transport != "local" and offloads_in_experts(config):
        return f"offload_modules={config.offload_modules!r}: backend {transport} keeps its own rows"
    if transport != "rounds" and config.moe_apply_probs_on_input:
        return f"moe_apply_probs_on_input: backend {transport} applies probabilities before fc2"
    if transport == "nvlink":
        from megatron_fluid.kernels.activation.kernel import ACTIVATIONS

        if (name := str(activation_name(config))) not in ACTIVATIONS:
            return f"activation {name}: the NVLink path has {', '.join(ACTIVATIONS)}"
    return None


def separate_experts_reason(layer: MoELayer) -> str | None:
    """Why our experts cannot stand alone in the phases of this layer; or None."""
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
    """Why the fp8 experts that a configuration asks for cannot be ours, or None."""
    if not config.fp8:
        return None
    if fluid.moe_fp8 == "megatron":
        return f"fp8={config.fp8!r}: --fluid-moe-fp8 is megatron"
    from megatron_fluid.kernels.fp8_grouped_gemm.launch import fp8_unsupported_reason

    if os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "0":
        return "NVTE_FP8_BLOCK_SCALING_FP32_SCALES: scales are powers of two here"
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


def graphed_reason(
    config: TransformerConfig, fluid: FluidConfig, transport: str, alone: bool = False
) -> str | None:
    """Why CUDA graphs that hold whole layers or iterations cannot hold a fused layer over this
    transport; or None. transport: "auto", too; alone: of one expert-parallel rank."""
    held, impl = held_by_graphs(config), f"cuda_graph_impl={config.cuda_graph_impl!r}"
    if not held.experts or transport == "local":
        return None
    if held is Held.ITERATION and transport == "auto" and alone:
        return None  # it is local
    symmetric = transport in ("auto", "nvlink")
    if held is Held.LAYER and symmetric:
        return f"{impl}: graphs of layers hold ours by moe_backend=local"
    if symmetric and bounds_rows(config, fluid):
        return None
    return f"{impl}: backend {transport} reads row counts on the host"


def graphed_phases_reason(config: TransformerConfig) -> str | None:
    """Why a layer cannot run phase by phase with a part of ours in a model with CUDA graphs that
    may hold a fused layer, or its router; or None."""
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
    """Why symmetric memory cannot serve the exchange of a configuration whose exchange may be ours;
    or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    from megatron_fluid.moe.choose import nvlink_layer_reason

    width = config.moe_latent_size or config.hidden_size
    shape = width, None, config.params_dtype
    return nvlink_layer_reason(*shape, torch.device("cuda"))


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
    """Say that a phase is somebody else's, or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    own = getattr(type(layer), phase)
    ours = own is getattr(MoELayer, phase) or own.__module__.startswith("megatron_fluid.")
    if ours and phase not in layer.__dict__:
        return None
    return f"{type(layer).__name__}.{phase} is overridden, and the overlapped path does not call it"
