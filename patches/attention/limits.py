"""What the exchanged and the overlapped attention do not honour: the tables TE_LIMITS,
OVERLAP_LIMITS and LATENT_LIMITS, and which modules the overlapped forwards know.

Under a setting of OVERLAP_LIMITS, and around other modules, the projections stay Megatron's, before
and after the core attention; those of latent attention also under one of LATENT_LIMITS. Under one
of TE_LIMITS, Transformer Engine keeps its own exchange.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.head_norms import norm_reason
from megatron_fluid.patches.engine.module_hooks import ModuleHooks, is_foreign
from megatron_fluid.patches.limits import Limit, offloads

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "EXCHANGED_COMM_TYPE",
    "LATENT_LIMITS",
    "OVERLAP_LIMITS",
    "TE_LIMITS",
    "bypassed",
    "latent_module_reason",
    "method_reason",
    "module_reason",
    "projected_up",
]

EXCHANGED_COMM_TYPE = "a2a"  # the cp_comm_type that is served

_PRECISION = "projections run in the parameters' precision"


def _captures_attention(config: TransformerConfig, _: FluidConfig) -> bool:
    """Whether a CUDA graph holds attention."""
    if config.cuda_graph_impl in ("none", "full_iteration"):
        return bool(config.cuda_graph_impl == "full_iteration")
    modules = {module.name for module in config.cuda_graph_modules}
    return not modules or "attn" in modules


OVERLAP_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "num_query_groups",
        "with fewer key/value heads than tensor-parallel ranks the projection's output is gathered",
        lambda c, _: c.num_query_groups < c.tensor_model_parallel_size,
    ),
    Limit("tp_comm_overlap", "Transformer Engine overlaps its linears with their own gathers"),
    Limit("fused_single_qkv_rope", "Transformer Engine rotates the projection's output in place"),
    Limit("mrope_section", "every sequence has its own rotations"),
    Limit("fp8", _PRECISION),
    Limit("fp4", _PRECISION),
    Limit("quant_recipe", _PRECISION),
    Limit("use_kitchen", "kitchen linears compute in their own precision"),
    Limit("enable_autocast", _PRECISION),
    Limit("test_mode", "Megatron compares the modules' inputs and outputs"),
    Limit("batch_invariant_mode", "its kernels are Megatron's own"),
    Limit("delay_wgrad_compute", "Megatron's schedule calls backward_dw of the projections"),
    Limit(
        "overlap_moe_expert_parallel_comm",
        "the 1F1B expert overlap runs attention of two microbatches in turns",
    ),
    Limit("cpu_offloading", "offloading hooks into the projections"),
    Limit(
        "offload_modules",
        "offloading qkv_linear, core_attn or attn_proj hooks into the attention",
        lambda c, _: offloads(c, "qkv_linear", "core_attn", "attn_proj"),
    ),
    Limit(
        "cuda_graph_impl",
        "of a graph that holds attention: each forward gathers a rotary table outside it",
        _captures_attention,
    ),
    Limit(
        "transformer_impl",
        "the inference-optimised layer has its own linears",
        lambda c, _: c.transformer_impl == "inference_optimized",
    ),
)


LATENT_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "tensor_model_parallel_size",
        "its projections up gather the sequence themselves",
        lambda c, _: c.tensor_model_parallel_size > 1,
    ),
    Limit(
        "recompute_modules",
        "core_attn and mla_up_proj recompute from all heads",
        lambda c, _: (
            c.recompute_granularity == "selective"
            and not {"core_attn", "mla_up_proj"}.isdisjoint(c.recompute_modules or ())
        ),
    ),
    Limit("cache_mla_latents", "of inference"),
)


_EXCHANGED_PRECISION = "heads are exchanged in the activations' precision"
_LOGITS = "logits are recorded by Megatron's own module"

# Of a TransformerConfig with what Megatron asks of Transformer Engine's attention as attributes.
TE_LIMITS: tuple[Limit[Any], ...] = (
    Limit(
        "cp_backend",
        "Megatron's own path was asked for",
        lambda _, fluid: fluid.cp_backend == "megatron",
    ),
    Limit(
        "cp_comm_type",
        "p2p, all_gather and a2a+p2p are other algorithms than a2a, which is served",
        lambda r, _: r.cp_comm_type != EXCHANGED_COMM_TYPE,
    ),
    Limit(
        "attention_type",
        "cross-attention has two sequences",
        lambda r, _: r.attention_type != "self",
    ),
    Limit(
        "attn_mask_type",
        "a mask of padding or an arbitrary one is not exchanged",
        lambda r, _: r.attn_mask_type.name not in ("causal", "no_mask"),
    ),
    Limit("fp8_dot_product_attention", _EXCHANGED_PRECISION),
    Limit("fp8_multi_head_attention", _EXCHANGED_PRECISION),
    Limit("qk_clip", _LOGITS),
    Limit("log_max_attention_logit", _LOGITS),
)


def module_reason(attention: Any) -> str | None:
    """Why the modules of a SelfAttention cannot be bypassed, or None: only classes that Megatron
    itself builds compute what is known here."""
    from megatron.core.transformer.attention import SelfAttention

    if type(attention).get_query_key_value_tensors is not SelfAttention.get_query_key_value_tensors:
        return f"{type(attention).__name__}.get_query_key_value_tensors is overridden"
    linears = {"linear_qkv": _qkv_types(), "linear_proj": _projection_types()}
    if (reason := _bypass_reason(attention, bypassed(attention), linears)) is not None:
        return reason
    qkv = attention.linear_qkv
    if getattr(qkv, "skip_bias_add", False) or getattr(qkv, "te_return_bias", False):
        return "linear_qkv does not add its bias"
    return norm_reason(attention.q_layernorm, attention.k_layernorm)


def latent_module_reason(attention: Any) -> str | None:
    """``module_reason`` of an MLASelfAttention."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    if type(attention) is not MLASelfAttention:
        return f"{type(attention).__name__} is another class than Megatron's MLASelfAttention"
    linears = projected_up(attention)
    modules = linears | {"core_attention": attention.core_attention}
    reason = _bypass_reason(attention, modules, dict.fromkeys(linears, _qkv_types()))
    for name, linear in linears.items():
        bias = getattr(linear, "bias", None)
        if reason is None and bias is not None and bias.numel():
            reason = f"{name} has a bias"
    return reason


def _bypass_reason(
    attention: Any, modules: dict[str, Any], linears: dict[str, tuple[type, ...]]
) -> str | None:
    """Why calls of an attention's modules cannot be bypassed, or None. ``linears``: by name, the
    classes of linears that can be."""
    if attention.attn_mask_type.name not in ("causal", "no_mask"):
        return f"attn_mask_type {attention.attn_mask_type.name}: it is causal or none"
    hooks = ModuleHooks(**modules)
    reason = hooks.replaced() or hooks.overridden() or _parameter_reason(modules)
    reason = reason or method_reason(attention, {name: modules[name] for name in linears}.items())
    for name, known in linears.items():
        reason = reason or _linear_reason(name, modules[name], known)
    return reason or hooks.foreign()


_from_elsewhere = functools.lru_cache(maxsize=32)(is_foreign)  # asked in each call
_ROTATIONS = (
    ("transformer.attention", "apply_rotary_pos_emb"),
    ("transformer.multi_latent_attention", "apply_rotary_pos_emb"),
    ("models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_bshd"),
    ("models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_thd"),
)


def method_reason(attention: Any, linears: Iterable[tuple[str, Any]]) -> str | None:
    """Name the first method besides ``forward`` that Megatron's path would call, the overlapped one
    does not, and that is not Megatron's own; or None. ``linears``: those bypassed, by name."""
    qkv = type(attention).get_query_key_value_tensors
    if "get_query_key_value_tensors" in attention.__dict__ or _from_elsewhere(qkv):
        return f"{type(attention).__name__}.get_query_key_value_tensors was replaced"
    for module, name in _ROTATIONS:
        if _from_elsewhere(getattr(sys.modules.get(f"megatron.core.{module}"), name, None)):
            return f"{name} was replaced"
    for name, linear in linears:
        impl = getattr(type(linear), "_forward_impl", None)  # Transformer Engine's have none
        if "_forward_impl" in linear.__dict__ or _from_elsewhere(impl):
            return f"{name}._forward_impl was replaced"
    return None


def _parameter_reason(modules: dict[str, Any]) -> str | None:
    """Why the modules' parameters cannot be read as plain tensors, or None."""
    import torch

    for name, module in modules.items():
        for inner, parameter in module.named_parameters(prefix=name):
            data = type(parameter.data)
            if type(parameter) is not torch.nn.Parameter or data is not torch.Tensor:
                return f"{inner} is a {data.__name__}, not a plain tensor"
            if hasattr(parameter, "__fsdp_param__"):
                return f"{inner} is sharded"
    return None


def _linear_reason(name: str, linear: Any, known: tuple[type, ...]) -> str | None:
    """Why a linear cannot be bypassed, or None: ``known`` are the classes that can be."""
    if type(linear) not in known:
        return f"{name} is a {type(linear).__name__}, which may compute more than a linear"
    if linear._parameters.get("weight") is None:
        return f"{name} has no parameter weight"
    if getattr(linear, "te_quant_params", None) is not None:
        return f"{name} has its own quantisation recipe"
    inside = getattr(linear.weight, "gtp_remat_size", None)
    if getattr(linear, "gtp_remat_size", 1) != 1 or inside is not None:
        return f"{name}'s weight is gathered inside it"
    return None


def bypassed(attention: Any) -> dict[str, Any]:
    """The modules whose calls the overlapped forward stands for, by name."""
    return {name: module for name, module in attention.named_children() if module is not None}


def projected_up(attention: Any) -> dict[str, Any]:
    """The linears from compressed rows to queries, and to keys and values."""
    queries = "linear_q_proj" if attention.config.q_lora_rank is None else "linear_q_up_proj"
    return {name: getattr(attention, name) for name in (queries, "linear_kv_up_proj")}


def _te(*names: str) -> tuple[type, ...]:
    """Megatron's wrappers of Transformer Engine's modules, where it is installed."""
    from megatron.core.extensions import transformer_engine as extension

    return tuple(getattr(extension, name) for name in names) if extension.HAVE_TE else ()


def _qkv_types() -> tuple[type, ...]:
    """Megatron's column-parallel linears."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    return (ColumnParallelLinear, *_te("TEColumnParallelLinear", "TELayerNormColumnParallelLinear"))


def _projection_types() -> tuple[type, ...]:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    return (RowParallelLinear, *_te("TERowParallelLinear"))
