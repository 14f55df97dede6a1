"""The inference layer beside the training layer, with the same parameters, over gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize

from megatron_fluid import MoELayer
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import InferenceMoELayer
from megatron_fluid.moe.sharding import local_part
from tests.support.launch import on_ranks
from tests.support.moe_reference import moe_reference

# The weights are applied before the second GEMM here and after it there, in bf16 between.
_TOLERANCE = 2e-2
_CONFIG = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 6, "top_k": 2, "init_std": 0.3}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20))


def gelu(h: torch.Tensor) -> torch.Tensor:
    """Not the one that bears this name."""
    return torch.nn.functional.elu(3 * h)


@pytest.mark.parametrize(("world", "changes"), [
    (3, {}),
    (2, {"activation": "gelu", "score_function": "sigmoid", "scaling": 2.0}),
    (2, {"shared_ffn_hidden_size": 16}),
    (2, {"activation": torch.nn.functional.elu, "top_k": 6}),
    (2, {"activation": gelu}),
], ids="swiglu sigmoid-scores-gelu shared-expert callable known-callable".split())  # fmt: skip
@on_ranks()
def test_it_computes_what_the_training_layer_does(
    rank: int, world: int, changes: dict[str, object]
) -> None:
    training = MoELayer(_CONFIG | changes, dist.group.WORLD, dtype=torch.bfloat16).eval()
    layer = InferenceMoELayer.of(training, max_num_tokens=9, group=dist.group.WORLD)
    text = f"max_num_tokens=9, ranks={world}, rank={rank}, transport=gloo, torch.bfloat16"
    assert text in repr(layer)
    assert f"rank={rank}, transport=gloo, cpu)" in repr(layer.all_to_all)
    for turn in range(4):
        m = (5 + 2 * rank + turn) % 10 if turn != 2 or rank else 0
        generator = torch.Generator().manual_seed(10 * turn + rank)
        tokens = torch.randn(m, 32, generator=generator).to(torch.bfloat16)
        with torch.no_grad():
            wanted = training(tokens)
        found = layer(tokens)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        if m:
            assert _error(found, wanted) < _TOLERANCE
    layer.destroy()


@pytest.mark.parametrize("invariant", [False, True])
@on_ranks(2)
def test_routing_may_come_from_outside_with_masks_and_a_bound(
    rank: int, world: int, invariant: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight1 = torch.randn(2, 2 * 16, 8, generator=generator).to(torch.bfloat16)
    weight2 = torch.randn(2, 8, 16, generator=generator).to(torch.bfloat16)
    sizes = {"max_num_tokens": 6, "experts_per_token": 2}
    with torch.inference_mode():  # of the building alone
        layer = InferenceMoELayer(weight1, weight2, None, batch_invariant=invariant, **sizes)  # type: ignore[arg-type]
    tokens = torch.randn(6, 8, generator=generator).to(torch.bfloat16)
    ids = [[0, 0], [0, 2], [3, -1], [-1, -1], [1, 1], [2, 0], [3, 1]]
    ids = torch.tensor(ids, dtype=torch.int32)[1:]  # at no multiple of 16 bytes, as of a slice
    probs = torch.rand(7, 2, generator=generator)[1:]
    with pytest.raises(ConfigError, match="routing"):
        layer(tokens)
    with pytest.raises(ConfigError, match="tokens: found .*torch.float16"):
        layer(tokens.half(), (ids, probs))
    bound = torch.tensor([5], dtype=torch.int32)
    found = layer(tokens, (ids, probs), bound)
    both = [w.float().repeat(2, 1, 1) for w in (weight1, weight2)]  # each rank holds the same two
    wanted = moe_reference(tokens.float(), ids, probs, *both, "swiglu")
    assert all(_error(found[i], wanted[i]) < _TOLERANCE for i in (0, 1, 3, 4))
    assert not found[2].any()
    layer.destroy()


@on_ranks(2)
def test_it_takes_the_group_of_the_training_layer_and_refuses_other_shares_of_experts(
    rank: int, world: int
) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    alone = MoELayer(_CONFIG, mesh["ep"], dtype=torch.bfloat16).eval()
    with torch.no_grad():
        alone.weight1.mul_(1 + rank)
    tokens = torch.randn(4, 32).to(torch.bfloat16)
    layer = InferenceMoELayer.of(alone, max_num_tokens=4)
    assert _error(layer(tokens), alone(tokens).detach()) < _TOLERANCE
    layer.destroy()
    shared = MoELayer(_CONFIG, dist.group.WORLD, dtype=torch.bfloat16)
    divided = fully_shard(copy.deepcopy(alone), mesh=mesh["dp"])
    for training, group, count in (
        (alone, dist.group.WORLD, "6 of 6"),
        (shared, mesh.get_group("ep"), "3 of 6"),
        (divided, None, "3 of 6"),
    ):
        with pytest.raises(ConfigError, match=f"experts: found '{count} experts.*allowed: .*FSDP2"):
            InferenceMoELayer.of(training, max_num_tokens=4, group=group)
    turned = DeviceMesh("cpu", [1, 0])
    weights = (
        DTensor.from_local(local_part(weight), turned, [Shard(0)], run_check=False)
        for weight in (shared.weight1, shared.weight2)
    )
    with pytest.raises(ConfigError, match=rf"at \[{1 - rank}\] on rank {rank} of a group of 2"):
        InferenceMoELayer(*weights, None, max_num_tokens=4, experts_per_token=1)


@on_ranks(1)
def test_it_follows_the_training_layer_to_new_parameters_and_another_router(
    rank: int, world: int
) -> None:
    training = MoELayer(_CONFIG, dist.group.WORLD, dtype=torch.bfloat16).eval()
    layer = InferenceMoELayer.of(training, max_num_tokens=4)
    tokens, state = torch.randn(4, 32).to(torch.bfloat16), training.state_dict()
    training.load_state_dict({name: 2 * value for name, value in state.items()}, assign=True)
    training.router = copy.deepcopy(training.router)
    training.router.weight.data.mul_(-1)
    assert _error(layer(tokens), training(tokens).detach()) < _TOLERANCE
    computed = copy.deepcopy(training)
    first = InferenceMoELayer.of(computed, max_num_tokens=4)
    parametrize.register_parametrization(computed, "weight1", torch.nn.Softplus(), unsafe=True)
    second = InferenceMoELayer.of(computed, max_num_tokens=4)
    with torch.no_grad():
        computed.parametrizations.weight1.original.add_(1)
        for each in (first, second):
            assert _error(each(tokens), computed(tokens)) < _TOLERANCE
        parametrize.remove_parametrizations(computed, "weight1")
        assert _error(first(tokens), computed(tokens)) < _TOLERANCE
    training.weight1 = torch.nn.Parameter(training.weight1[:3].detach())
    with pytest.raises(ConfigError, match="weight1 of the training layer: found .*3, 96, 32"):
        layer(tokens)


@on_ranks(1)
def test_its_mode_leaves_the_training_layers_router_alone(rank: int, world: int) -> None:
    """In eval the router would train no load-balancing loss."""
    training = MoELayer(_CONFIG, dist.group.WORLD, dtype=torch.bfloat16)
    layer = InferenceMoELayer.of(training, max_num_tokens=4).eval()
    assert training.router.training and not layer.training


@on_ranks(1)
def test_what_cannot_be_is_refused_by_name(rank: int, world: int) -> None:
    weight1, weight2 = torch.zeros(2, 32, 8).bfloat16(), torch.zeros(2, 8, 16).bfloat16()
    sizes = {"max_num_tokens": 4, "experts_per_token": 1}
    for first, second, activation, named in (
        (weight1, weight2[:1], "swiglu", "weight1, weight2"),
        (weight1, weight2[:, :4], "swiglu", "weight2"),
        (weight1, weight2[:, :, :15], "swiglu", r"weight1.*F1 = 30 for swiglu"),
        (weight1.float(), weight2.float(), "swiglu", "type of the weights"),
        (weight1, weight2, "tanhshrink", r"activation.*swiglu"),
    ):
        with pytest.raises(ConfigError, match=named):
            InferenceMoELayer(first, second, None, activation=activation, **sizes)  # type: ignore[arg-type]
    wide = {"hidden_size": 128, "ffn_hidden_size": 128, "num_experts": 2, "top_k": 2}
    fp8 = MoELayer(
        wide | {"fp8_recipe": "blockwise", "batch_invariant": True}, None, dtype=torch.bfloat16
    )
    with pytest.raises(ConfigError, match=r"fp8_recipe of the training layer.*decoding .*in bf16"):
        InferenceMoELayer.of(fp8, max_num_tokens=4, group=dist.group.WORLD)
