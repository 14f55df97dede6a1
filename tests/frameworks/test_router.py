"""Routers whose methods others have patched: their results decide, also on the paths that ask
Megatron's router for compact choices. One gloo rank."""

import contextlib
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import router as router_module

from tests.frameworks import stand_ins
from tests.support import tiny_gpt
from tests.support.launch import run_ranks

TOKENS, EXPERTS, TOP_K = 10, 8, 3


def _patched(rank: int, world_size: int, who: str) -> dict[str, Any]:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    settings: dict[str, Any] = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K}
    if who == "expert bias":
        settings["moe_router_score_function"] = "sigmoid"
        settings["moe_router_enable_expert_bias"] = True
    shapes: list[torch.Size] = []
    generator = torch.Generator().manual_seed(5)
    replayed = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices

    def patch() -> Any:
        if who == "replay":
            return stand_ins.replay(replayed)
        if who in ("count", "expert bias"):
            return stand_ins.mend_count(shapes)
        stock = router_module.topk_routing_with_score_function

        def scaled(*args: Any, **kwargs: Any) -> Any:
            probs, chosen = stock(*args, **kwargs)
            return probs * torch.linspace(1.0, 2.0, EXPERTS), chosen

        router_module.topk_routing_with_score_function = scaled
        return lambda: setattr(router_module, "topk_routing_with_score_function", stock)

    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on, moe_backend="local") as calls, contextlib.ExitStack() as undo:
            undo.callback(patch())  # after ours, and before a layer is built
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))
            x = torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(3))
            found[f"{on}"], found["calls"] = tiny_gpt.layer_step(layer, x), len(calls)
            if who == "expert bias":
                found[f"{on}"]["counts"] = layer.router.local_tokens_per_expert
    return {**found, "shapes": set(shapes)}


@pytest.mark.parametrize("who", ["replay", "count", "expert bias", "function"])
def test_what_patched_methods_of_the_router_return_decides(who: str) -> None:
    (found,) = run_ranks(_patched, 1, who, env={"TRITON_INTERPRET": "1"})
    assert found["calls"] == 1
    torch.testing.assert_close(found["True"], found["False"], rtol=1e-4, atol=1e-5)
    assert found["shapes"] <= {torch.Size([TOKENS, EXPERTS])}


def _more(rank: int, world_size: int) -> list[str]:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    settings: dict[str, Any] = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K}
    replayed, said = torch.arange(TOP_K + 1).repeat(TOKENS, 1), []
    for phases in ({}, {"activation_func": torch.tanh, "gated_linear_unit": False}):
        with tiny_gpt.plug_in(True, moe_backend="local"), contextlib.ExitStack() as undo:
            undo.callback(stand_ins.replay(replayed))
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings, **phases))
            with pytest.raises(RuntimeError) as caught:
                layer(torch.randn(TOKENS, 1, 32))
            said.append(str(caught.value))
    return said


def test_more_experts_of_a_token_than_there_is_room_for_are_refused() -> None:
    """Fused, and phase by phase."""
    (said,) = run_ranks(_more, 1, env={"TRITON_INTERPRET": "1"})
    assert all("chose more experts than moe_router_topk=3" in text for text in said)
    assert len(said) == 2
