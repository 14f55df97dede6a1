"""What rules out this package's exchange or experts of an MoE layer, setting by setting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core import activations
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.choose import Choice
from megatron_fluid.patches.moe import decision, limits
from megatron_fluid.patches.moe import layer as moe_layer
from megatron_fluid.patches.moe.decision import PartReasons, part_reasons
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
    "offload_modules": {"fine_grained_activation_offloading": True},
    "moe_enable_routing_replay": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "bias_activation_fusion": {"activation_func": F.gelu},
    "activation_func_clamp_value": {"bias_activation_fusion": True},
    "use_transformer_engine_op_fuser": {"glu_linear_offset": 0.5},
}


def reasons(
    config: Any, fluid: FluidConfig | None = None, backend: str | None = None
) -> PartReasons:
    return part_reasons(config, fluid or FluidConfig(), backend=backend)


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
    hit, miss = SETTINGS[setting]
    config = copy.copy(supported)  # set after its own checks, of which some need other software
    if setting.startswith("fp8"):
        config.fp8, config.fp8_recipe = "e4m3", "blockwise"
        monkeypatch.setattr(decision, "fp8_reason", lambda *_: None)
    for name, value in {**BESIDE.get(setting, {}), setting: miss}.items():
        setattr(config, name, value)
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


@pytest.mark.parametrize("module", ["expert_fc1", "moe_act"])
def test_offloading_is_ours_but_of_what_is_fp8_recomputed_or_captured_as_a_whole(
    supported: TransformerConfig, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.copy(supported)
    config.fine_grained_activation_offloading, config.offload_modules = True, [module]
    config.recompute_granularity, config.recompute_modules = "selective", ["moe_act"]
    assert reasons(config).fused is None
    monkeypatch.setattr(decision, "fp8_reason", lambda *_: None)
    for changed in (
        {"recompute_granularity": "full"},
        {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
        {"cuda_graph_impl": "full_iteration"},
    ):
        other = copy.copy(config)
        for name, value in changed.items():
            setattr(other, name, value)
        reason = reasons(other).experts
        assert reason is not None and reason.startswith("offload_modules="), changed
        assert (reasons(other).exchange is None) is ("cuda_graph_impl" not in changed)


def test_layers_whose_experts_offload_are_fused_on_one_rank_alone(
    supported: TransformerConfig,
) -> None:
    config = copy.copy(supported)
    for chosen, whole in ((["core_attn"], True), (["moe_act"], False), (["expert_fc1"], False)):
        config.fine_grained_activation_offloading, config.offload_modules = True, chosen
        assert reasons(config, backend="local").fusion is None
        for backend in ("rounds", "hierarchical"):
            reason = reasons(config, backend=backend).fusion
            assert (reason is None) is whole
            assert reason is None or reason.startswith("offload_modules=")


def test_flex_gives_way_to_a_backend_that_is_named(supported: TransformerConfig) -> None:
    config = copy.copy(supported)
    config.moe_token_dispatcher_type = "flex"
    for backend, kept in (("auto", True), ("experts", True), ("nvlink", False)):
        found = reasons(config, FluidConfig(moe_backend=backend))
        assert (found.exchange is not None) is kept
        assert found.experts is None


def test_a_graph_of_the_router_leaves_megatrons_experts_megatrons_exchange(
    supported: TransformerConfig,
) -> None:
    config = copy.copy(supported)
    config.cuda_graph_impl = "transformer_engine"
    for names, words in ((("attn",), None), (("attn", "moe_router"), "holds moe_router")):
        config.cuda_graph_modules = [SimpleNamespace(name=name) for name in names]
        config.fp8 = None
        assert reasons(config).exchange is None
        config.fp8 = "hybrid"
        reason = reasons(config).exchange
        assert reason is words is None or words in str(reason)


def asked(config: Any, fluid: FluidConfig) -> PartReasons:
    """Why parts of a layer stay Megatron's over the backend that was asked for."""
    return reasons(config, fluid, None if fluid.moe_backend == "auto" else fluid.moe_backend)


class Layer:
    """What is asked of an MoE layer of `ranks` expert-parallel ranks."""

    def __init__(self, supported: TransformerConfig, ranks: int, **settings: Any) -> None:
        self.config: Any = copy.copy(supported)
        settings = {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": [], **settings}
        for name, value in {"expert_model_parallel_size": ranks, **settings}.items():
            setattr(self.config, name, value)
        self.ep_group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)


_ON_HOST, _LOCAL = "read row counts on the host", "moe_backend=local"
_EXPERTS, _GRAPHS = "but not the experts", ("transformer_engine", "local")


@pytest.mark.parametrize(
    ("impl", "modules", "ranks", "backend", "kept"),
    [
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
    ],
)
def test_a_layer_is_ours_where_its_graph_can_hold_it_over_the_backend_that_is_asked_for(
    supported: TransformerConfig,
    impl: str,
    modules: str,
    ranks: int,
    backend: str,
    kept: str | None,
) -> None:
    from megatron.core.transformer.enums import CudaGraphModule

    held = [CudaGraphModule[name] for name in modules.split()]
    layer: Any = Layer(supported, ranks, cuda_graph_impl=impl, cuda_graph_modules=held)
    reason = asked(layer.config, FluidConfig(moe_backend=backend)).exchange
    assert (reason is None) if kept is None else (kept in str(reason))
    assert limits.bounds_rows(layer.config) is (impl == "full_iteration")


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bias_linear": True},
        {"variable_seq_lengths": True},
        {"pipeline_model_parallel_size": 2},
        {"fp8": "hybrid", "fp8_recipe": "delayed"},
    ],
    ids=str,
)
def test_graphs_of_what_cannot_be_run_again_hold_no_layers_of_several_ranks(
    supported: TransformerConfig, settings: dict[str, Any]
) -> None:
    layer: Any = Layer(supported, 2, **settings)
    assert not limits.bounds_rows(layer.config)
    found = reasons(layer.config)
    assert all(str(part).startswith("cuda_graph_impl=") for part in (found.exchange, found.experts))


def test_without_the_patch_that_runs_iterations_again_a_graph_holds_no_layers_of_several_ranks(
    supported: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "off_reason", lambda name: f"{name} was turned off")
    layer: Any = Layer(supported, 2)
    assert not limits.bounds_rows(layer.config)


@pytest.mark.parametrize("backend", ["nvlink", "hierarchical", "rounds"])
def test_where_auto_ends_at_another_backend_a_graphed_layer_is_megatrons_by_name(
    supported: TransformerConfig, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def make_path(*arguments: Any) -> str:
        made[:] = arguments[2:]
        return "path"

    monkeypatch.setattr(moe_layer.DECISIONS, "_make_path", make_path)
    monkeypatch.setattr(decision, "choose_transport", lambda *_: Choice(backend, None))
    for impl in ("full_iteration", "none"):
        layer: Any = Layer(supported, 2, cuda_graph_impl=impl)
        monkeypatch.setitem(moe_layer.DECISIONS._decisions, layer, Decision(FluidConfig()))
        parts_over = {backend: reasons(layer.config, FluidConfig(), backend)}
        findings = [Finding(None, decision._Found(parts_over, False))] * 2
        found = moe_layer.DECISIONS.decide(FluidConfig(), layer, findings)
        if impl == "none" or backend == "nvlink":
            assert found == "path"
            assert made == [backend, PartReasons(), [False, False]]
        else:
            reason = f"cuda_graph_impl='{impl}': backends rounds and hierarchical read row counts"
            assert str(found).startswith(reason) and not made


def test_experts_of_ours_alone_are_not_captured_with_bounded_room(
    supported: TransformerConfig,
) -> None:
    layer: Any = Layer(supported, 2)
    layer.config.moe_latent_size = 8  # phase by phase
    assert "row counts are read on the host" in str(reasons(layer.config).exchange)


@pytest.mark.parametrize(
    ("function", "gated", "clamp", "offset", "ours"),
    [
        (F.silu, True, None, 0.0, True),
        (F.silu, True, 7.0, 0.0, False),
        (activations.quick_gelu, True, 7.0, 1.0, True),
        (activations.quick_gelu, True, None, 1.0, False),
        (activations.quick_gelu, True, 7.0, 0.0, False),
        (activations.squared_relu, False, None, 0.0, True),
    ],
)
def test_the_fused_operation_is_ours_where_it_has_the_bounds_that_are_set(
    supported: TransformerConfig,
    function: Callable[..., Any],
    gated: bool,
    clamp: float | None,
    offset: float,
    ours: bool,
) -> None:
    config = copy.copy(supported)
    config.use_transformer_engine_op_fuser = True
    config.activation_func, config.gated_linear_unit = function, gated
    config.activation_func_clamp_value, config.glu_linear_offset = clamp, offset
    reason = reasons(config).experts
    assert (reason is None) is ours
    assert ours or str(reason).startswith("use_transformer_engine_op_fuser=True")


def test_bounded_room_needs_kernels_that_count_rows_on_the_device(
    supported: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_fluid.kernels.grouped_gemm import launch as grouped_gemm

    layer: Any = Layer(supported, 2)
    served = [torch.bfloat16]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(limits, "cpu_mode_active", lambda: False)
    monkeypatch.setattr(grouped_gemm, "sends_rows", lambda device, dtype: dtype in served)
    layer.config.params_dtype = torch.bfloat16
    assert limits.bounds_rows(layer.config)
    assert reasons(layer.config).fused is None
    layer.config.params_dtype = torch.float32
    reason = limits.bounded_unsupported_reason(layer.config)
    assert reason == "the host counts the rows of experts in torch.float32 on this GPU"
    assert "cuda_graph_impl='full_iteration'" in str(reasons(layer.config).fused)


def test_parameters_of_another_dtype_are_refused_over_nvlink(
    supported: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = copy.copy(supported)
    for config.params_dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert decision.nvlink_unsupported_reason(config) is None
    config.params_dtype = torch.float64
    assert "parameters of torch.float64" in str(decision.nvlink_unsupported_reason(config))
