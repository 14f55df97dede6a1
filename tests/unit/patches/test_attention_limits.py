"""Every setting under which attention's projections stay Megatron's, by itself."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention import core, decision, latent, self_attention
from megatron_fluid.patches.attention.limits import LATENT_LIMITS, OVERLAP_LIMITS
from megatron_fluid.patches.limits import first_reason

# For every limit values that hit it, and values that do not.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "num_query_groups": (
        {"num_query_groups": 1, "tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "tp_comm_overlap": (
        {"tp_comm_overlap": True},
        {"attention_dropout": 0.1, "attention_output_gate": True, "qk_l2_norm": True},
    ),
    "fused_single_qkv_rope": ({"fused_single_qkv_rope": True}, {"apply_rope_fusion": True}),
    "mrope_section": ({"mrope_section": [2, 3, 3]}, {"rotary_interleaved": True}),
    "fp8": ({"fp8": "hybrid"}, {}),
    "fp4": ({"fp4": "e2m1"}, {}),
    "quant_recipe": ({"quant_recipe": object()}, {}),
    **{name: ({name: True}, {}) for name in ("use_kitchen", "enable_autocast", "test_mode")},
    "batch_invariant_mode": ({"batch_invariant_mode": True}, {"deterministic_mode": True}),
    "delay_wgrad_compute": ({"delay_wgrad_compute": True}, {"gradient_accumulation_fusion": True}),
    "overlap_moe_expert_parallel_comm": ({"overlap_moe_expert_parallel_comm": True}, {}),
    "cpu_offloading": ({"cpu_offloading": True}, {}),
    "offload_modules": (
        {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]},
        {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
    ),
    "cuda_graph_impl": (
        {"cuda_graph_impl": "local"},
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": [CudaGraphModule.moe_router, CudaGraphModule.mlp],
        },
    ),
    "transformer_impl": (
        {"transformer_impl": "inference_optimized"},
        {"transformer_impl": "local"},
    ),
}


def reason_of(config: Any, latent: bool = False) -> str | None:
    limits = (*OVERLAP_LIMITS, *LATENT_LIMITS) if latent else OVERLAP_LIMITS
    return first_reason(limits, config, FluidConfig())


@pytest.fixture(scope="module")
def supported() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0
    )


def _with(config: Any, settings: dict[str, Any]) -> Any:
    changed = copy.copy(config)
    for name, value in settings.items():
        assert hasattr(changed, name), f"Megatron has no setting {name}"
        setattr(changed, name, value)
    return changed


LATENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor_model_parallel_size": ({"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}),
    "recompute_modules": (
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ),
    "cache_mla_latents": ({"cache_mla_latents": True}, {}),
}


def test_every_limit_is_tried_here() -> None:
    for limits, tried in ((OVERLAP_LIMITS, SETTINGS), (LATENT_LIMITS, LATENT)):
        assert [limit.setting for limit in limits] == list(tried)


@pytest.mark.parametrize(("setting", "latent"), [
    *((s, False) for s in SETTINGS),
    *((s, True) for s in (*LATENT, "fp8", "delay_wgrad_compute")),
])  # fmt: skip
def test_a_limit_names_its_setting_and_no_other(
    supported: TransformerConfig, setting: str, latent: bool
) -> None:
    config = supported
    if latent:
        config = MLATransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    hit, missed = (LATENT | SETTINGS)[setting]
    assert reason_of(config, latent) is None
    assert reason_of(_with(config, missed), latent) is None
    found = reason_of(_with(config, hit), latent)
    assert found is not None and found.startswith(f"{setting}=")


GRAPHS = {"cuda_graph_impl": "transformer_engine"}
OFFLOADING = {"fine_grained_activation_offloading": True}


@pytest.mark.parametrize(("settings", "hit"), [
    (GRAPHS, True),
    (GRAPHS | {"cuda_graph_modules": [CudaGraphModule.attn, CudaGraphModule.mlp]}, True),
    ({"cuda_graph_impl": "local", "cuda_graph_modules": [CudaGraphModule.mlp]}, False),
    ({"cuda_graph_impl": "full_iteration"}, True),
    (OFFLOADING | {"offload_modules": ["qkv_linear"]}, True),
    (OFFLOADING | {"offload_modules": ["core_attn"]}, True),
    (OFFLOADING | {"offload_modules": ["attn_norm", "expert_fc1"]}, False),
])  # fmt: skip
def test_what_a_graph_or_offloading_holds_decides(
    supported: TransformerConfig, settings: dict[str, Any], hit: bool
) -> None:
    assert (reason_of(_with(supported, settings)) is not None) == hit


def test_a_module_keeps_the_exchange_that_was_asked_for_when_it_was_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "nvlink_reason", lambda *_: None)
    groups = SimpleNamespace(cp=mock.Mock(size=lambda: 2), tp=mock.Mock(size=lambda: 1))
    config = SimpleNamespace(num_attention_heads=4, num_query_groups=4, kv_channels=8)
    for asked, nvlink in (("collective", False), ("auto", True)):
        monkeypatch.setattr("megatron_fluid.config._current", FluidConfig(cp_backend=asked))
        exchanges = core.Exchanges(config, groups, own_path=True)
        other = "auto" if asked == "collective" else "collective"
        monkeypatch.setattr("megatron_fluid.config._current", FluidConfig(cp_backend=other))
        assert exchanges.nvlink is nvlink
        assert nvlink or exchanges.describe() == "one all-to-all each way: cp_backend=collective"


@pytest.mark.parametrize(("decisions", "model", "slower"), [
    ("self_attention", {"sequence_parallel": True}, True),
    ("self_attention", {"sequence_parallel": False}, False),
    ("latent", {"num_attention_heads": 64}, False),
    ("latent", {"num_attention_heads": 2}, True),
])  # fmt: skip
def test_on_gpus_auto_overlaps_where_that_is_not_slower(
    monkeypatch: pytest.MonkeyPatch, decisions: str, model: dict[str, Any], slower: bool
) -> None:
    found: Any = {"self_attention": self_attention, "latent": latent}[decisions].DECISIONS
    monkeypatch.setattr(type(found), "limits", ())
    monkeypatch.setattr(type(found), "module_reason", lambda self, layer: None)
    monkeypatch.setattr(decision, "exchanges_of", lambda core: core)
    two = SimpleNamespace(size=lambda: 2)
    latent_sizes = {"q_lora_rank": 96, "kv_lora_rank": 32, "qk_head_dim": 8}
    latent_sizes |= {"qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    layer = SimpleNamespace(
        pg_collection=SimpleNamespace(tp=two, cp=two),
        config=SimpleNamespace(**latent_sizes, **model),
        core_attention=SimpleNamespace(nvlink_unsupported_reason=None),
    )

    def reason(**settings: Any) -> str | None:
        return found.reason(FluidConfig(**settings), layer)

    assert reason() is None, "CPUs overlap whatever they can"
    monkeypatch.setattr(decision, "cpu_mode_active", lambda: False)
    assert (reason() is not None) == slower
    assert reason(cp_backend="nvlink") is None
    if decisions == "self_attention":
        assert reason(tp_overlap="off") is None
