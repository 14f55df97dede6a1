"""What the overlapped MoE layer refuses, what it reads from Megatron's experts, and when it runs.
One gloo rank at most."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.activations import ACTIVATIONS
from megatron_fluid.moe.expert_weights import ExpertWeights as StackedWeights
from megatron_fluid.patches.moe import decision, limits
from megatron_fluid.patches.moe.expert_parameters import (
    ExpertParameters,
    activation_name,
    resolve,
    share_storage,
)
from megatron_fluid.patches.moe.limits import (
    EXCHANGE_LIMITS,
    EXPERT_LIMITS,
    exchange_unsupported_reason,
    experts_unsupported_reason,
    unsupported_reason,
)

# For every limit a value that hits it, and one that does not.
EXCHANGE: dict[str, tuple[Any, Any]] = {
    "moe_token_dispatcher_type": ("flex", "alltoall"),
    "expert_tensor_parallel_size": (2, None),
    "use_kitchen": (True, False),
    "expert_gtp_weight_remat_size": (2, 1),
    "cuda_graph_impl": ("local", "none"),
    "moe_paged_stash": (True, False),
    "transformer_impl": ("inference_optimized", "transformer_engine"),
    "batch_invariant_mode": (True, False),
    "enable_autocast": (True, False),
}
EXPERTS: dict[str, tuple[Any, Any]] = {
    "fp8": ("hybrid", "e4m3"),
    "fp8_recipe": ("tensorwise", "blockwise"),
    "fp8_param": (True, False),
    "fp4": ("e2m1", None),
    "quant_recipe": (object(), None),
    "activation_func": (activations.fast_gelu, F.silu),
    "bias_activation_fusion": (True, False),
    "use_te_activation_func": (True, False),
    "use_transformer_engine_op_fuser": (True, False),
    "activation_func_clamp_value": (7.0, None),
    "activation_func_fp8_input_store": (True, False),
    "moe_single_grouped_weight": (True, False),
    "moe_single_grouped_bias": (True, False),
    "moe_enable_routing_replay": (True, False),
    "overlap_moe_expert_parallel_comm": (True, False),
    "delay_wgrad_compute": (True, False),
    "overlap_dispatch_backward_with_experts_wgrad": (True, False),
    "moe_latent_size": (64, None),
    "cpu_offloading": (True, False),
    "offload_modules": (["moe_act"], ["core_attn"]),
}
SETTINGS = EXCHANGE | EXPERTS


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
    assert [limit.setting for limit in EXCHANGE_LIMITS] == list(EXCHANGE)
    assert [limit.setting for limit in EXPERT_LIMITS] == list(EXPERTS)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_limit_names_its_setting_and_no_other(
    supported: TransformerConfig, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit, miss = SETTINGS[setting]
    config = copy.copy(supported)  # set after its own checks, of which some need other software
    if setting.startswith("fp8"):
        config.fp8, config.fp8_recipe = "e4m3", "blockwise"
        monkeypatch.setattr(limits, "fp8_reason", lambda config: None)
    if setting == "offload_modules":
        config.fine_grained_activation_offloading = True
    if setting == "moe_enable_routing_replay":
        config.recompute_granularity, config.recompute_modules = "selective", ["moe"]
    if setting == "bias_activation_fusion":
        config.activation_func = F.gelu
    if setting == "activation_func_clamp_value":
        config.bias_activation_fusion = True
    setattr(config, setting, miss)
    assert unsupported_reason(config) is None
    setattr(config, setting, hit)
    reason = unsupported_reason(config)
    assert reason is not None and reason.startswith(f"{setting}=")
    parts = exchange_unsupported_reason(config), experts_unsupported_reason(config)
    assert parts == ((reason, None) if setting in EXCHANGE else (None, reason))


def test_a_graph_of_the_router_leaves_megatrons_experts_megatrons_exchange(
    supported: TransformerConfig,
) -> None:
    config = copy.copy(supported)
    config.cuda_graph_impl = "transformer_engine"
    for names, words in ((("attn",), None), (("attn", "moe_router"), "holds moe_router")):
        config.cuda_graph_modules = [SimpleNamespace(name=name) for name in names]
        config.fp8 = None
        assert decision._unsupported(FluidConfig(), config) is None
        config.fp8 = "hybrid"
        reason = decision._unsupported(FluidConfig(), config)
        assert reason is words is None or words in str(reason)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_expert_capacity_factor", 1.0),
        ("moe_pad_expert_input_to_capacity", True),
        ("add_bias_linear", True),
        ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0),
        ("moe_mlp_glu_interleave_size", 32),
        ("recompute_granularity", "full"),
        ("moe_shared_expert_overlap", True),
        ("moe_router_num_groups", 2),
        ("moe_router_enable_expert_bias", True),
        ("moe_apply_probs_on_input", True),
        ("gradient_accumulation_fusion", True),
        ("moe_permute_fusion", True),
        ("moe_enable_routing_replay", True),
        ("deterministic_mode", True),
    ],
)
def test_what_is_honoured_is_no_limit(
    supported: TransformerConfig, setting: str, value: Any
) -> None:
    config = copy.copy(supported)
    assert hasattr(config, setting)
    setattr(config, setting, value)
    assert unsupported_reason(config) is None


@pytest.mark.parametrize(
    ("function", "gated", "name"),
    [
        (F.silu, True, "swiglu"),
        (F.gelu, True, "geglu"),
        (activations.quick_gelu, True, "quick_geglu"),
        (F.silu, False, "silu"),
        (F.gelu, False, "gelu"),
        (F.relu, False, "relu"),
        (activations.squared_relu, False, "relu2"),
        (activations.quick_gelu, False, "quick_gelu"),
    ],
)
def test_activations_are_megatrons(
    supported: TransformerConfig, function: Callable[..., Any], gated: bool, name: str
) -> None:
    config = copy.copy(supported)
    config.activation_func, config.gated_linear_unit = function, gated
    assert activation_name(config) == name and name in ACTIVATIONS
    ours = resolve(config)
    assert ours.gated is gated
    h = torch.randn(
        5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    gate, up = h.chunk(2, dim=-1)
    expected = function(gate) * up if gated else function(h)
    torch.testing.assert_close(ours.forward(h.detach()), expected.detach(), rtol=1e-12, atol=1e-12)
    dv = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    (dh,) = torch.autograd.grad(expected, h, dv)
    torch.testing.assert_close(ours.backward(h.detach(), dv), dh, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [F.silu, F.gelu, activations.quick_gelu])
@pytest.mark.parametrize("grouped", [False, True])
def test_clamp_offset_and_interleaved_gates_are_megatrons(
    supported: TransformerConfig, function: Callable[..., Any], grouped: bool
) -> None:
    config = copy.copy(supported)
    config.activation_func, config.activation_func_clamp_value = function, 0.7
    config.glu_linear_offset, config.moe_mlp_glu_interleave_size = 1.0, 4
    ours = resolve(config, grouped)
    assert ours.built_in and not ours.plain
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(5, 24, dtype=torch.float64, generator=generator).requires_grad_()
    halves = TEGroupedMLP._remove_glu_interleaving(h, 4) if grouped else h  # SequentialMLP's: plain
    gate, up = halves.chunk(2, dim=-1)
    expected = function(gate.clamp(max=0.7)) * (up.clamp(-0.7, 0.7) + 1.0)
    torch.testing.assert_close(ours.forward(h.detach()), expected.detach(), rtol=1e-12, atol=1e-12)
    dv = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (dh,) = torch.autograd.grad(expected, h, dv)
    torch.testing.assert_close(ours.backward(h.detach(), dv), dh, rtol=1e-10, atol=1e-12)


class _Grouped(torch.nn.Module):
    """Parameters laid out as TEGroupedMLP's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_local_experts = 3
        for name, shape in (("linear_fc1", (8, 4)), ("linear_fc2", (4, 4))):
            linear = torch.nn.Module()
            for i in reversed(range(3)):
                linear.register_parameter(
                    f"weight{i}", torch.nn.Parameter(torch.full(shape, float(i)))
                )
            self.add_module(name, linear)


def test_grouped_weights_are_found_by_number_and_read_anew() -> None:
    experts = _Grouped()
    weights = ExpertParameters(experts)
    w1, w2 = weights.current()
    assert [w[0, 0].item() for w in w1] == [0.0, 1.0, 2.0] == [w[0, 0].item() for w in w2]
    assert [tuple(w.shape) for w in (w1[0], w2[0])] == [(8, 4), (4, 4)]
    experts.linear_fc1.weight1.data = torch.full((8, 4), 9.0)  # as the distributed optimizer does
    experts.linear_fc2.weight2 = torch.nn.Parameter(torch.full((4, 4), 7.0))  # as some loaders do
    w1, w2 = weights.current()
    assert w1[1] is experts.linear_fc1.weight1 and w1[1][0, 0].item() == 9.0
    assert w2[2] is experts.linear_fc2.weight2


def _in_one_buffer(experts: _Grouped, order: list[int], gap: int = 0) -> None:
    """Lay the parameters out in one storage in that order of experts, all of fc1 before all of
    fc2."""
    for linear in (experts.linear_fc1, experts.linear_fc2):
        size = linear.weight0.numel()
        buffer = torch.empty(3 * (size + gap))
        for place, number in enumerate(order):
            parameter = getattr(linear, f"weight{number}")
            view = buffer[place * (size + gap) :][:size].view(parameter.shape)
            parameter.data = view.copy_(parameter.data)


@pytest.mark.parametrize("gap", [0, 16])
def test_a_reversed_buffer_is_read_in_reverse_as_one_stack(gap: int) -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [2, 1, 0], gap)  # as Megatron's parameter buffers have them
    weights = ExpertParameters(experts)
    assert weights.arrange() and weights.order == [2, 1, 0]
    for projection in weights.current():
        assert [w[0, 0].item() for w in projection] == [2.0, 1.0, 0.0]
        stack = StackedWeights(projection, 3).stack
        assert stack is not None and stack.data_ptr() == projection[0].data_ptr()


def test_an_ascending_buffer_is_left_as_it_is() -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [0, 1, 2])
    pointers = [p.data_ptr() for p in experts.parameters()]
    weights = ExpertParameters(experts)
    assert not weights.arrange() and weights.order == [0, 1, 2]
    assert [p.data_ptr() for p in experts.parameters()] == pointers
    assert StackedWeights(weights.current()[0], 3).stack is not None


def test_separate_parameters_move_into_one_storage_and_keep_their_identity() -> None:
    experts = _Grouped()
    before = {name: (id(p), p.detach().clone()) for name, p in experts.named_parameters()}
    for projection in ExpertParameters(experts).current():
        assert (
            StackedWeights(projection, 3).stack is None
            or len({p.data_ptr() for p in projection}) == 3
        )
        share_storage(projection)
        stack = StackedWeights(projection, 3).stack
        assert stack is not None and len({p.untyped_storage().data_ptr() for p in projection}) == 1
    for name, parameter in experts.named_parameters():
        assert (
            id(parameter) == before[name][0]
            and torch.equal(parameter, before[name][1])
            and parameter.is_leaf
        )


def test_parameters_of_a_buffer_are_not_moved() -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [1, 2, 0])
    pointers = [p.data_ptr() for p in experts.parameters()]
    for projection in ExpertParameters(experts).current():
        share_storage(projection)
    assert [p.data_ptr() for p in experts.parameters()] == pointers


def _refused(rank: int, world_size: int) -> dict[str, str | None]:
    """Reasons given for built layers that were changed in some way."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid.patches.layer_specs import FluidMoELayer
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    config = tiny_gpt.config_of()
    found: dict[str, str | None] = {}

    def reason(name: str, change: Callable[[Any], None]) -> None:
        layer = tiny_gpt.moe_layer(config)
        change(layer)
        found[name] = unsupported_reason(layer.config, layer)

    class Adapted(ColumnParallelLinear):
        pass

    class Custom(MoELayer):
        def dispatch(self, *args: Any) -> Any:
            return super().dispatch(*args)

    def adapt(layer: Any) -> None:
        layer.experts.local_experts[2].linear_fc1.__class__ = Adapted

    def custom(layer: Any) -> None:
        layer.__class__ = Custom

    def subclass(layer: Any) -> None:
        layer.__class__ = FluidMoELayer

    def frozen(layer: Any) -> None:
        layer.experts.local_experts[1].linear_fc2.weight.requires_grad_(False)

    def all_frozen(layer: Any) -> None:
        layer.experts.requires_grad_(False)

    def replaced(layer: Any) -> None:
        layer.experts.local_experts[0].forward = lambda *args: args

    def backward_hook(layer: Any) -> None:
        layer.experts.register_full_backward_hook(lambda *args: None)

    def instance_phase(layer: Any) -> None:
        layer.combine = lambda output: output

    def router_hook(layer: Any) -> None:
        layer.router.register_forward_hook(lambda *args: None)

    reason("nothing", lambda layer: None)
    for change in (
        adapt,
        custom,
        subclass,
        frozen,
        all_frozen,
        replaced,
        backward_hook,
        instance_phase,
        router_hook,
    ):
        reason(change.__name__, change)
    return found


def test_changed_modules_keep_megatrons_path() -> None:
    (found,) = run_ranks(_refused, 1)
    for fine in ("nothing", "subclass", "all_frozen", "router_hook"):
        assert found.pop(fine) is None, fine
    for name, words in {
        "adapt": "Adapted",
        "custom": "Custom.dispatch is overridden",
        "frozen": "frozen",
        "replaced": "local_experts.0.forward was replaced",
        "backward_hook": "hook is registered on experts",
        "instance_phase": "combine is overridden",
    }.items():
        assert words in (found.pop(name) or "nothing"), name
    assert not found


def _one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """`auto` takes the local path where one rank has all experts; others have it by name."""
    from megatron.core.inference.utils import InferenceMode

    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    hidden = torch.randn(5, 2, 32)
    found: dict[str, Any] = {}
    for backend in ("auto", "rounds", "megatron"):
        with tiny_gpt.plug_in(True, moe_backend=backend) as calls:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
            output = layer(hidden)[0]
            found[backend] = (moe_layer.backend_of(layer), len(calls), output.detach())
            if backend == "rounds":
                with InferenceMode.active(), torch.no_grad():
                    layer(hidden)
                found["inference"] = len(calls)
    return found


def test_one_rank_and_the_inference_engine() -> None:
    (found,) = run_ranks(_one_rank, 1)
    assert found["auto"][:2] == (("local", None), 1)
    assert found["megatron"][:2] == (("megatron", "moe_backend='megatron'"), 0)
    reference = found["megatron"][2]
    torch.testing.assert_close(found["auto"][2], reference, rtol=1e-5, atol=1e-6)
    assert found["rounds"][0] == ("rounds", None) and found["rounds"][1] == 1 == found["inference"]
    torch.testing.assert_close(found["rounds"][2], reference, rtol=1e-5, atol=1e-6)


def _auto(rank: int, world_size: int) -> dict[str, Any]:
    """What `auto` chooses for a supported layer on GPUs, by what their memory and their hosts
    allow."""
    from unittest import mock

    from megatron_fluid.comm import symmetric
    from megatron_fluid.config import FluidConfig
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    group: Any = SimpleNamespace(size=lambda: 2)
    found: dict[str, Any] = {}
    cases = {
        "peers reach each other": (None, None, [0, 0]),
        "an unsupported setting": ("moe_apply_probs_on_input", None, [0, 0]),
        "no peer access": (None, "no peer access", [0, 0]),
        "two domains": (None, "no peer access", [0, 1]),
    }
    with mock.patch.object(decision, "cpu_mode_active", return_value=False):
        for name, (setting, memory, domains) in cases.items():
            with (
                mock.patch.object(symmetric, "symmetric_unsupported_reason", return_value=memory),
                mock.patch.object(decision, "detect_domains", return_value=domains),
            ):
                auto = FluidConfig(moe_backend="auto", timeout_s=9.0)
                found[name] = decision.choose_backend(group, auto, setting)
    return found


def test_auto_takes_symmetric_memory_then_two_levels_between_domains_then_megatron() -> None:
    (found,) = run_ranks(_auto, 1)
    assert found["peers reach each other"] == ("nvlink", None)
    assert found["two domains"] == ("hierarchical", None)
    for name, words in (
        ("an unsupported setting", "moe_apply_probs_on_input"),
        ("no peer access", "no peer access"),
    ):
        backend, reason = found[name]
        assert backend is None and words in reason and "rounds do not pay" in reason


def test_what_a_validation_before_training_makes_serves_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_fluid.patches.moe import layer as moe_layer

    class Layer:
        config, ep_group = None, SimpleNamespace(size=lambda: 1)

    found = []

    def unsupported(*_: Any) -> str:
        found.append(torch.is_inference_mode_enabled())
        return "of this test"

    monkeypatch.setattr(decision, "_unsupported", unsupported)
    with torch.inference_mode():
        assert moe_layer.DECISIONS.settle(Layer()).reason == "of this test"  # type: ignore[arg-type]
    assert found == [False]


def _without_the_patch(rank: int, world_size: int) -> dict[str, Any]:
    """The forward's patch alone is left out: what is told, and what is refused, of Megatron's layer
    and of the spec's."""
    from megatron_fluid import get_fluid_custom_layers, patches
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches import overlap_decision
    from megatron_fluid.patches import startup_report as startup
    from megatron_fluid.patches.layer_specs import FluidMoELayer
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    found: dict[str, Any] = {}

    def refused(name: str, backend: str) -> None:
        with tiny_gpt.plug_in(True, moe_backend=backend), pytest.raises(ConfigError) as caught:
            tiny_gpt.moe_layer(tiny_gpt.config_of())
        found[name] = str(caught.value)

    refused("nvlink beside a CPU", "nvlink")
    patches.disable("moe-layer")
    refused("rounds", "rounds")
    refused("nvlink", "nvlink")
    overlap_decision._features.clear()
    with tiny_gpt.plug_in(True, moe_backend="auto"):
        found["auto"] = moe_layer.backend_of(tiny_gpt.moe_layer(tiny_gpt.config_of()))
    found["features"] = startup.features()
    with tiny_gpt.plug_in(True, moe_backend="rounds") as calls:
        config = tiny_gpt.config_of()
        model = tiny_gpt.gpt(config, get_fluid_custom_layers(config))
        layers = [module for module in model.modules() if isinstance(module, FluidMoELayer)]
        layers[0](torch.randn(5, 2, 32))
        found["spec"] = (moe_layer.backend_of(layers[0]), len(calls))
    return found


def test_without_the_forwards_patch_nothing_is_said_to_be_overlapped_but_a_specs_layer() -> None:
    (found,) = run_ranks(_without_the_patch, 1)
    reason = "the patch moe-layer is left out: turned off by the user"
    assert found["auto"][0] == "megatron"
    assert all(not on for feature, on, *_ in found["features"] if feature == "overlapped MoE layer")
    for backend in ("rounds", "nvlink"):
        assert (
            found[backend]
            == f"moe_backend: found '{backend}', allowed: auto or megatron, because {reason}"
        )
    assert found["spec"] == (("rounds", None), 1)


def _without_inits_patch(rank: int, world_size: int, left_out: list[str]) -> tuple[list[Any], int]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid import patches
    from megatron_fluid.patches import overlap_decision
    from megatron_fluid.patches import startup_report as startup
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    patches.disable(*left_out)
    with tiny_gpt.plug_in(
        True, moe_backend="auto" if "moe-layer" in left_out else "rounds"
    ) as calls:
        model = tiny_gpt.gpt(tiny_gpt.config_of())
        overlap_decision._features.clear()
        startup.setup_model_and_optimizer(lambda: ([model], None, None))()
        told = startup.features()
        next(module for module in model.modules() if isinstance(module, MoELayer))(
            torch.randn(5, 2, 32)
        )
        return told, len(calls)


def test_without_inits_patch_the_start_up_table_tells_of_the_layers_all_the_same() -> None:
    (found,) = run_ranks(_without_inits_patch, 1, ["moe-layer-init"])
    assert found == ([("overlapped MoE layer", True, "rounds, 1 expert-parallel rank", 2)], 1)
    (found,) = run_ranks(_without_inits_patch, 1, ["moe-layer-init", "moe-layer"])
    reason = "the patch moe-layer is left out: turned off by the user"
    assert found == ([("overlapped MoE layer", False, reason, 2)], 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU there is no NVLink path")
def test_where_the_nvlink_path_alone_cannot_be_had_rounds_are_named() -> None:
    (found,) = run_ranks(_without_the_patch, 1)
    expected = (
        "moe_backend: found 'nvlink', allowed: auto, rounds or megatron, because CUDA is not "
        "available"
    )
    assert found["nvlink beside a CPU"] == expected


@pytest.mark.parametrize(
    ("impl", "modules", "ranks", "served"),
    [
        ("transformer_engine", ["attn"], 2, True),
        ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], 2, True),
        ("transformer_engine", [], 1, False),
        ("local", ["attn"], 2, True),
        ("local", ["attn", "moe_router"], 1, False),
        ("full_iteration", [], 2, False),
        ("full_iteration", [], 1, True),
    ],
)
def test_graphs_that_leave_the_experts_out_keep_the_overlapped_path(
    impl: str, modules: list[str], ranks: int, served: bool
) -> None:
    from megatron.core.transformer.enums import CudaGraphModule

    from megatron_fluid.patches.moe.limits import LIMITS

    (limit,) = (limit for limit in LIMITS if limit.setting == "cuda_graph_impl")
    config: Any = SimpleNamespace(
        cuda_graph_impl=impl,
        cuda_graph_modules=[CudaGraphModule[name] for name in modules],
        expert_model_parallel_size=ranks,
    )
    assert limit.applies(config) is not served


@pytest.mark.parametrize("modules", [["moe_router"], ["moe_router", "moe_preprocess"]])
def test_a_graphed_router_gives_the_layer_its_routing_in_a_replay(modules: list[str]) -> None:
    (found,) = run_ranks(_graphed_router, 1, modules)
    assert found["calls"] == 1
    torch.testing.assert_close(*found["outputs"], rtol=1e-5, atol=1e-6)
    for ours, reference in zip(*found["gradients"], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def _graphed_router(rank: int, world_size: int, modules: list[str]) -> dict[str, Any]:
    """Capture and replay as Megatron's TransformerLayer does them, without the graph."""
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.enums import CudaGraphModule

    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    config = tiny_gpt.config_of(moe_shared_expert_intermediate_size=40)
    hidden = torch.randn(5, 2, 32)
    with tiny_gpt.plug_in(True, moe_backend="auto") as calls:
        layer = tiny_gpt.moe_layer(config)
        layer.train()
        inputs = [hidden.clone().requires_grad_() for _ in range(2)]
        reference = layer(inputs[0])[0]
        calls.clear()
        config.cuda_graph_impl = "transformer_engine"
        config.cuda_graph_modules = [CudaGraphModule[name] for name in modules]
        graphed = tiny_gpt.moe_layer(config)
        graphed.load_state_dict(layer.state_dict())
        graphed.train()
        cuda_graphs._set_capture_start()
        try:
            outputs = list(graphed(inputs[1]))
        finally:
            cuda_graphs._set_capture_end()
        shared = outputs.pop()
        tokens, probs, routing_map = outputs
        if "moe_preprocess" in modules:
            dispatcher = graphed.token_dispatcher
            assert dispatcher.valid_cudagraph_attrs == ["fluid_routing_map"]
            dispatcher.fluid_routing_map, routing_map = routing_map, None
        kept = {"hidden_states": tokens, "probs": probs, "routing_map": routing_map}
        graphed.cudagraph_tensor_store.set(**kept, shared_expert_output=shared)
        output = graphed(tokens)[0]
        graphed.cudagraph_tensor_store.clear()
        for result in (reference, output):
            result.square().sum().backward()
    return {
        "calls": len(calls),
        "outputs": (output.detach(), reference.detach()),
        "gradients": (
            [inputs[1].grad, *(p.grad for p in graphed.parameters())],
            [inputs[0].grad, *(p.grad for p in layer.parameters())],
        ),
    }
