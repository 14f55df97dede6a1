"""What keeps latent attention's projections up around the exchange of heads: LATENT_LIMITS beside
OVERLAP_LIMITS, and which modules the overlapped form knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.limits import (
    OVERLAP_LIMITS,
    linear_reason,
    parameter_reason,
    qkv_types,
)
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.limits import Limit, first_reason

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

__all__ = ["LATENT_LIMITS", "latent_module_reason", "latent_setting_reason", "projected_up"]


def _recomputes(config: Any, _: FluidConfig) -> bool:
    chosen = {"core_attn", "mla_up_proj"}.intersection(config.recompute_modules or ())
    return config.recompute_granularity == "selective" and bool(chosen)


LATENT_LIMITS: tuple[Limit[MLATransformerConfig], ...] = (
    Limit(
        "tensor_model_parallel_size",
        "its projections up gather the sequence themselves",
        lambda c, _: c.tensor_model_parallel_size > 1,
    ),
    Limit("recompute_modules", "core_attn and mla_up_proj recompute from all heads", _recomputes),
    Limit("cache_mla_latents", "of inference"),
)


def latent_setting_reason(config: Any, fluid: FluidConfig) -> str | None:
    """The first setting under which projections up are not overlapped, with its value and why; or
    None."""
    return first_reason((*OVERLAP_LIMITS, *LATENT_LIMITS), config, fluid)


def projected_up(attention: Any) -> dict[str, Any]:
    """The linears from compressed rows to queries, and to keys and values."""
    queries = "linear_q_proj" if attention.config.q_lora_rank is None else "linear_q_up_proj"
    return {name: getattr(attention, name) for name in (queries, "linear_kv_up_proj")}


def latent_module_reason(attention: Any) -> str | None:
    """Why these modules cannot be bypassed, or None: only classes that Megatron itself builds
    compute what is known here."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    if type(attention) is not MLASelfAttention:
        return f"{type(attention).__name__} is another class than Megatron's MLASelfAttention"
    if attention.attn_mask_type.name not in ("causal", "no_mask"):
        return f"attn_mask_type {attention.attn_mask_type.name}: it is causal or none"
    linears = projected_up(attention)
    modules = linears | {"core_attention": attention.core_attention}
    hooks = ModuleHooks(**modules)
    reason = hooks.replaced() or hooks.overridden() or parameter_reason(modules)
    for name, linear in linears.items():
        reason = reason or linear_reason(name, linear, qkv_types())
        if reason is None and getattr(linear, "bias", None) is not None and linear.bias.numel():
            reason = f"{name} has a bias"
    return reason
