"""Which path a patched MoE layer takes, when, and what it refuses. One gloo rank at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")


from megatron_fluid.config import FluidConfig
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.moe.decision import part_reasons


def _changed_layers() -> dict[str, tuple[Callable[[Any], Any], str | None]]:
    """Changes of a built layer, and words of the reason for which it stays Megatron's. Others:
    tests/distributed/test_changed_experts.py."""
    from megatron_fluid.patches.layer_specs import FluidMoELayer

    def hook(*args: Any) -> None:  # as make_graphed_callables puts on what it captures
        return None

    hook.__module__ = "transformer_engine.pytorch.graph"

    def capture(layer: Any) -> None:
        for module in layer.modules():
            module.register_forward_hook(hook)

    def one_frozen(layer: Any) -> None:
        layer.experts.local_experts[1].linear_fc2.weight.requires_grad_(False)

    return {
        "nothing": (lambda layer: None, None),
        "the spec's class": (lambda layer: setattr(layer, "__class__", FluidMoELayer), None),
        "router hook": (lambda layer: layer.router.register_forward_hook(lambda *_: None), None),
        "capture": (capture, None),
        "one is frozen": (one_frozen, "frozen"),
        "backward hook": (
            lambda layer: layer.experts.register_full_backward_hook(lambda *_: None),
            "hook is registered on experts",
        ),
    }


def _refused(rank: int, world_size: int) -> dict[str, tuple[str | None, str | None]]:
    """The reason found, and words of the right one, for each change."""
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    found = {}
    for name, (change, words) in _changed_layers().items():
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
        change(layer)
        found[name] = part_reasons(layer.config, FluidConfig(), layer).fused, words
    return found


def test_changed_modules_keep_megatrons_path() -> None:
    (found,) = run_ranks(_refused, 1)
    for name, (reason, words) in found.items():
        assert reason is words is None or words in str(reason), (name, reason)


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


def _without_the_patch(rank: int, world_size: int) -> dict[str, Any]:
    """The forward's patch alone is left out: what is told, and what is refused, of Megatron's layer
    and of the spec's."""
    from megatron_fluid import get_fluid_custom_layers, patches
    from megatron_fluid.patches import features as recorded
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

    patches.disable("moe-layer")
    refused("rounds", "rounds")
    refused("nvlink", "nvlink")
    recorded._features.clear()
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
        assert found[backend].startswith(f"moe_backend: found '{backend}', allowed: auto or meg")
        assert found[backend].endswith(f", because {reason}")
    assert found["spec"] == (("rounds", None), 1)


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


def test_a_class_of_the_spec_builds_the_other_base_of_a_class_with_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid import patches
    from megatron_fluid.patches.layer_specs import FluidMoELayer

    monkeypatch.setattr(MoELayer, "__init__", torch.nn.Module.__init__)
    monkeypatch.setattr(patches, "is_applied", lambda name: True)

    class Other(MoELayer):
        def __init__(self) -> None:
            super().__init__()
            self.built = True

    class Both(FluidMoELayer, Other):  # type: ignore[misc, valid-type]
        pass

    assert Both().built
