"""What the overlapped self-attention does not honour: the one list from which its decision, its report and the README's table are made.

Under a setting named here, the projections stay Megatron's, before and after its core attention (attention.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_fluid.patches.limits import Limit

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["OVERLAP_LIMITS", "setting_limit"]


def _recomputes_core(config: TransformerConfig) -> bool:
    return config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())


def _offloads_attention(config: TransformerConfig) -> bool:
    inside = {"qkv_linear", "core_attn", "attn_proj"}
    return bool(config.fine_grained_activation_offloading and inside & set(config.offload_modules or ()))


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
        "attention_output_gate", lambda c: bool(c.attention_output_gate), "the gate is a fourth part of the projection"
    ),
    Limit("qk_l2_norm", lambda c: bool(c.qk_l2_norm), "queries and keys are normalised by RMSNorm only"),
    Limit(
        "fused_single_qkv_rope",
        lambda c: bool(c.fused_single_qkv_rope),
        "Transformer Engine rotates the projection's output in place",
    ),
    Limit("mrope_section", lambda c: c.mrope_section is not None, "every sequence has its own rotations"),
    Limit("fp8", lambda c: bool(c.fp8), "projections run in the parameters' precision"),
    Limit("fp4", lambda c: bool(c.fp4), "projections run in the parameters' precision"),
    Limit("quant_recipe", lambda c: c.quant_recipe is not None, "projections run in the parameters' precision"),
    Limit("use_kitchen", lambda c: bool(c.use_kitchen), "kitchen linears compute in their own precision"),
    Limit("enable_autocast", lambda c: bool(c.enable_autocast), "projections run in the parameters' precision"),
    Limit("test_mode", lambda c: bool(c.test_mode), "Megatron compares the modules' inputs and outputs"),
    Limit("batch_invariant_mode", lambda c: bool(c.batch_invariant_mode), "its kernels are Megatron's own"),
    Limit("recompute_modules", _recomputes_core, "core_attn is recomputed by itself (full recomputation is honoured)"),
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
    Limit("cpu_offloading", lambda c: bool(c.cpu_offloading), "offloading hooks into the projections"),
    Limit(
        "offload_modules", _offloads_attention, "offloading qkv_linear, core_attn or attn_proj hooks into the attention"
    ),
    Limit(
        "cuda_graph_impl", lambda c: c.cuda_graph_impl != "none", "rotations are gathered at a sequence's first call"
    ),
    Limit(
        "transformer_impl",
        lambda c: c.transformer_impl == "inference_optimized",
        "the inference-optimised layer has its own linears",
    ),
)


def setting_limit(config: Any) -> str | None:
    """The first setting of a TransformerConfig under which projections are not overlapped, with its value and why; None if none is."""
    for limit in OVERLAP_LIMITS:
        if limit.hit(config):
            return f"{limit.setting}={getattr(config, limit.setting)!r}: {limit.reason}"
    return None
