"""What the overlapped MoE path does not honour: the table LIMITS, and what it asks of a layer's
modules.

Nothing of Megatron is imported at the top: this file is itself imported while Megatron is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.limits import Limit, first_reason, is_given, offloads

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["LIMITS", "fp8_reason", "nvlink_unsupported_reason", "unsupported_reason"]

_PRECISION = "expert GEMMs run in the parameters' precision"


def _activation_name(config: TransformerConfig) -> str | None:
    from megatron_fluid.patches.moe.expert_parameters import activation_name

    return activation_name(config)


def _recipe(config: TransformerConfig) -> str:
    return str(getattr(config.fp8_recipe, "value", config.fp8_recipe))


def _fuses_another_activation(config: TransformerConfig) -> bool:
    # Megatron itself refuses these when the layer runs: let it say so.
    fused = config.bias_activation_fusion
    return bool(fused) and _activation_name(config) not in ("swiglu", "quick_geglu")


def _replays_in_recomputation(config: TransformerConfig) -> bool:
    modules = config.recompute_modules or ()
    recomputes = config.recompute_granularity == "selective" and "moe" in modules
    return bool(config.moe_enable_routing_replay and recomputes)


def _captures_experts(config: TransformerConfig) -> bool:
    """Whether a CUDA graph holds the experts, or phases that only Megatron's forward runs."""
    if config.cuda_graph_impl == "none":
        return False
    modules = {module.name for module in config.cuda_graph_modules}
    outside = {"attn", "mlp", "mamba"}
    if config.cuda_graph_impl == "transformer_engine":
        outside |= {"moe_router", "moe_preprocess"}
    return config.cuda_graph_impl == "full_iteration" or not modules or not modules <= outside


LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "moe_token_dispatcher_type",
        "the alltoall and the allgather dispatcher are replaced; flex is asked for by name",
        lambda c: c.moe_token_dispatcher_type not in ("alltoall", "allgather"),
    ),
    Limit(
        "expert_tensor_parallel_size",
        "experts split over tensor-parallel ranks need a gather and a reduce-scatter around each "
        "expert",
        lambda c: (c.expert_tensor_parallel_size or 1) > 1,
    ),
    Limit(
        "moe_pad_expert_input_to_capacity",
        "padding rows to capacity is a layout of Megatron's dispatcher (dropping without padding "
        "is honoured)",
    ),
    Limit(
        "fp8",
        "e4m3 is the format of fp8 experts here, with the recipe blockwise",
        lambda c: bool(c.fp8) and c.fp8 != "e4m3",
    ),
    Limit(
        "fp8_recipe",
        "blockwise is the recipe of fp8 experts here",
        lambda c: bool(c.fp8) and _recipe(c) != "blockwise",
    ),
    Limit(
        "fp8_param",
        "fp8 experts are cast from bf16 parameters, not from primary weights in fp8",
        lambda c: bool(c.fp8 and c.fp8_param),
    ),
    Limit("fp4", _PRECISION),
    Limit("quant_recipe", _PRECISION, is_given("quant_recipe")),
    Limit("add_bias_linear", "experts with biases are not computed"),
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
        "Transformer Engine computes the whole expert in one fused operation",
    ),
    Limit(
        "activation_func_clamp_value",
        "the clamp of gated activations is not computed",
        is_given("activation_func_clamp_value"),
    ),
    Limit(
        "glu_linear_offset",
        "the offset of gated activations is not computed",
        lambda c: c.glu_linear_offset != 0.0,
    ),
    Limit(
        "moe_mlp_glu_interleave_size",
        "gate and up rows are interleaved in the weights",
        is_given("moe_mlp_glu_interleave_size"),
    ),
    Limit(
        "activation_func_fp8_input_store",
        "activations are kept in their own precision (by fp8 experts in fp8, with and without it)",
        lambda c: bool(c.activation_func_fp8_input_store) and not c.fp8,
    ),
    Limit("use_kitchen", "kitchen linears compute in their own precision"),
    Limit("moe_single_grouped_weight", "the experts' weights are one grouped tensor"),
    Limit(
        "expert_gtp_weight_remat_size",
        "expert weights are gathered inside their linears",
        lambda c: c.expert_gtp_weight_remat_size > 1,
    ),
    Limit(
        "overlap_moe_expert_parallel_comm",
        "the 1F1B expert overlap schedules dispatch, experts and combine itself",
    ),
    Limit("delay_wgrad_compute", "Megatron's schedule calls backward_dw of the experts"),
    Limit(
        "overlap_dispatch_backward_with_experts_wgrad",
        "Megatron overlaps the experts' weight gradients itself",
    ),
    Limit(
        "moe_enable_routing_replay",
        "replay counts on a router that runs again in the recomputation of its layer (without that "
        "it is honoured)",
        _replays_in_recomputation,
    ),
    Limit(
        "cuda_graph_impl",
        "row counts are read by the host, so that graphs may hold attention and, with "
        "transformer_engine, the router, but not the experts",
        _captures_experts,
    ),
    Limit("cpu_offloading", "offloading hooks into the experts' linears"),
    Limit(
        "offload_modules",
        "offloading expert_fc1, moe_act or fused_group_mlp hooks into the experts",
        offloads("expert_fc1", "moe_act", "fused_group_mlp"),
    ),
    Limit("moe_paged_stash", "the stash holds activations of Megatron's experts"),
    Limit(
        "transformer_impl",
        "the inference-optimised layer has its own dispatchers",
        lambda c: c.transformer_impl == "inference_optimized",
    ),
    Limit("batch_invariant_mode", "its kernels are Megatron's own"),
    Limit("enable_autocast", _PRECISION),
    Limit(
        "moe_latent_size",
        "latent projections are built by Transformer Engine only and have not been verified with "
        "this path",
        is_given("moe_latent_size"),
    ),
)

# A subclass that overrides one of these expects it to be called.
_PHASES = ("preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")


def unsupported_reason(config: TransformerConfig, layer: MoELayer | None = None) -> str | None:
    """Why the overlapped path cannot stand for Megatron's own, or None where it can.

    Args:
        config: the model's configuration.
        layer: a built layer, whose modules are checked too; None checks the configuration alone.

    Returns:
        A sentence that starts with the setting (`setting=value: reason`) or names the module, or
        None.
    """
    reason = first_reason(LIMITS, config) or fp8_reason(config)
    return reason if reason is not None or layer is None else _module_reason(layer)


def fp8_reason(config: TransformerConfig) -> str | None:
    """Why the fp8 experts that a configuration asks for cannot be had here, or None."""
    if not config.fp8:
        return None
    from megatron_fluid.kernels.fp8_grouped_gemm import fp8_unsupported_reason

    if os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "0":
        return "NVTE_FP8_BLOCK_SCALING_FP32_SCALES: scales are powers of two here"
    widths = config.hidden_size, int(config.moe_ffn_hidden_size or config.ffn_hidden_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = str(_activation_name(config))
    reason = fp8_unsupported_reason(*widths, kind, config.params_dtype, device)
    return None if reason is None else f"fp8={config.fp8!r}: {reason}"


def nvlink_unsupported_reason(config: TransformerConfig) -> str | None:
    """Why symmetric memory cannot serve layers of a configuration that the overlapped path
    supports, or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    from megatron_fluid.moe.backends import nvlink_layer_reason

    shape = config.hidden_size, str(_activation_name(config)), config.params_dtype
    if (reason := nvlink_layer_reason(*shape, torch.device("cuda"))) is not None:
        return reason
    if config.moe_apply_probs_on_input:
        return "moe_apply_probs_on_input: the NVLink path applies probabilities before fc2"
    if config.variable_seq_lengths:
        return "variable_seq_lengths: the NVLink path's buffers are sized by the first forward"
    return None


def _module_reason(layer: MoELayer) -> str | None:
    """Why this layer's modules cannot be bypassed, or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
    )

    from megatron_fluid.patches.moe.expert_parameters import expert_modules_reason

    for phase in _PHASES:
        if phase in layer.__dict__ or getattr(type(layer), phase) is not getattr(MoELayer, phase):
            name = f"{type(layer).__name__}.{phase}"
            return f"{name} is overridden, and the overlapped path does not call it"
    dispatcher: Any = layer.token_dispatcher
    if type(dispatcher) not in (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher):
        return f"the token dispatcher is a {type(dispatcher).__name__}, not alltoall or allgather"
    if dispatcher.tp_size > 1:
        return f"experts are split over {dispatcher.tp_size} tensor-parallel ranks"
    return expert_modules_reason(layer.experts) or ModuleHooks(experts=layer.experts).foreign()
