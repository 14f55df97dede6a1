"""What the overlapped self-attention does not honour: the one list from which its decision, its
report and the README's table are made, and which modules it knows.

Under a setting named here, and around other modules, the projections stay Megatron's, before and
after its core attention (attention.py).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.moe.limits import Limit

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["OVERLAP_LIMITS", "bypassed", "module_limit", "setting_limit"]


def _recomputes_core(config: TransformerConfig) -> bool:
    return config.recompute_granularity == "selective" and "core_attn" in (
        config.recompute_modules or ()
    )


def _offloads_attention(config: TransformerConfig) -> bool:
    inside = {"qkv_linear", "core_attn", "attn_proj"}
    return bool(
        config.fine_grained_activation_offloading and inside & set(config.offload_modules or ())
    )


OVERLAP_LIMITS: tuple[Limit, ...] = (
    Limit(
        "tensor_model_parallel_size",
        lambda c: c.tensor_model_parallel_size > 1,
        "its linears gather and scatter the sequence, or sum over ranks",
    ),
    Limit(
        "attention_dropout",
        lambda c: c.attention_dropout > 0,
        "heads are laid out otherwise, so that random numbers would fall on others",
    ),
    Limit(
        "attention_output_gate",
        lambda c: bool(c.attention_output_gate),
        "the gate is a fourth part of the projection",
    ),
    Limit(
        "qk_l2_norm",
        lambda c: bool(c.qk_l2_norm),
        "queries and keys are normalised by RMSNorm only",
    ),
    Limit(
        "fused_single_qkv_rope",
        lambda c: bool(c.fused_single_qkv_rope),
        "Transformer Engine rotates the projection's output in place",
    ),
    Limit(
        "mrope_section",
        lambda c: c.mrope_section is not None,
        "every sequence has its own rotations",
    ),
    Limit("fp8", lambda c: bool(c.fp8), "projections run in the parameters' precision"),
    Limit("fp4", lambda c: bool(c.fp4), "projections run in the parameters' precision"),
    Limit(
        "quant_recipe",
        lambda c: c.quant_recipe is not None,
        "projections run in the parameters' precision",
    ),
    Limit(
        "use_kitchen",
        lambda c: bool(c.use_kitchen),
        "kitchen linears compute in their own precision",
    ),
    Limit(
        "enable_autocast",
        lambda c: bool(c.enable_autocast),
        "projections run in the parameters' precision",
    ),
    Limit(
        "test_mode",
        lambda c: bool(c.test_mode),
        "Megatron compares the modules' inputs and outputs",
    ),
    Limit(
        "batch_invariant_mode",
        lambda c: bool(c.batch_invariant_mode),
        "its kernels are Megatron's own",
    ),
    Limit(
        "recompute_modules",
        _recomputes_core,
        "core_attn is recomputed by itself (full recomputation is honoured)",
    ),
    Limit(
        "delay_wgrad_compute",
        lambda c: bool(c.delay_wgrad_compute),
        "Megatron's schedule calls backward_dw of the projections",
    ),
    Limit(
        "overlap_moe_expert_parallel_comm",
        lambda c: bool(c.overlap_moe_expert_parallel_comm),
        "the 1F1B expert overlap runs attention of two microbatches in turns",
    ),
    Limit(
        "cpu_offloading", lambda c: bool(c.cpu_offloading), "offloading hooks into the projections"
    ),
    Limit(
        "offload_modules",
        _offloads_attention,
        "offloading qkv_linear, core_attn or attn_proj hooks into the attention",
    ),
    Limit(
        "cuda_graph_impl",
        lambda c: c.cuda_graph_impl != "none",
        "rotations are gathered at a sequence's first call",
    ),
    Limit(
        "transformer_impl",
        lambda c: c.transformer_impl == "inference_optimized",
        "the inference-optimised layer has its own linears",
    ),
)


def setting_limit(config: Any) -> str | None:
    """The first setting of a TransformerConfig under which projections are not overlapped, with its
    value and why; None if none is."""
    for limit in OVERLAP_LIMITS:
        if limit.hit(config):
            return f"{limit.setting}={getattr(config, limit.setting)!r}: {limit.reason}"
    return None


def module_limit(attention: Any) -> str | None:
    """Why these modules cannot be bypassed, or None: only classes that Megatron itself builds
    compute what is known here."""
    import torch
    from megatron.core.transformer.attention import SelfAttention

    if type(attention).get_query_key_value_tensors is not SelfAttention.get_query_key_value_tensors:
        return f"{type(attention).__name__}.get_query_key_value_tensors is overridden"
    if attention.attn_mask_type.name not in ("causal", "no_mask"):
        return f"attn_mask_type {attention.attn_mask_type.name}: it is causal or none"
    if attention._yarn_concentration_factor != 1.0:
        return "rotations are scaled (YaRN's concentration factor)"
    modules = bypassed(attention)
    if (replaced := ModuleHooks(**modules).replaced()) is not None:
        return replaced
    for name, module in modules.items():
        for inner, parameter in module.named_parameters(prefix=name):
            if (
                type(parameter) is not torch.nn.Parameter
                or type(parameter.data) is not torch.Tensor
            ):
                return f"{inner} is a {type(parameter.data).__name__}, not a plain tensor"
            if hasattr(parameter, "__fsdp_param__"):
                return f"{inner} is sharded"
    for name, known in (("linear_qkv", _qkv_types()), ("linear_proj", _projection_types())):
        linear = getattr(attention, name)
        if type(linear) not in known:
            return f"{name} is a {type(linear).__name__}, which may compute more than a linear"
        if getattr(linear, "te_quant_params", None) is not None:
            return f"{name} has its own quantisation recipe"
        if (
            getattr(linear, "gtp_remat_size", 1) != 1
            or getattr(linear.weight, "gtp_remat_size", None) is not None
        ):
            return f"{name}'s weight is gathered inside it"
    if getattr(attention.linear_qkv, "skip_bias_add", False) or getattr(
        attention.linear_qkv, "te_return_bias", False
    ):
        return "linear_qkv does not add its bias"
    return _norm_reason(attention.q_layernorm, attention.k_layernorm)


def _norm_reason(q_norm: Any, k_norm: Any) -> str | None:
    if q_norm is None and k_norm is None:
        return None
    for name, norm in (("q_layernorm", q_norm), ("k_layernorm", k_norm)):
        if type(norm) not in _norm_types():
            return f"{name} is a {type(norm).__name__}; queries and keys are normalised by RMSNorm, both or neither"
    if q_norm.eps != k_norm.eps or q_norm.eps is None:
        return "q_layernorm and k_layernorm differ in epsilon"
    return None


def bypassed(attention: Any) -> dict[str, Any]:
    """The modules whose calls the overlapped forward stands for, by name."""
    return {name: module for name, module in attention.named_children() if module is not None}


def _te(*names: str) -> tuple[type, ...]:
    """Megatron's wrappers of Transformer Engine's modules, where it is installed."""
    from megatron.core.extensions import transformer_engine as extension

    return tuple(getattr(extension, name) for name in names) if extension.HAVE_TE else ()


def _qkv_types() -> tuple[type, ...]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    return (ColumnParallelLinear, *_te("TEColumnParallelLinear", "TELayerNormColumnParallelLinear"))


def _projection_types() -> tuple[type, ...]:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    return (RowParallelLinear, *_te("TERowParallelLinear"))


def _norm_types() -> tuple[type, ...]:
    import torch

    te = sys.modules.get("transformer_engine.pytorch")
    return (torch.nn.RMSNorm, *([te.RMSNorm] if te is not None and _te("TENorm") else []))
