"""What becomes of each MoE, context-parallel and recompute setting of Megatron's models.

One row for each field of TransformerConfig: honoured, left to Megatron wholly or in part (with the
reason of the tables of limits), or without effect. `unlisted` names fields of a newer
Megatron-Core that this table lacks: tests/unit/tools/test_settings_table.py then fails, so
that nobody finds out by a wrong result. docs/compatibility.md is generated from it.

Nothing of Megatron is imported here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fluid.patches.attention.limits import OVERLAP_LIMITS, TE_LIMITS
from megatron_fluid.patches.engine.patch import MEGATRON, Patch
from megatron_fluid.patches.limits import Limit
from megatron_fluid.patches.moe.limits import (
    EXCHANGE_LIMITS,
    EXPERT_LIMITS,
    FUSION_LIMITS,
    LAYER_LIMITS,
)

__all__ = [
    "SETTINGS",
    "Setting",
    "compatibility_table",
    "is_ours",
    "limits_table",
    "parts_table",
    "patches_table",
    "unlisted",
]

HONOURED, LEFT, NO_EFFECT = "honoured", "left to Megatron", "no effect"
EXCHANGE = "megatron_fluid's exchange"  # and Megatron's experts
EXPERTS = "megatron_fluid's experts"  # and Megatron's exchange
PHASES = "phase by phase"  # both, called by Megatron's forward one after the other
_ROUTER = "Megatron's router runs"
_FLEX = "only the flex dispatcher reads it"
_LAYOUT = "Megatron builds the model from it before megatron_fluid sees a layer"
_OVERLAP = "other attention keeps Megatron's path"


@dataclass(frozen=True)
class Setting:
    """A field of TransformerConfig. note: who honours it, or why not, in one clause."""

    name: str
    state: str
    note: str


def is_ours(field: str) -> bool:
    """Whether a field belongs in the table: of MoE and experts, context parallelism, recompute."""
    return (
        field.startswith(("moe_", "cp_comm", "recompute_"))
        or "expert" in field
        or "context_parallel" in field
        or field == "distribute_saved_activations"
    )


_OTHERS = tuple(
    Setting(name, state, note)
    for state, note, names in (
        (
            HONOURED,
            _ROUTER,
            "moe_router_load_balancing_type moe_router_topk moe_router_num_groups "
            "moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
            "moe_router_score_function moe_router_dtype moe_router_enable_expert_bias "
            "moe_router_bias_update_rate moe_router_quantile_balancing_ema "
            "moe_router_force_load_balancing moe_router_force_biased moe_router_fusion "
            "moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_per_layer_logging "
            "moe_router_topk_limited_devices",
        ),
        (
            HONOURED,
            "choices that the router drops are not sent",
            "moe_expert_capacity_factor moe_token_drop_policy",
        ),
        (HONOURED, "by the schedule and the router's losses", "moe_grad_scale_func"),
        (
            HONOURED,
            "the shared expert is Megatron's module",
            "moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size",
        ),
        (HONOURED, "the shared expert overlaps with the exchange", "moe_shared_expert_overlap"),
        (
            HONOURED,
            _LAYOUT,
            "num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_grouped_gemm "
            "expert_model_parallel_size",
        ),
        (HONOURED, "the layer recomputes itself, over its own transport", "moe_layer_recompute"),
        (
            HONOURED,
            "around whole layers, by Megatron",
            "recompute_granularity recompute_method recompute_num_layers "
            "distribute_saved_activations",
        ),
        (
            HONOURED,
            "overlapped attention recomputes core_attn itself; Megatron does the rest",
            "recompute_modules",
        ),
        (HONOURED, f"with cp_comm_type a2a; {_OVERLAP}", "context_parallel_size"),
        (LEFT, f"needs cp_comm_type a2a+p2p; {_OVERLAP}", "hierarchical_context_parallel_sizes"),
        (
            LEFT,
            "its groups change with each batch, and layers that get one keep Megatron's path",
            "hybrid_context_parallel",
        ),
        (
            NO_EFFECT,
            _FLEX,
            "moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep "
            "moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms "
            "moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute "
            "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
            "moe_ncclep_static_shape",
        ),
        (
            NO_EFFECT,
            "rows are moved by kernels of this project, or permuted by torch",
            "moe_permute_fusion",
        ),
        (
            HONOURED,
            "rows for Megatron's quantised experts are padded once they have arrived",
            "moe_router_padding_for_quantization moe_router_padding_for_fp8",
        ),
        (
            NO_EFFECT,
            "only the paged stash reads it, which keeps Megatron's experts",
            "moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
            "moe_paged_stash_buffer_size_factor_cpu",
        ),
        (HONOURED, "by megatron_fluid's experts", "moe_mlp_glu_interleave_size"),
        (
            HONOURED,
            "if not quantised; megatron_fluid's experts read the parameter in place",
            "moe_single_grouped_weight moe_single_grouped_bias",
        ),
        (
            NO_EFFECT,
            "only checkpoints of experts split over tensor-parallel ranks read it",
            "expert_tensor_parallel_num_weight_shards",
        ),
        (NO_EFFECT, "Megatron has no such feature yet", "moe_token_dropping"),
        (NO_EFFECT, "only inference reads it", "moe_pad_experts_for_cuda_graph_inference"),
    )
    for name in names.split()
)


def _of_limits() -> tuple[Setting, ...]:
    """The fields that a table of limits names; a limit says when it counts."""
    found: dict[str, Setting] = {}
    moe = (
        *((LAYER_LIMITS, LEFT), (EXCHANGE_LIMITS, EXPERTS)),
        *((EXPERT_LIMITS, EXCHANGE), (FUSION_LIMITS, PHASES)),
    )
    for limits, state in (*moe, (OVERLAP_LIMITS, LEFT), (TE_LIMITS, LEFT)):
        for limit in limits:
            if is_ours(limit.setting):
                found.setdefault(limit.setting, Setting(limit.setting, state, limit.reason))
    return tuple(found.values())


SETTINGS: tuple[Setting, ...] = tuple(
    sorted((*_OTHERS, *_of_limits()), key=lambda setting: setting.name)
)


def unlisted(fields: Iterable[str]) -> list[str]:
    """The fields of a TransformerConfig that belong in the table and are not there."""
    known = {setting.name for setting in SETTINGS}
    return [field for field in fields if is_ours(field) and field not in known]


def compatibility_table() -> str:
    """The table as Markdown."""
    rows = [f"| `{s.name}` | {s.state} | {s.note} |" for s in SETTINGS]
    return "\n".join(["| setting | state | |", "|---|---|---|", *rows])


def parts_table(parts: Iterable[tuple[str, str, Sequence[Limit[Any]]]]) -> str:
    """The table of who runs the exchange and the experts of an MoE layer under each setting.

    parts: who runs the exchange, who runs the experts, and the limits under which that is so.
    """
    rows = [
        f"| `{limit.setting}` | {exchange} | {experts} | {limit.reason} |"
        for exchange, experts, limits in parts
        for limit in limits
    ]
    return "\n".join(["| setting | exchange | experts | why |", "|---|---|---|---|", *rows])


def patches_table(patches: Sequence[Patch]) -> str:
    """The tables in docs/patches.md: what is patched and why. Groups other than Megatron's are
    collapsed."""
    parts = []
    for group in dict.fromkeys(patch.group for patch in patches):
        lines = ["| patch | target | why it is a patch |", "|---|---|---|"]
        members = [patch for patch in patches if patch.group == group]
        lines += [f"| {p.name} | `{p.target}` | {p.reason} |" for p in members]
        table = "\n".join(lines)
        if group != MEGATRON:
            words = [f"{group}: {len(members)} patches", members[0].condition]
            summary = ", ".join(filter(None, words))
            table = f"<details><summary>{summary}</summary>\n\n{table}\n\n</details>"
        parts.append(table)
    return "\n\n".join(parts)


def limits_table(limits: Sequence[Limit[Any]]) -> str:
    """A table in docs/compatibility.md: settings under which a layer keeps Megatron's own path."""
    rows = (f"| `{limit.setting}` | {limit.reason} |" for limit in limits)
    return "\n".join(["| setting | why |", "|---|---|", *rows])
