"""Experts as DTensors, as torch's own tools see them: checkpoints, clipping, FSDP2, DDP, optimizers
and whatever replaces parameters, each against one process."""

import copy
import functools
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_fluid import (
    MoEBaseline,
    MoELayer,
    SelfAttention,
    TransformerLayer,
    clip_grad_norm_,
    close_group,
    get_backward_scheduler,
)
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.sharding import is_sharded, local_part
from tests.support.launch import on_ranks, run_ranks
from tests.support.moe_layers import CONFIG, F64, layer_of, whole

KINDS = MoELayer, MoEBaseline
EXPERTS = "weight1", "weight2"
# By parameter and not by optimizer: one rank has one optimizer, several have two.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SIZES = CONFIG | {"num_experts": 8, "shared_ffn_hidden_size": 4}


class Model(nn.Module):
    """A plain projection, an attention and MoE layer, and both kinds of MoE layers."""

    def __init__(self, ep_group: Any, device: str = "cpu", dtype: torch.dtype = F64) -> None:
        super().__init__()
        torch.manual_seed(3)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.first = nn.Linear(8, 8, **made)
        sizes = {**SIZES, "num_attention_heads": 2}
        self.block = TransformerLayer(sizes, ep_group=ep_group, **made)
        self.moe = MoELayer(SIZES, ep_group, layer_id=1, **made)
        self.baseline = MoEBaseline(SIZES, ep_group, layer_id=2, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.baseline(self.moe(self.block(self.first(x))))


def tokens(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5 + rank, 2, 8, dtype=F64, generator=generator)


def alone(rank: int, world: int) -> dist.ProcessGroup:
    return [dist.new_group([r]) for r in range(world)][rank]


def shard(model: Model, mesh: DeviceMesh, **options: Any) -> list[Any]:
    """FSDP2: experts over the data-parallel ranks, the rest over all. Returns the MoE layers."""
    layers = [module for module in model.modules() if isinstance(module, KINDS)]
    experts = {weight for layer in layers for weight in (layer.weight1, layer.weight2)}
    every = mesh._flatten("all")
    fully_shard(layers[0].router, mesh=every, **options)  # by itself, too
    fully_shard(model, mesh=every, ignored_params=experts, **options)
    for layer in layers:
        others = set(layer.parameters()) - experts
        fully_shard(layer, mesh=mesh["dp"], ignored_params=others, **options)
    return layers


def mesh_of(world: int, ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))


def trained(
    model: Model, data: list[Tensor], steps: int = 2, **adam: Any
) -> list[torch.optim.Optimizer]:
    """Train on the sum of the ranks' losses; experts have an optimizer of their own, since torch's
    fused and foreach steps do not take DTensors and tensors in one."""
    optimizers = []
    for kind in (True, False):
        params = [p for p in model.parameters() if is_sharded(p) is kind]
        optimizers += [torch.optim.Adam(params, lr=0.01, **adam)] if params else []
    for _ in range(steps):
        model.zero_grad()
        torch.stack([model(x).square().sum() for x in data]).sum().backward()
        for p in model.parameters():
            if not is_sharded(p) and len(data) == 1:
                assert p.grad is not None
                dist.all_reduce(p.grad)
        clip_grad_norm_(model, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers


@on_ranks(4)
def test_training_with_clipping_and_adam_equals_one_process(rank: int, world: int) -> None:
    one = alone(rank, world)
    for adam in ({}, {"foreach": True}, {"fused": True}):
        reference = Model(one)
        trained(reference, [tokens(r) for r in range(world)], **adam)
        expected = reference.state_dict()
        for deferred in (False, True):
            get_backward_scheduler().enabled = deferred
            model = Model(dist.group.WORLD)
            optimizers = trained(model, [tokens(rank)], **adam)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(whole(value), expected[name], rtol=1e-6, atol=1e-8)
            assert is_sharded(optimizers[0].state[model.moe.weight1]["exp_avg"])
        get_backward_scheduler().disable()


def model_on(world: int, ep: int) -> Model:
    """On all ranks as one expert-parallel group, or with FSDP2 over a mesh where `ep` is not 0."""
    if not ep:
        return Model(dist.group.WORLD)
    mesh = mesh_of(world, ep)
    model = Model(mesh["ep"])
    shard(model, mesh)
    return model


def _states(model: Model, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    states = get_state_dict(model, optimizers, options=FLAT)
    return dict(zip(("model", "optimizers"), states, strict=True))


def saving_body(rank: int, world: int, ep: int, folder: str) -> dict[str, Tensor]:
    model = model_on(world, ep)
    optimizers = trained(model, [tokens(rank)])
    dcp.save(_states(model, optimizers), checkpoint_id=folder)
    return _bits(model, optimizers)


def loading_body(rank: int, world: int, ep: int, folder: str, again: str) -> dict[str, Tensor]:
    model = model_on(world, ep)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizers = trained(model, [tokens(rank)], steps=1)
    state = _states(model, optimizers)
    dcp.load(state, checkpoint_id=folder)
    named = {"model_state_dict": state["model"], "optim_state_dict": state["optimizers"]}
    set_state_dict(model, optimizers, **named, options=FLAT)
    dcp.save(state, checkpoint_id=again)
    return _bits(model, optimizers)


def _bits(model: Model, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    found = {name: whole(value) for name, value in model.state_dict().items()}
    of = {name: o for o in optimizers for name, p in model.named_parameters() if p in o.state}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{k}": whole(v) for k, v in of[name].state[parameter].items()}
    return found


@pytest.mark.parametrize(
    "places",
    [[(2, 0), (4, 0), (1, 0), (2, 0)], [(4, 2), (2, 1), (2, 0), (4, 4)]],
    ids=["experts alone", "FSDP2"],
)
def test_checkpoints_load_on_other_numbers_of_ranks_bit_for_bit(
    places: list[tuple[int, int]], tmp_path: Path
) -> None:
    folders = [str(tmp_path / str(number)) for number in range(len(places))]
    (world, ep), *others = places
    expected = run_ranks(saving_body, world, ep, folders[0])[0]
    for (world, ep), folder, again in zip(others, folders, folders[1:], strict=False):
        for found in run_ranks(loading_body, world, ep, folder, again):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), f"{name} on {world} ranks, ep {ep}"


@pytest.mark.parametrize(
    ("half", "wide"),
    [(True, False), (False, True)],
    ids=["bf16, kept", "fp32, from meta, resharded"],
)
@on_ranks(4)
def test_fully_shard_over_data_and_expert_parallel_ranks(
    rank: int, world: int, half: bool, wide: bool
) -> None:
    mesh = mesh_of(world, 2)
    model = Model(mesh["ep"], device="meta" if wide else "cpu", dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16 if half else None, torch.float32)
    layers = shard(model, mesh, mp_policy=policy, reshard_after_forward=wide)
    if wide:
        model.to_empty(device="cpu")
        model.first.reset_parameters()
        for part in (model.block, model.moe, model.baseline):
            part.init_weights()
    reference = Model(alone(rank, world), dtype=torch.float32)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    for name, value in reference.state_dict().items():
        if not name.startswith("first"):
            assert torch.equal(state[name], value), name
    reference.load_state_dict(state)
    data = [tokens(r).float() for r in range(world)]
    for deferred in (False, True):
        get_backward_scheduler().enabled = deferred
        model.zero_grad()
        reference.zero_grad()
        model(data[rank]).square().sum().backward()
        for layer in layers:  # averaged over the dp ranks alone, but made of all ranks' tokens;
            for weight in (layer.weight1, layer.weight2):  # set_gradient_divide_factor needs NCCL
                weight.grad /= 2
        get_backward_scheduler().disable()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            torch.stack([reference(x).float().square().sum() for x in data]).mean().backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        for name, p in reference.named_parameters():
            assert p.grad is not None
            error = (grads[name] - p.grad).norm() / p.grad.norm()
            assert error < (0.1 if half else 1e-4), f"{name} {error}"
        norm = clip_grad_norm_(model, 1.0)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(norm, expected, rtol=0.05 if half else 1e-4, atol=0)
    torch.optim.AdamW(model.parameters()).step()


@on_ranks(2)
def test_data_parallel_refuses_experts_by_name_or_leaves_them_alone(rank: int, world: int) -> None:
    model = Model(dist.group.WORLD)
    before = {name: local_part(p).clone() for name, p in model.named_parameters()}
    for each in (model, model.block, model.moe, model.baseline):
        with pytest.raises(ConfigError, match="DistributedDataParallel.*weight1.*FSDP2"):
            DistributedDataParallel(each)
    names = [name for name, p in model.named_parameters() if is_sharded(p)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    assert all(torch.equal(local_part(p), before[n]) for n, p in model.named_parameters())
    wrapped(tokens(rank)).square().sum().backward()
    reference = Model(alone(rank, world))
    torch.stack([reference(tokens(r)).square().sum() for r in range(world)]).sum().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        scale = 1 if name in names else world  # DDP averages
        torch.testing.assert_close(whole(p.grad) * scale, q.grad, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_replicate_and_data_parallel_over_a_mesh_refuse_experts_too(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ConfigError, match=r"with device_mesh.*'weight1': \[4, .*FSDP2"):
        DistributedDataParallel(MoELayer(SIZES, mesh["ep"]), device_mesh=mesh["dp"])
    with pytest.raises(ConfigError, match=r"replicate.*\[4, .*ignored_modules"):
        replicate(MoELayer(SIZES, mesh["ep"], dtype=F64))(tokens(rank))
    model = Model(mesh["ep"])
    layers = [module for module in model.modules() if isinstance(module, KINDS)]
    before = [local_part(layer.weight1).clone() for layer in layers]
    replicate(model, ignored_modules=layers)(tokens(rank))
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(local_part(layer.weight1), weight)


@pytest.mark.parametrize("kind", [*KINDS, SelfAttention, TransformerLayer])
@on_ranks(2)
def test_what_replaces_parameters_keeps_them_sharded(
    rank: int, world: int, kind: type[nn.Module]
) -> None:
    made = functools.partial(layer_of, kind, dist.group.WORLD, SIZES)
    layer = made()
    expected = layer(tokens(rank)[:5])
    full = {name: whole(value) for name, value in layer.state_dict().items()}
    mine = {name: local_part(value) for name, value in layer.state_dict().items()}
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    for state in (layer.state_dict(), full, mine, torch.load(file)):
        for assign in (False, True):
            other = made(layer_id=5)
            other.load_state_dict(state, assign=assign)
            _same(other, expected, rank)
    if kind is not SelfAttention:
        other = made(device="meta")
        other.to_empty(device="cpu").init_weights()
        _same(other, expected, rank)
    _same(copy.deepcopy(layer), expected, rank)
    _same(nn.Sequential(copy.deepcopy(layer).float().double())[0], None, rank)
    torch.__future__.set_swap_module_params_on_conversion(True)
    other = made(dtype=torch.float32).double()
    _same(other, None, rank)
    other.load_state_dict(full)
    torch.__future__.set_swap_module_params_on_conversion(False)
    _same(other, expected, rank)
    for p, q in zip(other.parameters(), layer.parameters(), strict=True):
        assert getattr(p, "device_mesh", None) is getattr(q, "device_mesh", None)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_experts_that_another_rank_saved_are_refused(rank: int, world: int, assign: bool) -> None:
    layer = MoELayer(SIZES, dist.group.WORLD)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    files: list[Any] = [None] * world
    dist.all_gather_object(files, file.getvalue())
    own, other = (torch.load(io.BytesIO(files[r])) for r in (rank, 1 - rank))
    layer.load_state_dict(own, assign=assign)
    found = rf"the rank at \({1 - rank},\).*on the rank at \({rank},\).*distributed.checkpoint"
    with pytest.raises(ConfigError, match=found):
        layer.load_state_dict(other, assign=assign)


def _same(layer: Any, expected: Tensor | None, rank: int) -> None:
    y = layer(tokens(rank)[:5])
    if expected is not None:
        assert torch.equal(y, expected)
    y.sum().backward()
    for name, p in layer.named_parameters():
        assert is_sharded(p) is is_sharded(p.grad) is (name.split(".")[-1] in EXPERTS)
        assert not is_sharded(p) or p.shape[0] == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_norms_of_half_precision_are_those_of_fp32(rank: int, world: int, dtype: Any) -> None:
    weight = MoELayer(SIZES, dist.group.WORLD, dtype=dtype).weight1
    plain, half = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(999, dtype=dtype))
    for of_plain, of_experts in ((2e5, 0.01), (0.111, 0.01), (1.0, 100.0)):
        for norm_type in (2.0, -1.0, torch.inf, -torch.inf):
            plain.grad = torch.full_like(plain, of_plain)
            half.grad = torch.full_like(half, of_experts)
            weight.grad = torch.full_like(weight, of_experts)
            local_part(weight.grad).mul_(1 + rank)
            grads = torch.cat([plain.grad, half.grad.float(), whole(weight.grad).float().flatten()])
            norm = clip_grad_norm_([plain, half, weight], 1.0, norm_type)
            torch.testing.assert_close(norm, torch.linalg.vector_norm(grads, norm_type))
            torch.testing.assert_close(plain.grad, grads[:4] / norm.clamp(min=1.0))
    with pytest.raises(ConfigError, match="norm_type: found 0"):
        clip_grad_norm_([plain, weight], 1.0, 0)


@on_ranks(2)
def test_a_mesh_of_two_dimensions_or_in_another_order_is_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    turned = DeviceMesh("cpu", [1, 0], mesh_dim_names=("ep",))  # tokens would go by the group
    for refused, found in ((mesh, "2 dimensions"), (turned, r"ranks \[1, 0\]")):
        with pytest.raises(ConfigError, match=f"ep_group: found 'a mesh of {found}'"):
            MoELayer(SIZES, refused)


@on_ranks(2)
def test_experts_of_a_group_that_is_made_again_forget_the_one_that_was_destroyed(
    rank: int, world: int
) -> None:
    """Also in another thread: DTensor has caches in each, and autograd runs the backward of a GPU's
    tensors in a thread of its own."""
    norms = []
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            group: Any = dist.new_group(list(range(world)))
            layer = MoELayer(SIZES, group, dtype=F64)
            layer(tokens(rank)).square().sum().backward()
            norms.append(clip_grad_norm_(layer.weight1, 1e9).item())
            norms.append(thread.submit(clip_grad_norm_, layer.weight1, 1e9).result().item())
            layer.weight1.grad = None if rank else layer.weight1.grad
            assert clip_grad_norm_(layer.weight1, 1e9) > 0, "on the rank that has none, too"
            close_group(group)
            dist.destroy_process_group(group)
    assert norms[0] > 0 and norms == [norms[0]] * 6
