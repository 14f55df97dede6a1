"""Which path a patched MoE layer takes, when, and what it refuses. One gloo rank at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

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
    "capture": _capture,
}


def _reasons(rank: int, world_size: int) -> dict[str, str | None]:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    found = {}
    for name, change in HARMLESS.items():
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
        change(layer)
        found[name] = part_reasons(layer.config, FluidConfig(), layer).fused
    return found


def test_changes_that_compute_nothing_else_leave_a_layer_ours() -> None:
    (found,) = run_ranks(_reasons, 1)
    assert found == dict.fromkeys(HARMLESS)


def _one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """`auto` takes the local path where one rank has all experts; others have it by name."""
    tiny_gpt.parallel(expert_model_parallel_size=1)
    hidden = torch.randn(5, 2, 32)
    found: dict[str, Any] = {}
    for backend in ("auto", "rounds", "megatron"):
        with tiny_gpt.plug_in(True, moe_backend=backend) as calls:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
            output = layer(hidden)[0]
            with InferenceMode.active(), torch.no_grad():
                layer(hidden)  # Megatron's inference engine has its own path
            found[backend] = moe_layer.backend_of(layer), len(calls), output.detach()
    return found


def test_one_rank_and_the_inference_engine() -> None:
    (found,) = run_ranks(_one_rank, 1)
    assert found["auto"][:2] == (("local", None), 1)
    assert found["rounds"][:2] == (("rounds", None), 1)
    assert found["megatron"][:2] == (("megatron", "moe_backend='megatron'"), 0)
    for backend in ("auto", "rounds"):
        torch.testing.assert_close(found[backend][2], found["megatron"][2], rtol=1e-5, atol=1e-6)


def _without_the_patch(rank: int, world_size: int) -> dict[str, Any]:
    """The forward's patch alone is left out: what is told, and what is refused."""
    tiny_gpt.parallel(expert_model_parallel_size=1)
    found: dict[str, Any] = {}

    patches.disable("moe-layer")
    for backend in ("rounds", "nvlink"):
        with tiny_gpt.plug_in(True, moe_backend=backend), pytest.raises(ConfigError) as caught:
            tiny_gpt.moe_layer(tiny_gpt.config_of())
        found[backend] = str(caught.value)
    recorded._features.clear()
    with tiny_gpt.plug_in(True, moe_backend="auto"):
        found["auto"] = moe_layer.backend_of(tiny_gpt.moe_layer(tiny_gpt.config_of()))
    found["features"] = startup.features()
    return found


def test_without_the_forwards_patch_nothing_is_said_to_be_overlapped() -> None:
    (found,) = run_ranks(_without_the_patch, 1)
    reason = "the patch moe-layer is left out: turned off by the user"
    assert found["auto"][0] == "megatron"
    assert all(not on for feature, on, *_ in found["features"] if feature == "overlapped MoE layer")
    for backend in ("rounds", "nvlink"):
        assert found[backend].startswith(f"moe_backend: found '{backend}', allowed: auto or meg")
        assert found[backend].endswith(f", because {reason}")


@pytest.mark.parametrize("modules", [["moe_router"], ["moe_router", "moe_preprocess"]])
def test_a_graphed_router_gives_the_layer_its_routing_in_a_replay(modules: list[str]) -> None:
    (found,) = run_ranks(_graphed_router, 1, modules)
    assert found["calls"] == 1
    torch.testing.assert_close(*found["outputs"], rtol=1e-5, atol=1e-6)
    for ours, reference in zip(*found["gradients"], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def _graphed_router(rank: int, world_size: int, modules: list[str]) -> dict[str, Any]:
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
    return {
        "calls": len(calls),
        "outputs": (output.detach(), reference.detach()),
        "gradients": (
            [inputs[1].grad, *(p.grad for p in graphed.parameters())],
            [inputs[0].grad, *(p.grad for p in layer.parameters())],
        ),
    }


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
