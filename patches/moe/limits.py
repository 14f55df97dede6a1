"""What rules out this package's parts of an MoE layer: the tables LAYER_LIMITS, EXCHANGE_LIMITS,
EXPERT_LIMITS and FUSION_LIMITS, and what each part asks of a layer's modules.

    ruled out       exchange      experts
    nothing         ours          ours          fused and overlapped (layer.py)
    the fusion      ours          ours          phase by phase (token_dispatcher.py, own_experts.py)
    the experts     ours          Megatron's    phase by phase
    the exchange    Megatron's    ours          phase by phase
    both            Megatron's    Megatron's

Nothing of Megatron is imported at the top: this file is itself imported while Megatron is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from megatron_fluid import patches
from megatron_fluid.config import current_config, names_exchange
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.limits import Limit, first_reason, is_given, offloads

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "EXCHANGE_LIMITS",
    "EXPERT_LIMITS",
    "FUSION_LIMITS",
    "LAYER_LIMITS",
    "LIMITS",
    "PARTS",
    "PHASES",
    "backend_experts_reason",
    "backend_fusion_reason",
    "bounded_unsupported_reason",
    "bounds_rows",
    "exchange_unsupported_reason",
    "graphs_hold_layers",
    "experts_unsupported_reason",
    "fp8_reason",
    "fusion_unsupported_reason",
    "graphed_reason",
    "nvlink_unsupported_reason",
    "separate_experts_reason",
    "unsupported_reason",
]

_PRECISION = "expert GEMMs run in the parameters' precision"


def _activation_name(config: TransformerConfig) -> str | None:
    from megatron_fluid.patches.moe.expert_parameters import activation_name

    return activation_name(config)


def _fuses_another_activation(config: TransformerConfig) -> bool:
    # Megatron itself refuses these when the layer runs: let it say so.
    fused = config.bias_activation_fusion
    return bool(fused) and _activation_name(config) not in ("swiglu", "quick_geglu")


def _fuses_without_clamp(config: TransformerConfig) -> bool:
    given = config.activation_func_clamp_value is not None and config.bias_activation_fusion
    return bool(given) and _activation_name(config) == "swiglu"


def _fuses_other_bounds(config: TransformerConfig) -> bool:
    # TEGroupedMLP._make_fused_ops passes the clamp of quick GeGLU on, and nothing else.
    if not config.use_transformer_engine_op_fuser or not config.gated_linear_unit:
        return False
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if _activation_name(config) == "swiglu":
        return clamp is not None or offset != 0.0
    return clamp is None or offset != 1.0


def _replays_in_recomputation(config: TransformerConfig) -> bool:
    modules = config.recompute_modules or ()
    recomputes = config.recompute_granularity == "selective" and "moe" in modules
    return bool(config.moe_enable_routing_replay and recomputes)


def graphs_hold_layers(config: TransformerConfig) -> bool:
    """Whether CUDA graphs hold whole MoE layers: of an iteration, of layers, of the module moe, or
    with impl local of attn, whose graph is the whole layer's."""
    if config.cuda_graph_impl in ("none", "full_iteration"):
        return config.cuda_graph_impl == "full_iteration"
    modules = {module.name for module in config.cuda_graph_modules}
    if config.cuda_graph_impl == "local":
        return not modules or bool(modules & {"attn", "moe"})
    return not modules or "moe" in modules


def bounded_unsupported_reason(config: TransformerConfig) -> str | None:
    """Why room for the rows of a layer over symmetric memory cannot be bounded, or None."""
    if config.add_bias_linear:
        return "experts with biases take as many rows as arrive"
    if torch.cuda.is_available() and not cpu_mode_active():
        from megatron_fluid.kernels.grouped_gemm.launch import sends_rows

        dtype = config.params_dtype
        if not sends_rows(torch.device("cuda", torch.cuda.current_device()), dtype):
            return f"the host counts the rows of experts in {dtype} on this GPU"
    return None


def bounds_rows(config: TransformerConfig) -> bool:
    """Whether fused layers over symmetric memory have room for a bounded number of rows, which the
    host never asks for."""
    bounded = current_config().moe_capacity_factor is not None
    return bounded and bounded_unsupported_reason(config) is None


def _captures_experts(config: TransformerConfig) -> bool:
    """Whether a CUDA graph holds experts that read row counts on the host, or phases that only
    Megatron's forward runs."""
    if config.cuda_graph_impl == "none":
        return False
    modules = {module.name for module in config.cuda_graph_modules or ()}
    if config.cuda_graph_impl == "local" and modules & {"moe_router", "moe_preprocess"}:
        return True
    if graphs_hold_layers(config) and config.expert_model_parallel_size > 1:
        return config.cuda_graph_impl != "full_iteration" or not bounds_rows(config)
    if graphs_hold_layers(config):
        return False  # on one rank the host reads nothing
    outside = {"attn", "mlp", "mamba"}
    if config.cuda_graph_impl == "transformer_engine":
        outside |= {"moe_router", "moe_preprocess"}
    return not modules <= outside


_offloads_in_experts = offloads("expert_fc1", "moe_act")


def _offloads_as_megatron_alone(config: TransformerConfig) -> bool:
    """Whether offloading takes part in experts in a way that ours do not have."""
    if offloads("fused_group_mlp")(config):
        return True
    again = config.recompute_granularity == "full"
    return _offloads_in_experts(config) and bool(again or config.fp8 or graphs_hold_layers(config))


def _asks_for_flex(config: TransformerConfig) -> bool:
    """Whether Megatron's flex dispatcher, which is never a default, is wanted as it is: no backend
    of ours was asked for by name."""
    return config.moe_token_dispatcher_type == "flex" and not names_exchange(current_config())


LAYER_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit("use_kitchen", "kitchen linears compute in their own precision"),
    Limit(
        "expert_gtp_weight_remat_size",
        "expert weights are gathered inside their linears",
        lambda c: c.expert_gtp_weight_remat_size > 1,
    ),
    Limit(
        "cuda_graph_impl",
        "graphs may hold attention and, with transformer_engine, the router, but not the experts, "
        "whose row counts the host reads; on one expert-parallel rank whole layers and iterations "
        "may be captured, on several, over symmetric memory and without biases, whole iterations "
        "with --fluid-moe-capacity-factor",
        _captures_experts,
    ),
    Limit(
        "transformer_impl",
        "the inference-optimised layer has its own dispatchers",
        lambda c: c.transformer_impl == "inference_optimized",
    ),
    Limit("batch_invariant_mode", "its kernels are Megatron's own"),
)

EXCHANGE_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "moe_token_dispatcher_type",
        "flex is asked for by name (with a --fluid-moe-backend that is named, too, ours takes its "
        "place)",
        _asks_for_flex,
    ),
    Limit(
        "expert_tensor_parallel_size",
        "experts split over tensor-parallel ranks need a gather and a reduce-scatter around them",
        lambda c: (c.expert_tensor_parallel_size or 1) > 1,
    ),
    Limit(
        "moe_expert_rank_capacity_factor",
        "rows beyond a rank's capacity are dropped by HybridEP",
        is_given("moe_expert_rank_capacity_factor"),
    ),
)

EXPERT_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "fp8",
        "e4m3 is the format of fp8 experts here, with the recipe blockwise",
        lambda c: bool(c.fp8) and c.fp8 != "e4m3",
    ),
    Limit(
        "fp8_recipe",
        "blockwise is the recipe of fp8 experts here",
        lambda c: bool(c.fp8) and str(getattr(c.fp8_recipe, "value", c.fp8_recipe)) != "blockwise",
    ),
    Limit(
        "fp8_param",
        "fp8 experts are cast from bf16 parameters, not from primary weights in fp8",
        lambda c: bool(c.fp8 and c.fp8_param),
    ),
    Limit("fp4", _PRECISION),
    Limit("enable_autocast", _PRECISION),
    Limit("quant_recipe", _PRECISION, is_given("quant_recipe")),
    Limit(
        "activation_func",
        "this activation function has no overlapped variant",
        lambda c: _activation_name(c) is None,
    ),
    Limit(
        "bias_activation_fusion",
        "Megatron's fused activation exists for SwiGLU and quick GeGLU only",
        _fuses_another_activation,
    ),
    Limit("use_te_activation_func", "the activation is a Transformer Engine module"),
    Limit(
        "use_transformer_engine_op_fuser",
        "Transformer Engine's fused expert leaves clamp and offset of SwiGLU out, and gives quick "
        "GeGLU an offset of 1 and, where none is set, a clamp (where that is what is set it is "
        "ours)",
        _fuses_other_bounds,
    ),
    Limit(
        "activation_func_clamp_value",
        "Megatron's fused SwiGLU leaves the clamp out (without bias_activation_fusion it is ours)",
        _fuses_without_clamp,
    ),
    Limit(
        "activation_func_fp8_input_store",
        "activations are kept in their own precision (by fp8 experts in fp8, with and without it)",
        lambda c: bool(c.activation_func_fp8_input_store) and not c.fp8,
    ),
    Limit(
        "delay_wgrad_compute",
        "beside moe_latent_size Megatron's schedule delays the layer's projections with the "
        "experts",
        lambda c: bool(c.delay_wgrad_compute and c.moe_latent_size),
    ),
    Limit(
        "overlap_dispatch_backward_with_experts_wgrad",
        "Megatron overlaps the experts' weight gradients itself",
    ),
    Limit("moe_paged_stash", "the stash holds activations of Megatron's experts"),
    Limit("moe_ncclep_zero_copy", "Megatron's experts write into the dispatcher's buffers"),
    Limit("cpu_offloading", "offloading hooks into the experts' linears"),
    Limit(
        "offload_modules",
        "fused_group_mlp hooks into Transformer Engine's fused expert, and expert_fc1 and moe_act "
        "are not offloaded of experts in fp8, nor of layers that are recomputed or captured as a "
        "whole (else these two are honoured)",
        _offloads_as_megatron_alone,
    ),
)

FUSION_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "overlap_moe_expert_parallel_comm",
        "the 1F1B expert overlap calls the phases of a layer one by one",
    ),
    Limit(
        "moe_enable_routing_replay",
        "replay counts on a router that runs again in the recomputation of its layer (without that "
        "it is honoured)",
        _replays_in_recomputation,
    ),
    Limit(
        "moe_latent_size",
        "the layer's own projections stand before and after the exchange",
        is_given("moe_latent_size"),
    ),
)

LIMITS = LAYER_LIMITS + EXCHANGE_LIMITS + EXPERT_LIMITS + FUSION_LIMITS

# Whose exchange and whose experts a layer has under the settings of each table.
PARTS: tuple[tuple[str, str, tuple[Limit[TransformerConfig], ...]], ...] = (
    ("Megatron's", "Megatron's", LAYER_LIMITS),
    ("Megatron's", "ours", EXCHANGE_LIMITS),
    ("ours", "Megatron's", EXPERT_LIMITS),
    ("ours", "ours, phase by phase", FUSION_LIMITS),
)

# A subclass that overrides one of these expects it to be called.
PHASES = ("preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")


def unsupported_reason(config: TransformerConfig, layer: MoELayer | None = None) -> str | None:
    """Why a layer cannot be fused, exchange and experts ours; or None where it can.

    Args:
        config: the model's configuration.
        layer: a built layer, whose modules are checked too; None checks the configuration alone.

    Returns:
        A sentence that starts with the setting (`setting=value: reason`) or names the module, or
        None.
    """
    reason = first_reason(LIMITS, config) or fp8_reason(config)
    if reason is not None or layer is None:
        return reason
    return _dispatcher_reason(layer) or _experts_reason(layer) or _phases_reason(layer)


def exchange_unsupported_reason(
    config: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why the exchange cannot be ours; or None. Arguments and result as for unsupported_reason."""
    reason = first_reason(LAYER_LIMITS + EXCHANGE_LIMITS, config)
    return reason if reason is not None or layer is None else _dispatcher_reason(layer)


def experts_unsupported_reason(
    config: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why the experts cannot be ours; or None. Arguments and result as for unsupported_reason."""
    reason = first_reason(LAYER_LIMITS + EXPERT_LIMITS, config) or fp8_reason(config)
    return reason if reason is not None or layer is None else _experts_reason(layer)


def fusion_unsupported_reason(
    config: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why exchange and experts that are ours have to run phase by phase; or None. Arguments and
    result as for unsupported_reason."""
    reason = first_reason(FUSION_LIMITS, config)
    return reason if reason is not None or layer is None else _phases_reason(layer)


def separate_experts_reason(layer: MoELayer) -> str | None:
    """Why our experts cannot stand alone in the phases of this layer; or None."""
    if not (patches.is_applied("moe-experts") or getattr(layer, "needs_no_patch", False)):
        left_out = patches.off_reason("moe-experts")
        return f"the patch moe-experts is left out: {left_out}" if left_out else _NO_SEAM
    if layer.config.delay_wgrad_compute and not (
        patches.is_applied("moe-delayed-gradients") or getattr(layer, "needs_no_patch", False)
    ):
        return "delay_wgrad_compute: the patch moe-delayed-gradients is not applied"
    return graphed_reason(layer.config)


_EXPERT_PHASE = "routed_experts_compute"
_NO_SEAM = "the patch moe-experts is not applied"


def fp8_reason(config: TransformerConfig) -> str | None:
    """Why the fp8 experts that a configuration asks for cannot be ours, or None."""
    if not config.fp8:
        return None
    if current_config().moe_fp8 == "megatron":
        return f"fp8={config.fp8!r}: --fluid-moe-fp8 is megatron"
    from megatron_fluid.kernels.fp8_grouped_gemm.launch import fp8_unsupported_reason

    if os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "0":
        return "NVTE_FP8_BLOCK_SCALING_FP32_SCALES: scales are powers of two here"
    widths = config.hidden_size, int(config.moe_ffn_hidden_size or config.ffn_hidden_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = "its own clamp or offset" if _bounds(config) else str(_activation_name(config))
    reason = fp8_unsupported_reason(*widths, kind, config.params_dtype, device)
    if reason is None and config.add_bias_linear:
        reason = "fp8 experts have no biases"
    return None if reason is None else f"fp8={config.fp8!r}: {reason}"


def _bounds(config: TransformerConfig) -> bool:
    """Whether the gated activation is not the plain one."""
    interleaved = config.moe_mlp_glu_interleave_size is not None
    clamped = config.activation_func_clamp_value is not None
    return clamped or config.glu_linear_offset != 0.0 or interleaved


def graphed_reason(config: TransformerConfig) -> str | None:
    """Why a layer cannot run phase by phase with a part of ours in a model with CUDA graphs that
    may hold a fused layer, or its router; or None."""
    if graphs_hold_layers(config):
        return "cuda_graph_impl: row counts are read on the host between dispatch and experts"
    if config.cuda_graph_impl != "transformer_engine":
        return None
    held = {module.name for module in config.cuda_graph_modules} & {"moe_router", "moe_preprocess"}
    if not held:
        return None
    return (
        f"cuda_graph_impl: a graph holds {' and '.join(sorted(held))}, which a fused layer alone "
        "can do without"
    )


def backend_experts_reason(config: TransformerConfig, backend: str) -> str | None:
    """Why experts that may be ours on some backend cannot be on this one; or None."""
    if config.fp8 and backend in ("rounds", "hierarchical"):
        return f"fp8={config.fp8!r}: backend {backend} has experts in the parameters' precision"
    return None


def backend_fusion_reason(config: TransformerConfig, backend: str) -> str | None:
    """Why a layer that may be fused on some backend runs phase by phase on this one; or None."""
    if backend != "local" and _offloads_in_experts(config):
        return f"offload_modules={config.offload_modules!r}: backend {backend} keeps its own rows"
    if backend == "rounds":
        return None
    if config.moe_apply_probs_on_input:
        return f"moe_apply_probs_on_input: backend {backend} applies probabilities before fc2"
    if backend == "nvlink":
        from megatron_fluid.kernels.activation.kernel import ACTIVATIONS

        if (name := str(_activation_name(config))) not in ACTIVATIONS:
            return f"activation {name}: the NVLink path has {', '.join(ACTIVATIONS)}"
    return None


def nvlink_unsupported_reason(config: TransformerConfig) -> str | None:
    """Why symmetric memory cannot serve the exchange of a configuration whose exchange may be ours;
    or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    from megatron_fluid.moe.backends import nvlink_layer_reason

    width = config.moe_latent_size or config.hidden_size
    shape = width, None, config.params_dtype
    if (reason := nvlink_layer_reason(*shape, torch.device("cuda"))) is not None:
        return reason
    if config.variable_seq_lengths:
        return "variable_seq_lengths: the NVLink path has not been tried with it"
    return None


def _dispatcher_reason(layer: MoELayer) -> str | None:
    """Why this layer's token dispatcher cannot be replaced, or None."""
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
        MoEFlexTokenDispatcher,
    )

    known: tuple[type, ...] = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
    if names_exchange(current_config()):
        known = (*known, MoEFlexTokenDispatcher)
    dispatcher: Any = getattr(layer.token_dispatcher, "stock", layer.token_dispatcher)
    if type(dispatcher) not in known:
        return f"the token dispatcher is a {type(dispatcher).__name__}, not alltoall or allgather"
    if dispatcher.tp_size > 1:
        return f"experts are split over {dispatcher.tp_size} tensor-parallel ranks"
    return None


def _phases_reason(layer: MoELayer) -> str | None:
    """Which phase of this layer a fused forward would leave out, or None."""
    return next(filter(None, (_overridden(layer, phase) for phase in PHASES)), None)


def _overridden(layer: MoELayer, phase: str) -> str | None:
    """Say that a phase is somebody else's, or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    own = getattr(type(layer), phase)
    ours = own is getattr(MoELayer, phase) or own.__module__.startswith("megatron_fluid.")
    if ours and phase not in layer.__dict__:
        return None
    return f"{type(layer).__name__}.{phase} is overridden, and the overlapped path does not call it"


def _experts_reason(layer: MoELayer) -> str | None:
    """Why this layer's experts cannot be bypassed, or None."""
    from megatron_fluid.patches.moe.expert_parameters import expert_modules_reason

    return _overridden(layer, _EXPERT_PHASE) or expert_modules_reason(layer.experts)
