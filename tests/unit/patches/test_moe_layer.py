"""Which path a patched MoE layer takes, when, and what it refuses. One gloo rank at most."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.layer_specs import FluidMoELayer
from megatron_fluid.patches.moe import layer as moe_layer
from megatron_fluid.patches.moe.decision import part_reasons
from tests.support import tiny_gpt
from tests.support.launch import on_ranks


def _hook(*args: Any) -> None:
    """As make_graphed_callables puts on what it captures."""


_hook.__module__ = "transformer_engine.pytorch.graph"


def _capture(layer: Any) -> None:
    for module in layer.modules():
        module.register_forward_hook(_hook)


# Changes of a built layer that leave it ours. Others: tests/distributed/test_changed_experts.py.
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "the spec's class": lambda layer: setattr(layer, "__class__", FluidMoELayer),
    "router hook": lambda layer: layer.router.register_forward_hook(lambda *_: None),
    "backward hook": lambda layer: layer.router.register_full_backward_hook(lambda *_: None),
    "before it": lambda layer: layer.router.register_full_backward_pre_hook(lambda *_: None),
    "capture": _capture,
}


@on_ranks(1)
def test_changes_that_compute_nothing_else_leave_a_layer_ours(rank: int, world: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    for name, change in HARMLESS.items():
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
        change(layer)
        assert part_reasons(layer.config, FluidConfig(), layer).fused is None, name
        assert moe_layer._can_be_compact(layer) == (name == "the spec's class"), (
            "a hook sees all experts"
        )


def _doubled(target: Any, name: str) -> Callable[..., Any]:
    """What a user puts in a method's place: Megatron's own with its first argument doubled."""
    own = getattr(target, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        first = 0 if getattr(own, "__self__", None) is target else 1
        return own(*args[:first], 2 * args[first], *args[first + 1 :], **kwargs)

    return method


def _activations(layer: Any) -> None:
    layer.experts.activation_func = torch.tanh


def _capacity_of_three(layer: Any) -> None:
    layer.config.moe_expert_capacity_factor, layer.router.topk = 2.0, 3


REPLACED: dict[str, tuple[Callable[[Any], tuple[Any, str] | None], str]] = {
    "MoELayer.combine": (lambda layer: (MoELayer, "combine"), "phase by phase: MoELayer.combine"),
    "the experts' phase": (
        lambda layer: (MoELayer, "routed_experts_compute"),
        "Megatron's experts: MoELayer.routed_experts_compute",
    ),
    "a dispatcher's class": (
        lambda layer: (type(layer.token_dispatcher), "token_combine"),
        "MoEAlltoAllTokenDispatcher.token_combine was replaced",
    ),
    "a dispatcher": (
        lambda layer: (layer.token_dispatcher, "dispatch_preprocess"),
        "MoEAlltoAllTokenDispatcher.dispatch_preprocess was replaced",
    ),
    "grouped experts' activation": (_activations, "activation_func of the experts was replaced"),
    "a router's topk": (_capacity_of_three, ""),
}


@pytest.mark.parametrize("name", REPLACED)
@on_ranks(1)
def test_what_somebody_replaced_before_the_first_forward_has_its_effect(
    rank: int, world: int, name: str
) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    settings = {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}
    found = []
    for on in (False, True):
        with contextlib.ExitStack() as stack:
            stack.enter_context(tiny_gpt.plug_in(on, moe_backend="auto"))
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings), grouped=True)
            if (target := REPLACED[name][0](layer)) is not None:
                stack.enter_context(mock.patch.object(*target, _doubled(*target)))
            x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(5))
            found.append(tiny_gpt.layer_step(layer, x))
            if on:
                assert REPLACED[name][1] in moe_layer.DECISIONS.describe(layer)
    for what, expected in found[0].items():
        torch.testing.assert_close(found[1][what], expected, rtol=1e-4, atol=1e-4, msg=what)


@on_ranks(1)
def test_a_route_of_somebody_elses_is_given_dense_maps(rank: int, world: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    own, seen = MoELayer.route, []

    def route(self: Any, *args: Any) -> Any:
        probs, routing_map = own(self, *args)
        seen.append((routing_map.dtype, tuple(routing_map.shape)))
        return probs, routing_map

    with tiny_gpt.plug_in(True, moe_backend="local"), mock.patch.object(MoELayer, "route", route):
        tiny_gpt.layer_step(tiny_gpt.moe_layer(tiny_gpt.config_of()), torch.randn(6, 2, 32))
    assert seen == [(torch.bool, (12, 4))]


@on_ranks(1)
def test_one_rank_and_the_inference_engine(rank: int, world: int) -> None:
    """`auto` takes the local path where one rank has all experts; others have it by name."""
    tiny_gpt.parallel(expert_model_parallel_size=1)
    hidden, reference = torch.randn(5, 2, 32), None
    for backend, taken in (
        ("megatron", ("megatron", "moe_backend='megatron'")),
        ("auto", ("local", None)),
        ("rounds", ("rounds", None)),
    ):
        with tiny_gpt.plug_in(True, moe_backend=backend) as calls:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
            output = layer(hidden)[0].detach()
            with InferenceMode.active(), torch.no_grad():
                layer(hidden)  # Megatron's inference engine has its own path
            assert moe_layer.backend_of(layer) == taken
            assert len(calls) == (backend != "megatron")
        reference = output if reference is None else reference
        torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-6)


@on_ranks(1)
def test_without_the_forwards_patch_nothing_is_said_to_be_overlapped(rank: int, world: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    patches.disable("moe-layer")
    reason = "because the patch moe-layer is left out: turned off by the user"
    for backend in ("rounds", "nvlink"):
        said = f"^moe_backend: found '{backend}', allowed: auto or meg.*, {reason}$"
        with tiny_gpt.plug_in(True, moe_backend=backend), pytest.raises(ConfigError, match=said):
            tiny_gpt.moe_layer(tiny_gpt.config_of())
    recorded._features.clear()
    with tiny_gpt.plug_in(True, moe_backend="auto"):
        assert moe_layer.backend_of(tiny_gpt.moe_layer(tiny_gpt.config_of()))[0] == "megatron"
    features = startup.features()
    assert all(not on for feature, on, *_ in features if feature == "overlapped MoE layer")


@pytest.mark.parametrize("modules", [["moe_router"], ["moe_router", "moe_preprocess"]])
@on_ranks(1)
def test_a_graphed_router_gives_the_layer_its_routing_in_a_replay(
    rank: int, world: int, modules: list[str]
) -> None:
    """Capture and replay as Megatron's TransformerLayer does them, without the graph."""
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
    assert len(calls) == 1
    torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-6)
    gradients = (
        [given.grad, *(p.grad for p in of.parameters())]
        for given, of in zip(inputs, (layer, graphed), strict=True)
    )
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_class_of_the_spec_builds_the_other_base_of_a_class_with_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MoELayer, "__init__", torch.nn.Module.__init__)
    monkeypatch.setattr(patches, "is_applied", lambda name: True)

    class Other(MoELayer):
        def __init__(self) -> None:
            super().__init__()
            self.built = True

    class Both(FluidMoELayer, Other):  # type: ignore[misc, valid-type]
        pass

    assert Both().built
