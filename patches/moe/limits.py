"""Settings under which parts of an MoE layer stay Megatron's: the tables LAYER_LIMITS,
EXCHANGE_LIMITS, EXPERT_LIMITS and FUSION_LIMITS.

    a limit of      exchange          experts
    (none)          megatron_fluid    megatron_fluid    fused and overlapped (layer.py)
    the fusion      megatron_fluid    megatron_fluid    phase by phase (token_dispatcher.py)
    the experts     megatron_fluid    Megatron          phase by phase
    the exchange    Megatron          megatron_fluid    phase by phase
    the layer       Megatron          Megatron

decision.py applies them to a layer. `fluid` is everywhere the settings that the layer keeps, not
those in force.

Nothing of Megatron is imported at the top: this file is itself imported while Megatron is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig, names_exchange
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.limits import Limit, offloads
from megatron_fluid.patches.moe.graphed_router import Held, held_by_graphs

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DISPATCHER_STEPS",
    "EXCHANGE_LIMITS",
    "EXPERT_LIMITS",
    "FUSION_LIMITS",
    "LAYER_LIMITS",
    "PARTS",
    "PHASES",
    "batch_invariant",
    "bounded_unsupported_reason",
    "activation_name",
    "bounds_rows",
    "offloads_in_experts",
]

_PRECISION = "expert GEMMs run in the parameters' precision"
_FUSED_BY_MEGATRON = ("swiglu", "quick_geglu")


def activation_name(config: TransformerConfig) -> str | None:
    """Name of the activation that `config` asks for, or None where the overlapped path has none."""
    from megatron_fluid.patches.moe import expert_modules

    return expert_modules.activation_name(config)


def _fuses_without_clamp(config: TransformerConfig, _: FluidConfig) -> bool:
    clamped = config.activation_func_clamp_value is not None and config.bias_activation_fusion
    return bool(clamped) and activation_name(config) == "swiglu"


def _fuses_other_bounds(config: TransformerConfig, _: FluidConfig) -> bool:
    # TEGroupedMLP._make_fused_ops passes the clamp of quick GeGLU on, and nothing else.
    if not config.use_transformer_engine_op_fuser or not config.gated_linear_unit:
        return False
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if activation_name(config) == "swiglu":
        return clamp is not None or offset != 0.0
    return clamp is None or offset != 1.0


def bounded_unsupported_reason(config: TransformerConfig) -> str | None:
    """Why a CUDA graph of an iteration cannot hold layers over symmetric memory, or None."""
    if (off := patches.off_reason("iteration-graph")) is not None:
        return f"the patch iteration-graph: {off}"
    if config.pipeline_model_parallel_size > 1:
        return "pipeline stages"
    if config.fp8 and config.fp8_recipe == "delayed":
        return "fp8_recipe 'delayed': its histories cannot be put back for a second run"
    if config.add_bias_linear:
        return "experts with biases take as many rows as arrive"
    if config.variable_seq_lengths:
        return "variable_seq_lengths: buffers grow with the tokens of a call, which the host counts"
    if torch.cuda.is_available() and not cpu_mode_active():
        from megatron_fluid.kernels.grouped_gemm.launch import sends_rows

        dtype = config.params_dtype
        if not sends_rows(torch.device("cuda", torch.cuda.current_device()), dtype):
            return f"the host counts the rows of experts in {dtype} on this GPU"
    return None


def batch_invariant(config: TransformerConfig, fluid: FluidConfig) -> bool:
    """Whether a layer has to give a token the same bits in any batch, over any ranks."""
    return fluid.batch_invariant or bool(config.batch_invariant_mode)


def bounds_rows(config: TransformerConfig) -> bool:
    """Whether a CUDA graph of an iteration holds fused layers over symmetric memory, with room for
    a bounded number of rows (patches/iteration_graph.py)."""
    return config.cuda_graph_impl == "full_iteration" and not bounded_unsupported_reason(config)


def _captures_experts(config: TransformerConfig, fluid: FluidConfig) -> bool:
    """Whether a CUDA graph holds experts that read row counts on the host, or phases that only
    Megatron's forward runs."""
    held = held_by_graphs(config)
    if not held.experts:
        return held is Held.PHASES
    if config.expert_model_parallel_size == 1:
        return False  # on one rank the host reads nothing
    return held is Held.LAYER or not bounds_rows(config)


def _offloads_as_megatron_alone(config: TransformerConfig, _: FluidConfig) -> bool:
    """Whether offloading takes part in experts in a way that only Megatron's have."""
    if offloads(config, "fused_group_mlp"):
        return True
    again = config.recompute_granularity == "full" or config.fp8 or held_by_graphs(config).experts
    return bool(offloads_in_experts(config) and again)


def offloads_in_experts(config: TransformerConfig) -> bool:
    """Whether rows or activations of experts are offloaded."""
    return offloads(config, "expert_fc1", "moe_act")


def _nvlink_activation(config: TransformerConfig) -> bool:
    from megatron_fluid.kernels.activation.kernel import ACTIVATIONS

    return activation_name(config) in ACTIVATIONS


LAYER_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit("use_kitchen", "kitchen linears compute in their own precision"),
    Limit(
        "expert_gtp_weight_remat_size",
        "expert weights are gathered inside their linears",
        lambda c, _: c.expert_gtp_weight_remat_size > 1,
    ),
    Limit(
        "cuda_graph_impl",
        "graphs may hold attention and, with transformer_engine, the router, but not the experts, "
        "whose row counts the host reads; on one expert-parallel rank whole layers and iterations "
        "may be captured, on several, over symmetric memory, whole iterations (--fluid-graph), but "
        "not with biases, variable_seq_lengths or pipeline stages",
        _captures_experts,
    ),
    Limit(
        "transformer_impl",
        "the inference-optimised layer has its own dispatchers",
        lambda c, _: c.transformer_impl == "inference_optimized",
    ),
)

_ON_HOST = "read row counts on the host"
_BETWEEN_HOSTS = ("rounds", "hierarchical")

EXCHANGE_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "cuda_graph_impl",
        "graphs of whole layers may hold one on one expert-parallel rank, with moe_backend=local",
        lambda c, fluid: held_by_graphs(c) is Held.LAYER and fluid.moe_backend != "local",
    ),
    Limit(
        "cuda_graph_impl",
        f"backends rounds and hierarchical {_ON_HOST}",
        lambda c, _: held_by_graphs(c).experts,
        over=_BETWEEN_HOSTS,
    ),
    Limit(
        "cuda_graph_impl",
        f"a graph holds layers over symmetric memory only as --fluid-graph says; else {_ON_HOST}",
        lambda c, _: held_by_graphs(c).experts and not bounds_rows(c),
        over=("nvlink",),
    ),
    Limit(
        "moe_token_dispatcher_type",
        "flex is asked for by name (a --fluid-moe-backend that is named, too, takes its place)",
        lambda c, fluid: c.moe_token_dispatcher_type == "flex" and not names_exchange(fluid),
    ),
    Limit(
        "expert_tensor_parallel_size",
        "experts split over tensor-parallel ranks need a gather and a reduce-scatter around them",
        lambda c, _: (c.expert_tensor_parallel_size or 1) > 1,
    ),
    Limit(
        "moe_expert_rank_capacity_factor", "rows beyond a rank's capacity are dropped by HybridEP"
    ),
    Limit(
        "moe_pad_expert_input_to_capacity",
        "beside moe_apply_probs_on_input and add_bias_linear rows that only pad bring biases "
        "(else rows that only pad are not sent)",
        lambda c, _: bool(
            c.moe_pad_expert_input_to_capacity and c.moe_apply_probs_on_input and c.add_bias_linear
        ),
    ),
)

EXPERT_LIMITS: tuple[Limit[TransformerConfig], ...] = (
    Limit(
        "fp8",
        "megatron_fluid's fp8 experts have the format e4m3, with the recipe blockwise",
        lambda c, _: bool(c.fp8) and c.fp8 != "e4m3",
    ),
    Limit(
        "fp8_recipe",
        "megatron_fluid's fp8 experts have the recipe blockwise",
        lambda c, _: (
            bool(c.fp8) and str(getattr(c.fp8_recipe, "value", c.fp8_recipe)) != "blockwise"
        ),
    ),
    Limit(
        "fp8_param",
        "fp8 experts are cast from bf16 parameters, not from primary weights in fp8",
        lambda c, _: bool(c.fp8 and c.fp8_param),
    ),
    Limit(
        "fp8",
        "backends rounds and hierarchical have experts in the parameters' precision",
        over=_BETWEEN_HOSTS,
    ),
    Limit("fp4", _PRECISION),
    Limit("enable_autocast", _PRECISION),
    Limit("quant_recipe", _PRECISION),
    Limit(
        "activation_func",
        "this activation function has no overlapped variant",
        lambda c, _: activation_name(c) is None,
    ),
    Limit(
        "bias_activation_fusion",
        "Megatron's fused activation exists for SwiGLU and quick GeGLU only",
        # Megatron itself refuses these when the layer runs: let it say so.
        lambda c, _: c.bias_activation_fusion and activation_name(c) not in _FUSED_BY_MEGATRON,
    ),
    Limit("use_te_activation_func", "the activation is a Transformer Engine module"),
    Limit(
        "use_transformer_engine_op_fuser",
        "Transformer Engine's fused expert leaves clamp and offset of SwiGLU out, and gives quick "
        "GeGLU an offset of 1 and, where none is set, a clamp (honoured where these are set)",
        _fuses_other_bounds,
    ),
    Limit(
        "activation_func_clamp_value",
        "Megatron's fused SwiGLU leaves the clamp out (honoured without bias_activation_fusion)",
        _fuses_without_clamp,
    ),
    Limit(
        "activation_func_fp8_input_store",
        "activations are kept in their own precision (by fp8 experts in fp8, with and without it)",
        lambda c, _: bool(c.activation_func_fp8_input_store) and not c.fp8,
    ),
    Limit(
        "delay_wgrad_compute",
        "beside moe_latent_size Megatron's schedule delays the layer's projections with the "
        "experts",
        lambda c, _: bool(c.delay_wgrad_compute and c.moe_latent_size),
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
        lambda c, _: bool(
            c.moe_enable_routing_replay
            and (c.recompute_granularity == "selective" and "moe" in (c.recompute_modules or ()))
        ),
    ),
    Limit("moe_latent_size", "the layer's own projections stand before and after the exchange"),
    Limit(
        "offload_modules",
        "only backend local offloads rows and activations of experts in a fused layer",
        lambda c, _: offloads_in_experts(c),
        over=("nvlink", *_BETWEEN_HOSTS),
    ),
    Limit(
        "moe_apply_probs_on_input",
        "fused by backend rounds; the others apply probabilities before fc2",
        over=("local", "nvlink", "hierarchical"),
    ),
    Limit(
        "activation_func",
        "the fused layer over symmetric memory has no such activation",
        lambda c, _: not _nvlink_activation(c),
        over=("nvlink",),
    ),
)

# Who runs the exchange, and who the experts, under the settings of each table.
PARTS: tuple[tuple[str, str, tuple[Limit[TransformerConfig], ...]], ...] = (
    ("Megatron's", "Megatron's", LAYER_LIMITS),
    ("Megatron's", "megatron_fluid's", EXCHANGE_LIMITS),
    ("megatron_fluid's", "Megatron's", EXPERT_LIMITS),
    ("megatron_fluid's", "megatron_fluid's, phase by phase", FUSION_LIMITS),
)

# A subclass that overrides one of these expects it to be called.
PHASES = ("preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")
# The same of a token dispatcher.
DISPATCHER_STEPS = (
    *("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    *("combine_preprocess", "token_combine", "combine_postprocess"),
)
