"""What rules out this package's exchange or experts of an MoE layer, setting by setting."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.activations import ACTIVATIONS
from megatron_fluid.moe.choose import Choice
from megatron_fluid.patches.moe import decision, limits
from megatron_fluid.patches.moe import layer as moe_layer
from megatron_fluid.patches.moe.decision import PartReasons, part_reasons
from megatron_fluid.patches.moe.expert_modules import activation_name, resolve
from megatron_fluid.patches.moe.limits import (
    EXCHANGE_LIMITS,
    EXPERT_LIMITS,
    FUSION_LIMITS,
    LAYER_LIMITS,
)
from megatron_fluid.patches.overlap_decision import Decision, Finding

LAYER: dict[str, tuple[Any, Any]] = {
    "use_kitchen": (True, False),
    "expert_gtp_weight_remat_size": (2, 1),
    "cuda_graph_impl": ("local", "none"),
    "transformer_impl": ("inference_optimized", "transformer_engine"),
}
EXCHANGE: dict[str, tuple[Any, Any]] = {
    "moe_token_dispatcher_type": ("flex", "alltoall"),
    "expert_tensor_parallel_size": (2, None),
    "moe_expert_rank_capacity_factor": (1.5, None),
    "moe_pad_expert_input_to_capacity": (True, False),
}
EXPERTS: dict[str, tuple[Any, Any]] = {
    "fp8": ("hybrid", "e4m3"),
    "fp8_recipe": ("tensorwise", "blockwise"),
    "fp4": ("e2m1", None),
    "quant_recipe": (object(), None),
    "activation_func": (activations.fast_gelu, F.silu),
    "activation_func_clamp_value": (7.0, None),
    "offload_modules": (["fused_group_mlp"], ["expert_fc1", "moe_act"]),
    **dict.fromkeys(
        "fp8_param enable_autocast bias_activation_fusion use_te_activation_func "
        "use_transformer_engine_op_fuser activation_func_fp8_input_store delay_wgrad_compute "
        "overlap_dispatch_backward_with_experts_wgrad moe_paged_stash moe_ncclep_zero_copy "
        "cpu_offloading".split(),
        (True, False),
    ),
}
FUSION: dict[str, tuple[Any, Any]] = {
    "overlap_moe_expert_parallel_comm": (True, False),
    "moe_enable_routing_replay": (True, False),
    "moe_latent_size": (64, None),
}
SETTINGS = LAYER | EXCHANGE | EXPERTS | FUSION
# What else is set where a limit is looked at under a condition alone.
BESIDE: dict[str, dict[str, Any]] = {
    "cuda_graph_impl": {"expert_model_parallel_size": 2},
    "fp8": {"fp8_recipe": "blockwise"},
    "fp8_recipe": {"fp8": "e4m3"},
    "fp8_param": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "offload_modules": {"fine_grained_activation_offloading": True},
    "moe_enable_routing_replay": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "bias_activation_fusion": {"activation_func": F.gelu},
    "activation_func_clamp_value": {"bias_activation_fusion": True},
    "use_transformer_engine_op_fuser": {"glu_linear_offset": 0.5},
    "moe_pad_expert_input_to_capacity": {"moe_apply_probs_on_input": True, "add_bias_linear": True},
}


def reasons(
    config: Any, fluid: FluidConfig | None = None, backend: str | None = None
) -> PartReasons:
    return part_reasons(config, fluid or FluidConfig(), backend=backend)


def changed(config: Any, **settings: Any) -> Any:
    """A copy with other settings, without Megatron's checks: some need other software."""
    other = copy.copy(config)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


@pytest.fixture(scope="module")
def supported() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=24,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
    )


def test_every_limit_is_tried_here() -> None:
    tables = zip(
        (LAYER_LIMITS, EXCHANGE_LIMITS, FUSION_LIMITS, EXPERT_LIMITS),
        (LAYER, {"cuda_graph_impl": None} | EXCHANGE, FUSION, EXPERTS),
        strict=True,
    )
    for limits_, tried in tables:
        assert sorted(limit.setting for limit in limits_ if not limit.over) == sorted(tried)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_limit_names_its_setting_and_no_other(
    supported: TransformerConfig, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "fp8_reason", lambda *_: None)
    hit, miss = SETTINGS[setting]
    config = changed(supported, **BESIDE.get(setting, {}), **{setting: miss})
    assert reasons(config).fused is None
    if setting == "delay_wgrad_compute":
        config.moe_latent_size = 8
    setattr(config, setting, hit)
    reason = reasons(config).fused
    assert reason is not None and reason.startswith(f"{setting}=")
    exchange, experts = setting in LAYER | EXCHANGE, setting in LAYER | EXPERTS
    assert reasons(config).exchange == (reason if exchange else None)
    assert reasons(config).experts == (reason if experts else None)
    if setting != "delay_wgrad_compute":
        assert reasons(config).fusion == (reason if setting in FUSION else None)


@pytest.mark.parametrize(("function", "gated", "name"), [
    (F.silu, True, "swiglu"),
    (F.gelu, True, "geglu"),
    (activations.quick_gelu, True, "quick_geglu"),
    (F.silu, False, "silu"),
    (F.gelu, False, "gelu"),
    (F.relu, False, "relu"),
    (activations.squared_relu, False, "relu2"),
    (activations.quick_gelu, False, "quick_gelu"),
])  # fmt: skip
def test_activations_are_megatrons(
    supported: TransformerConfig, function: Callable[..., Any], gated: bool, name: str
) -> None:
    config = changed(supported, activation_func=function, gated_linear_unit=gated)
    assert activation_name(config) == name and resolve(config) is ACTIVATIONS[name]
    h = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = h.chunk(2, dim=-1)
    expected = function(gate) * up if gated else function(h)
    torch.testing.assert_close(ACTIVATIONS[name].forward(h), expected)


@pytest.mark.parametrize("module", ["expert_fc1", "moe_act"])
def test_offloading_is_ours_but_of_what_is_fp8_recomputed_or_captured_as_a_whole(
    supported: TransformerConfig, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(
        supported, fine_grained_activation_offloading=True, offload_modules=[module],
        recompute_granularity="selective", recompute_modules=["moe_act"],
    )  # fmt: skip
    assert reasons(config).fused is None
    monkeypatch.setattr(decision, "fp8_reason", lambda *_: None)
    for settings in (
        {"recompute_granularity": "full"},
        {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
        {"cuda_graph_impl": "full_iteration"},
    ):
        found = reasons(changed(config, **settings))
        assert str(found.experts).startswith("offload_modules="), settings
        assert (found.exchange is None) is ("cuda_graph_impl" not in settings)


@pytest.mark.parametrize(("names", "fp8", "words"), [
    (["attn"], "hybrid", None),
    (["attn", "moe_router"], None, None),
    (["attn", "moe_router"], "hybrid", "holds moe_router"),
])  # fmt: skip
def test_a_graph_of_the_router_leaves_megatrons_experts_megatrons_exchange(
    supported: TransformerConfig, names: list[str], fp8: str | None, words: str | None
) -> None:
    modules = [SimpleNamespace(name=name) for name in names]
    graphed = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules}
    reason = reasons(changed(supported, **graphed, fp8=fp8)).exchange
    assert reason is words is None or str(words) in str(reason)


def graphed(supported: TransformerConfig, ranks: int, **settings: Any) -> Any:
    """A layer of `ranks` expert-parallel ranks in a graph of the whole iteration."""
    whole = {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
    return changed(supported, **{**whole, "expert_model_parallel_size": ranks, **settings})


_ON_HOST, _LOCAL = "read row counts on the host", "moe_backend=local"
_EXPERTS, _GRAPHS = "but not the experts", ("transformer_engine", "local")


@pytest.mark.parametrize(("impl", "modules", "ranks", "backend", "kept"), [
    # Graphs that leave the experts out.
    ("none", "", 2, "rounds", None),
    ("transformer_engine", "attn", 2, "auto", None),
    ("transformer_engine", "attn moe_router moe_preprocess", 2, "auto", None),
    ("local", "mlp", 2, "auto", None),
    # Phases that only Megatron's forward runs.
    ("local", "attn moe_router", 1, "local", _EXPERTS),
    # Whole layers: over the local transport, where that is asked for.
    *((impl, modules, 2, "auto", _EXPERTS) for impl in _GRAPHS for modules in ("", "attn moe")),
    *((impl, "", 1, "local", None) for impl in _GRAPHS),
    *((impl, "attn moe", 1, "local", None) for impl in _GRAPHS),
    *((impl, "", 1, other, _LOCAL) for impl in _GRAPHS for other in ("auto", "nvlink")),
    ("local", "attn", 2, "auto", _EXPERTS),
    ("local", "attn", 1, "local", None),
    # Whole iterations: over symmetric memory, and on one rank over the local transport.
    *(("full_iteration", "", ranks, "auto", None) for ranks in (1, 2)),
    *(("full_iteration", "", ranks, "nvlink", None) for ranks in (1, 2)),
    *(("full_iteration", "", ranks, "rounds", _ON_HOST) for ranks in (1, 2)),
    ("full_iteration", "", 2, "hierarchical", _ON_HOST),
])  # fmt: skip
def test_a_layer_is_ours_where_its_graph_can_hold_it_over_the_backend_that_is_asked_for(
    supported: TransformerConfig,
    impl: str,
    modules: str,
    ranks: int,
    backend: str,
    kept: str | None,
) -> None:
    held = [CudaGraphModule[name] for name in modules.split()]
    config = graphed(supported, ranks, cuda_graph_impl=impl, cuda_graph_modules=held)
    named = None if backend == "auto" else backend
    reason = reasons(config, FluidConfig(moe_backend=backend), named).exchange
    assert (reason is None) if kept is None else (kept in str(reason))
    assert limits.bounds_rows(config) is (impl == "full_iteration")


@pytest.mark.parametrize("settings", [
    {"add_bias_linear": True}, {"variable_seq_lengths": True}, {"pipeline_model_parallel_size": 2},
    {"fp8": "hybrid", "fp8_recipe": "delayed"}, {},
], ids=str)  # fmt: skip
def test_graphs_of_what_cannot_be_run_again_hold_no_layers_of_several_ranks(
    supported: TransformerConfig, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:  # the patch that runs iterations again is left out
        monkeypatch.setattr(patches, "off_reason", lambda name: f"{name} was turned off")
    config = graphed(supported, 2, **settings)
    assert not limits.bounds_rows(config)
    found = reasons(config)
    assert all(str(part).startswith("cuda_graph_impl=") for part in (found.exchange, found.experts))


@pytest.mark.parametrize("impl", ["full_iteration", "none"])
@pytest.mark.parametrize("backend", ["nvlink", "hierarchical", "rounds"])
def test_where_auto_ends_at_another_backend_a_graphed_layer_is_megatrons_by_name(
    supported: TransformerConfig, backend: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions, layer = moe_layer.DECISIONS, mock.NonCallableMock(spec=["config", "ep_group"])
    layer.config = graphed(supported, 2, cuda_graph_impl=impl)
    layer.ep_group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(decisions, "_make_path", lambda layer, config, taken, *_: taken)
    monkeypatch.setattr(decision.choose, "choose_transport", lambda *_: Choice(backend, None))
    monkeypatch.setitem(decisions._decisions, layer, Decision(FluidConfig()))
    parts_over = {backend: reasons(layer.config, backend=backend)}
    findings = [Finding(None, decision._Found(parts_over, False))] * 2
    found = decisions.decide(FluidConfig(), layer, findings)
    if impl == "none" or backend == "nvlink":
        assert found == backend
    else:
        reason = f"cuda_graph_impl='{impl}': backends rounds and hierarchical read row counts"
        assert str(found).startswith(reason)


def test_experts_of_ours_alone_are_not_captured_with_bounded_room(
    supported: TransformerConfig,
) -> None:
    phase_by_phase = graphed(supported, 2, moe_latent_size=8)
    assert "row counts are read on the host" in str(reasons(phase_by_phase).exchange)


@pytest.mark.parametrize(("function", "gated", "clamp", "offset", "ours"), [
    (F.silu, True, None, 0.0, True),
    (F.silu, True, 7.0, 0.0, False),
    (activations.quick_gelu, True, 7.0, 1.0, True),
    (activations.quick_gelu, True, None, 1.0, False),
    (activations.quick_gelu, True, 7.0, 0.0, False),
    (activations.squared_relu, False, None, 0.0, True),
])  # fmt: skip
def test_the_fused_operation_is_ours_where_it_has_the_bounds_that_are_set(
    supported: TransformerConfig,
    function: Callable[..., Any],
    gated: bool,
    clamp: float | None,
    offset: float,
    ours: bool,
) -> None:
    config = changed(
        supported, use_transformer_engine_op_fuser=True, activation_func=function,
        gated_linear_unit=gated, activation_func_clamp_value=clamp, glu_linear_offset=offset,
    )  # fmt: skip
    reason = reasons(config).experts
    assert (reason is None) is ours
    assert ours or str(reason).startswith("use_transformer_engine_op_fuser=True")


def test_bounded_room_needs_kernels_that_count_rows_on_the_device(
    supported: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_fluid.kernels.grouped_gemm import launch as grouped_gemm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(limits, "cpu_mode_active", lambda: False)
    monkeypatch.setattr(grouped_gemm, "sends_rows", lambda device, dtype: dtype is torch.bfloat16)
    config = graphed(supported, 2, params_dtype=torch.bfloat16)
    assert limits.bounds_rows(config)
    assert reasons(config).fused is None
    config.params_dtype = torch.float32
    reason = limits.bounded_unsupported_reason(config)
    assert reason == "the host counts the rows of experts in torch.float32 on this GPU"
    assert "cuda_graph_impl='full_iteration'" in str(reasons(config).fused)
