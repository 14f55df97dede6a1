"""Layers in a process that runs alone; what they say of themselves, and refuse."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm import groups
from megatron_fluid.comm.groups import close_group, group_or_lone_rank, is_destroyed
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.layer import MoEBaseline, MoELayer
from megatron_fluid.tensor_parallel.ops import all_gather_matmul
from megatron_fluid.transformer_layer import TransformerLayer
from tests.support.launch import on_ranks
from tests.support.moe_reference import moe_reference

MOE: dict[str, Any] = {
    **{"hidden_size": 8, "ffn_hidden_size": 6, "num_experts": 4, "top_k": 2},
    **{"init_std": 0.4, "activation": "gelu"},
}
F64 = torch.float64


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.is_initialized():
        pytest.skip("another test of this process has initialised torch.distributed")
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("backend", ["auto", "local", "rounds", "baseline"])
def test_a_layer_needs_no_launcher(backend: str) -> None:
    kind = MoEBaseline if backend == "baseline" else MoELayer
    wanted = {} if backend == "baseline" else {"backend": backend}
    layer = kind({**MOE, **wanted}, dtype=F64)
    x = torch.randn(7, 8, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y, routing = layer(x), layer.router(x)
    weights = layer.weight1, layer.weight2
    expected = moe_reference(x, routing.ids, routing.probs, *weights, "gelu")
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    right = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, right)
    assert layer.backend == {"auto": "local", "baseline": "all_to_all"}.get(backend, backend)
    assert not dist.is_initialized()


def test_a_transformer_layer_needs_none_either() -> None:
    layer = TransformerLayer(8, 2, 8, 4, 2, dtype=F64)
    copied = copy.deepcopy(layer)
    x = torch.randn(5, 2, 8, dtype=F64)
    torch.testing.assert_close(copied(x), layer(x))
    assert copied.ep_group is layer.ep_group


def test_what_is_kept_for_the_process_outlives_other_groups() -> None:
    group = group_or_lone_rank(None)
    value = groups.group_resource(group, "x", object)
    groups._drop_destroyed_groups()
    assert not is_destroyed(group)
    assert groups.group_resource(group, "x", object) is value
    close_group(group)


def test_one_of_several_ranks_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="group: found None in a job of 4 ranks.*init_process"):
        MoELayer(MOE)


@on_ranks(1)
def test_a_world_of_one_rank_is_taken(rank: int, world: int) -> None:
    assert group_or_lone_rank(None) is dist.group.WORLD


def test_an_input_of_another_dtype_or_device_is_refused_by_name() -> None:
    layer, block = MoELayer(MOE, layer_id=3), TransformerLayer(8, 2, 8, 4, 2)
    x = torch.ones(3, 8)
    layer(x)
    with pytest.raises(ConfigError, match="layer 3 moe: tokens: found torch.float64, allowed: tor"):
        layer(x.double())
    with pytest.raises(ConfigError, match="layer 3 moe: tokens: found a tensor on meta, allowed: "):
        layer(x.to("meta"))
    with pytest.raises(ConfigError, match="input of TransformerLayer: found torch.float64"):
        block(torch.ones(3, 1, 8, dtype=F64))
    with pytest.raises(ConfigError, match="layer 0 attention input: found torch.float64"):
        block.self_attention(torch.ones(3, 1, 8, dtype=F64))
    layer.double()
    with pytest.raises(ConfigError, match="found torch.float32, allowed: torch.float64"):
        layer(x)
    layer(x.double())
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.bfloat16())
    with pytest.raises(ConfigError, match="found torch.bfloat16, allowed: torch.float32"):
        layer(x.bfloat16())


def test_operands_on_two_devices_and_no_group_are_refused_by_name() -> None:
    group = group_or_lone_rank(None)
    with pytest.raises(ConfigError, match="a, b: found on cpu and meta, allowed: one device"):
        all_gather_matmul(torch.ones(2, 4), torch.ones(4, 4, device="meta"), group)
    with pytest.raises(ConfigError, match="group: found None, allowed: the process group of the"):
        all_gather_matmul(torch.ones(2, 4), torch.ones(4, 4), None)  # type: ignore[arg-type]
