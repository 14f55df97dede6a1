"""Process groups that a framework wraps, destroys and makes again: two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")


def _asleep_between_steps(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_fluid.comm import groups
    from megatron_fluid.errors import FluidError
    from megatron_fluid.patches.moe import layer as seam
    from tests.frameworks import stand_ins
    from tests.support import tiny_gpt

    stand_ins.wrap_groups()
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    group = parallel_state.get_expert_model_parallel_group()
    assert type(group) is stand_ins.WrappedGroup
    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on) as calls:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))
            steps = []
            for number in range(3):
                generator = torch.Generator().manual_seed(7 * number + rank)
                x = torch.randn(6, 2, 32, generator=generator)
                steps.append(tiny_gpt.layer_step(layer, x))
                stand_ins.sleep()
                if on and number == 0:
                    with pytest.raises(FluidError, match="WrappedGroup .*make its group again"):
                        layer(torch.randn(6, 2, 32))
                stand_ins.wake()
            found[f"{on}"], found["calls"] = steps, len(calls)
    found["backend"] = seam.backend_of(layer)
    found["groups"] = len(groups._resources)
    return found


# With the number of fused calls: a layer of this activation runs phase by phase.
PHASES = {"activation_func": torch.tanh, "gated_linear_unit": False}


@pytest.mark.parametrize(("settings", "fused"), [({}, 3), (PHASES, 0)])
def test_layers_follow_groups_that_are_destroyed_and_made_again(
    settings: dict[str, Any], fused: int
) -> None:
    for found in run_ranks(_asleep_between_steps, 2, settings, timeout_s=200):
        assert found["backend"] == ("rounds", None)
        assert found["calls"] == fused
        assert found["groups"] <= 2, "what destroyed groups kept is dropped"
        for ours, stock in zip(found["True"], found["False"], strict=True):
            for name, value in stock.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def _attention(rank: int, world_size: int) -> dict[str, Any]:
    from megatron.core.transformer.attention import SelfAttention

    from megatron_fluid.patches.attention.self_attention import DECISIONS
    from tests.frameworks import stand_ins
    from tests.support import tiny_gpt

    stand_ins.wrap_groups()
    tiny_gpt.parallel(context_parallel_size=world_size)
    settings = {"context_parallel_size": world_size, "cp_comm_type": "a2a"}
    model = tiny_gpt.gpt(tiny_gpt.config_of(**settings))
    tokens = torch.randint(0, 64, (1, 8), generator=torch.Generator().manual_seed(rank))
    positions, outputs, groups = torch.arange(8).unsqueeze(0), [], []
    attention = next(m for m in model.modules() if isinstance(m, SelfAttention))
    for _ in range(2):
        model.zero_grad()
        output = model(tokens, positions, None)
        output.square().mean().backward()
        outputs.append([output.detach(), *(p.grad.clone() for p in attention.parameters())])
        decision: Any = DECISIONS.get(attention)
        groups.append(decision.path.group)
        stand_ins.sleep()
        stand_ins.wake()
    return {"outputs": outputs, "same group": groups[0] is groups[1]}


def test_attention_follows_its_context_parallel_group() -> None:
    for found in run_ranks(_attention, 2, timeout_s=200):
        assert not found["same group"]
        for first, second in zip(*found["outputs"], strict=True):
            assert torch.equal(first, second)
