"""Layers that a framework subclasses, weights whose memory it gives back while they are not used,
and process groups that it destroys and makes again: two gloo ranks, against Megatron's own path."""

import contextlib
import functools
import io
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.attention import SelfAttention

from megatron_fluid.comm import groups
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches.attention.self_attention import DECISIONS
from megatron_fluid.patches.moe import layer as seam
from tests.frameworks import stand_ins
from tests.support import tiny_gpt
from tests.support.launch import run_ranks


def _own_forward(rank: int, world_size: int) -> dict[str, Any]:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    config = tiny_gpt.config_of()
    mlp = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)[0].submodules.mlp
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(rank))
    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on, moe_backend="auto") as calls:
            torch.manual_seed(1)
            layer = functools.partial(stand_ins.OwnForward, **mlp.keywords)(config=config)
            layer.set_layer_number(1)
            found[f"{on}"], found["calls"] = tiny_gpt.layer_step(layer, x), len(calls)
    found["reasons"] = seam.backend_of(layer), seam.experts_reason_of(layer)
    found["report"] = recorded.features()
    return found


def test_a_layer_with_a_forward_of_its_own_is_named_and_left_alone() -> None:
    reason = "OwnForward.forward is its own, and megatron_fluid leaves it alone"
    for found in run_ranks(_own_forward, 2):
        assert found["reasons"] == (("megatron", reason), reason)
        assert ("overlapped MoE layer", False, reason, 1) in found["report"]
        assert found["calls"] == 0
        torch.testing.assert_close(found["True"], found["False"], rtol=0, atol=0)


def _offloaded(rank: int, world_size: int) -> dict[str, Any]:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on) as calls:
            config = tiny_gpt.config_of()
            model = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(use_distributed_optimizer=True),
                tiny_gpt.moe_layer(config),
            )
            layer, steps = model.module, []
            for number in range(3):
                model.zero_grad_buffer()
                x = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(number + rank))
                y = layer(x.requires_grad_())[0]
                y.square().sum().backward()
                model.finish_grad_sync()
                grads = [parameter.main_grad.clone() for parameter in layer.parameters()]
                steps.append([y.detach(), x.grad, *grads])
                stand_ins.offload(model)
                if on and number == 1:
                    with pytest.raises(ConfigError, match="weights was given back"):
                        _look(layer)
                holes = [torch.empty(4096 * (number + 1)) for _ in range(4)]  # noqa: F841
                stand_ins.load(model)
                with torch.no_grad():  # other weights, as a step or another model brings them
                    for buffer in (*model.buffers, *model.expert_parallel_buffers):
                        buffer.param_data.mul_(1.01)
            found[f"{on}"], found["calls"] = steps, len(calls)
    return found


def _look(layer: Any) -> None:
    """What a forward does first with the experts, without its collectives."""

    seam.path_of(layer).look(layer)  # type: ignore[union-attr]


def test_memory_of_weights_may_go_and_come_between_calls() -> None:
    for found in run_ranks(_offloaded, 2):
        assert found["calls"] == 3
        torch.testing.assert_close(found["True"], found["False"], rtol=1e-4, atol=1e-5)


def _first_forward(rank: int, world_size: int) -> list[str]:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    said = io.StringIO()
    with tiny_gpt.plug_in(True, end_on_timeout=True), contextlib.redirect_stdout(said):
        layers = [tiny_gpt.moe_layer(tiny_gpt.config_of()) for _ in range(2)]
        for layer in layers:
            layer(torch.randn(4, 2, 32))
    return said.getvalue().splitlines()


def test_the_start_up_lines_come_in_the_first_forward_where_another_loop_builds_the_model() -> None:
    """Once, on rank 0, and with the settings that only Megatron's loop reads."""
    first, other = run_ranks(_first_forward, 2)
    versions, on, off, whose = first
    assert versions.startswith("megatron_fluid ")
    assert on == "  on:  MoE layer (2): rounds, 2 expert-parallel ranks"
    reason = "only Megatron's training loop reads it"
    assert off == f"  off: no effect: MEGATRON_FLUID_END_ON_TIMEOUT ({reason})"
    assert whose == "megatron_fluid: of rank 0 alone, in its first forward of such a layer"
    assert other == []


# ---- process groups that a framework wraps, destroys and makes again


def _asleep_between_steps(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
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
    for found in run_ranks(_asleep_between_steps, 2, settings):
        assert found["backend"] == ("rounds", None)
        assert found["calls"] == fused
        assert found["groups"] <= 2, "what destroyed groups kept is dropped"
        torch.testing.assert_close(found["True"], found["False"], rtol=1e-4, atol=1e-5)


def _attention(rank: int, world_size: int) -> dict[str, Any]:
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
    for found in run_ranks(_attention, 2):
        assert not found["same group"]
        torch.testing.assert_close(*found["outputs"], rtol=0, atol=0)
