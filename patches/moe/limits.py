"""What the overlapped MoE path does not honour: the one list from which every decision, report and
table is made.

A setting named here keeps Megatron's own path. Nothing of Megatron is imported at the top: the
replacements of moe_layer.py, which use this file, are themselves imported while Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["LIMITS", "Limit", "unsupported_reason"]


@dataclass(frozen=True)
class Limit:
    """A setting under which Megatron's own path is kept.

    Attributes:
        setting: the name of the TransformerConfig field.
        hit: whether the configuration has it in a way that the overlapped path does not honour.
        reason: why, in one clause.
    """

    setting: str
    hit: Callable[[TransformerConfig], bool]
    reason: str


def _activation_name(config: TransformerConfig) -> str | None:
    from megatron_fluid.patches.moe.expert_parameters import activation_name

    return activation_name(config)


def _recomputes_moe(config: TransformerConfig) -> bool:
    return config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())


def _offloads_experts(config: TransformerConfig) -> bool:
    inside = {"expert_fc1", "moe_act", "fused_group_mlp"}
    return bool(
        config.fine_grained_activation_offloading and inside & set(config.offload_modules or ())
    )


# One row a setting: the compatibility table of the documentation and the start-up report are made
# from it.
LIMITS: tuple[Limit, ...] = (
    Limit(
        "moe_token_dispatcher_type",
        lambda c: c.moe_token_dispatcher_type != "alltoall",
        "only the alltoall dispatcher is replaced; allgather and flex are other algorithms",
    ),
    Limit(
        "expert_tensor_parallel_size",
        lambda c: (c.expert_tensor_parallel_size or 1) > 1,
        "experts split over tensor-parallel ranks need a gather and a reduce-scatter around each "
        "expert",
    ),
    Limit(
        "moe_pad_expert_input_to_capacity",
        lambda c: bool(c.moe_pad_expert_input_to_capacity),
        "padding rows to capacity is a layout of Megatron's dispatcher (dropping without padding "
        "is honoured)",
    ),
    Limit("fp8", lambda c: bool(c.fp8), "expert GEMMs run in the parameters' precision"),
    Limit("fp4", lambda c: bool(c.fp4), "expert GEMMs run in the parameters' precision"),
    Limit(
        "quant_recipe",
        lambda c: c.quant_recipe is not None,
        "expert GEMMs run in the parameters' precision",
    ),
    Limit(
        "add_bias_linear", lambda c: bool(c.add_bias_linear), "experts with biases are not computed"
    ),
    Limit(
        "activation_func",
        lambda c: _activation_name(c) is None,
        "this activation function has no overlapped variant",
    ),
    Limit(
        "bias_activation_fusion",
        # Megatron itself refuses other activations here, when the layer runs: let it say so.
        lambda c: (
            bool(c.bias_activation_fusion) and _activation_name(c) not in ("swiglu", "quick_geglu")
        ),
        "Megatron's fused activation exists for SwiGLU and quick GeGLU only",
    ),
    Limit(
        "use_te_activation_func",
        lambda c: bool(c.use_te_activation_func),
        "the activation is a Transformer Engine module",
    ),
    Limit(
        "use_transformer_engine_op_fuser",
        lambda c: bool(c.use_transformer_engine_op_fuser),
        "Transformer Engine computes the whole expert in one fused operation",
    ),
    Limit(
        "activation_func_clamp_value",
        lambda c: c.activation_func_clamp_value is not None,
        "the clamp of gated activations is not computed",
    ),
    Limit(
        "glu_linear_offset",
        lambda c: c.glu_linear_offset != 0.0,
        "the offset of gated activations is not computed",
    ),
    Limit(
        "moe_mlp_glu_interleave_size",
        lambda c: c.moe_mlp_glu_interleave_size is not None,
        "gate and up rows are interleaved in the weights",
    ),
    Limit(
        "activation_func_fp8_input_store",
        lambda c: bool(c.activation_func_fp8_input_store),
        "activations are kept in their own precision",
    ),
    Limit(
        "use_kitchen",
        lambda c: bool(c.use_kitchen),
        "kitchen linears compute in their own precision",
    ),
    Limit(
        "moe_single_grouped_weight",
        lambda c: bool(c.moe_single_grouped_weight),
        "the experts' weights are one grouped tensor",
    ),
    Limit(
        "expert_gtp_weight_remat_size",
        lambda c: c.expert_gtp_weight_remat_size > 1,
        "expert weights are gathered inside their linears",
    ),
    Limit(
        "overlap_moe_expert_parallel_comm",
        lambda c: bool(c.overlap_moe_expert_parallel_comm),
        "the 1F1B expert overlap schedules dispatch, experts and combine itself",
    ),
    Limit(
        "delay_wgrad_compute",
        lambda c: bool(c.delay_wgrad_compute),
        "Megatron's schedule calls backward_dw of the experts",
    ),
    Limit(
        "overlap_dispatch_backward_with_experts_wgrad",
        lambda c: bool(c.overlap_dispatch_backward_with_experts_wgrad),
        "Megatron overlaps the experts' weight gradients itself",
    ),
    Limit(
        "moe_enable_routing_replay",
        lambda c: bool(c.moe_enable_routing_replay and _recomputes_moe(c)),
        "replay counts on a router that runs again in the recomputation of its layer (without that "
        "it is honoured)",
    ),
    Limit(
        "cuda_graph_impl", lambda c: c.cuda_graph_impl != "none", "row counts are read by the host"
    ),
    Limit(
        "cpu_offloading",
        lambda c: bool(c.cpu_offloading),
        "offloading hooks into the experts' linears",
    ),
    Limit(
        "offload_modules",
        _offloads_experts,
        "offloading expert_fc1, moe_act or fused_group_mlp hooks into the experts",
    ),
    Limit(
        "moe_paged_stash",
        lambda c: bool(c.moe_paged_stash),
        "the stash holds activations of Megatron's experts",
    ),
    Limit(
        "transformer_impl",
        lambda c: c.transformer_impl == "inference_optimized",
        "the inference-optimised layer has its own dispatchers",
    ),
    Limit(
        "batch_invariant_mode",
        lambda c: bool(c.batch_invariant_mode),
        "its kernels are Megatron's own",
    ),
    Limit(
        "enable_autocast",
        lambda c: bool(c.enable_autocast),
        "expert GEMMs run in the parameters' precision",
    ),
    Limit(
        "moe_latent_size",
        lambda c: c.moe_latent_size is not None,
        "latent projections are built by Transformer Engine only and have not been verified with "
        "this path",
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
        A sentence that starts with the setting (as `setting=value: reason`) or names the module, or
        None.
    """
    for limit in LIMITS:
        if limit.hit(config):
            return f"{limit.setting}={_plain(getattr(config, limit.setting))}: {limit.reason}"
    if layer is None:
        return None
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_fluid.patches.engine.module_hooks import ModuleHooks
    from megatron_fluid.patches.moe.expert_parameters import expert_modules_reason

    for phase in _PHASES:
        if phase in layer.__dict__ or getattr(type(layer), phase) is not getattr(MoELayer, phase):
            return f"{type(layer).__name__}.{phase} is overridden, and the overlapped path does not call it"
    if type(layer.token_dispatcher) is not MoEAlltoAllTokenDispatcher:
        return f"the token dispatcher is a {type(layer.token_dispatcher).__name__}, not Megatron's alltoall"
    if layer.token_dispatcher.tp_size > 1:
        return f"experts are split over {layer.token_dispatcher.tp_size} tensor-parallel ranks"
    return expert_modules_reason(layer.experts) or ModuleHooks(experts=layer.experts).foreign()


def _plain(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)
