"""Weights of Megatron's experts between calls: nothing holds their memory; and where they are one
parameter a linear, how gradients are reported, and what of a change is honoured."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_fluid import MoELayer, patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.gradient_readiness import _Gate
from megatron_fluid.patches.moe import layer as moe_layer
from megatron_fluid.patches.moe.expert_modules import share_storage
from tests.support import tiny_gpt
from tests.support.grouped_tensor import megatron_with_grouped_tensors, members
from tests.support.launch import on_ranks
from tests.unit.patches.test_moe_router import over_nvlink

WEIGHT = {
    "moe_grouped_gemm": True,
    "moe_single_grouped_weight": True,
    "use_transformer_engine_op_fuser": True,
}
ITERATIONS, MICROBATCHES, LAYERS = 2, 2, 2


@contextlib.contextmanager
def _plug_in(on: bool = True) -> Iterator[list[int]]:
    with (
        megatron_with_grouped_tensors(),
        tiny_gpt.plug_in(on, moe_backend="local" if on else "auto") as calls,
    ):
        yield calls


@on_ranks(1)
def test_each_linear_of_a_layer_is_reported_as_one_parameter(rank: int, world: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=1)
    reports: list[tuple[list[str], bool]] = []
    real = _Gate.report

    def reported(self: Any, pending: Any) -> None:
        kinds = [type(param).__name__ for param in self.params]
        reports.append((kinds, any(param.grad is not None for param in self.params)))
        real(self, pending)

    with _plug_in(), mock.patch.object(_Gate, "report", reported):
        config = tiny_gpt.config_of(**WEIGHT, bf16=True, params_dtype=torch.bfloat16)
        model = tiny_gpt.gpt(config, tiny_gpt.grouped_spec(config))
        sizes = {"iterations": ITERATIONS, "microbatches": MICROBATCHES}
        tiny_gpt.train(model, **sizes, distributed_optimizer=True, overlap_grad_reduce=True)  # type: ignore[arg-type]
    assert reports == [(["GroupedTensor"], False)] * (2 * LAYERS * MICROBATCHES * ITERATIONS)


@on_ranks(1)
def test_values_that_change_are_read_and_what_cannot_be_read_leaves_the_experts_megatrons(
    rank: int, world: int
) -> None:
    """By the output of Megatron's own layer with the same experts."""
    tiny_gpt.parallel(expert_model_parallel_size=1)
    config_of = tiny_gpt.config_of
    hidden = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(1))

    with _plug_in(on=False), torch.no_grad():
        layer = tiny_gpt.moe_layer(config_of(moe_grouped_gemm=True), grouped=True)
        starts = torch.stack(members(layer.experts.linear_fc2, "weight"))
        right = layer(hidden)[0]  # linear in fc2

    with _plug_in() as calls:
        layer = tiny_gpt.moe_layer(config_of(**WEIGHT), grouped=True)
        fc2 = layer.experts.linear_fc2

        def check(scale: float, words: str | None = None) -> None:
            before, output = len(calls), layer(hidden)[0].detach()
            torch.testing.assert_close(output, scale * right, rtol=0, atol=1e-5)
            reason = moe_layer.experts_reason_of(layer)
            assert reason is words is None or str(words) in str(reason)
            assert (len(calls) > before) is (words is None)

        check(1.0)
        fc2.weight.rowwise_data = fc2.weight.rowwise_data * 2  # as Megatron's buffers do
        check(2.0)
        state = layer.state_dict()
        with torch.no_grad():
            fc2.weight.zero_()
        scaled = {name: value.clone() for name, value in state.items() if value is not None}
        names = [f"experts.linear_fc{n}.weight" for n in (1, 2)]
        assert sorted(name for name in state if "experts" in name) == names, "Megatron's names"
        layer.load_state_dict(scaled | {names[1]: 3 * starts}, strict=False)
        check(3.0)
        values = fc2.weight.rowwise_data.view(fc2.weight.shape)
        fc2.weight = torch.nn.Parameter(values.clone())  # as a cast of the module does
        check(3.0)
        del fc2._parameters["weight"]
        for i, member in enumerate(values.unbind(0)):
            fc2.register_parameter(f"weight{i}", torch.nn.Parameter(member.clone()))
        fc2.single_grouped_weight = False
        unpacked = "an expert's linear has no parameter 'weight"
        with pytest.raises(ConfigError, match=unpacked):
            layer(hidden)
        patches.reset_layers()
        check(3.0, unpacked)

        layer = tiny_gpt.moe_layer(config_of(**WEIGHT), grouped=True)
        layer.experts.linear_fc1.weight.quantizer = object()
        check(1.0, "experts.linear_fc1.weight is a GroupedTensor of quantised values")


def _alive_after(layer: Any, parameters: list[torch.nn.Parameter], train: bool) -> int:
    """How many arrays outlive the moving of the parameters that they are the memory of, after a
    forward, with its backward or without."""
    arrays = []
    for parameter in parameters:
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        arrays.append(weakref.ref(array))
    del array
    with torch.set_grad_enabled(train):
        output = layer(torch.randn(4, 1, 32))
    if train:
        output.sum().backward()
    for parameter in parameters:
        parameter.data = parameter.detach().clone()
    return sum(array() is not None for array in arrays)


@on_ranks(1, env={"TRITON_INTERPRET": "1"})
def test_weights_that_move_between_calls_leave_no_memory_behind(rank: int, world: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=1)

    def check(name: str, layer: Any, holder: Any) -> None:
        parameters = list(holder.parameters())
        for train in (False, True):
            assert _alive_after(layer, parameters, train) == 0, f"{name}, trained: {train}"

    for backend in ("local", "rounds"):
        with tiny_gpt.plug_in(True, moe_backend=backend) as calls:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
            check(backend, lambda x, layer=layer: layer(x)[0], layer.experts)
            assert len(calls) == 2
    shape = {"num_moe_experts": 8, "moe_router_topk": 2}
    layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**shape), grouped=True)
    with over_nvlink(layer, 4) as path:
        check("nvlink", lambda x: path.forward(layer, x, None)[0], layer.experts)
    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 4, "top_k": 2}
    alone = MoELayer(sizes, torch.distributed.group.WORLD)
    expert_weights = torch.nn.ParameterList([alone.weight1, alone.weight2])
    check("standalone", alone, expert_weights)


def _place(weights: list[torch.nn.Parameter], pool: torch.Tensor, together: bool) -> None:
    """Move weights to the same addresses each time: in one storage, or each in its own."""
    start = 100
    for weight, values in zip(
        weights, [weight.detach().clone() for weight in weights], strict=True
    ):
        end = start + values.numel()
        own = torch.frombuffer(memoryview(pool.numpy())[start:end], dtype=pool.dtype)
        weight.data = (pool[start:end] if together else own).view(values.shape).copy_(values)
        start = end


@on_ranks(1)
def test_weights_that_come_back_to_their_addresses_in_other_storages_are_read(
    rank: int, world: int
) -> None:
    """As weights may that are loaded after they were offloaded."""
    tiny_gpt.parallel(expert_model_parallel_size=1)
    pool, hidden = torch.randn(1 << 16), torch.randn(6, 2, 32)

    def check(forward: Any, weights: list[torch.nn.Parameter]) -> None:
        with torch.no_grad():
            expected = forward(hidden)
            for together in (True, False, True):
                _place(weights, pool, together)
                torch.testing.assert_close(forward(hidden), expected, rtol=0, atol=1e-6)

    with tiny_gpt.plug_in(True, moe_backend="local") as calls:
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of(), grouped=True)
        check(lambda x: layer(x)[0], list(layer.experts.parameters()))
        assert len(calls) == 4
    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 4, "top_k": 2}
    alone = MoELayer(sizes, None)
    check(alone, [alone.weight1, alone.weight2])


@on_ranks(1)
def test_parameters_that_fsdp2_gathers_are_not_moved(rank: int, world: int) -> None:
    plain, moved = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))) for _ in "ab")
    moved.load_state_dict(plain.state_dict())
    fully_shard(moved, mesh=init_device_mesh("cpu", (1,)))
    moved[0].register_forward_pre_hook(
        lambda *given: share_storage(tuple(linear.weight for linear in moved))
    )
    x, losses = torch.randn(5, 4), []
    for module in (plain, moved):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[:3] == losses[3:] and losses[2] < losses[1]


@pytest.mark.parametrize("held", ["one buffer", "shared with another model"])
def test_parameters_whose_memory_others_hold_are_not_moved(held: str) -> None:
    """Megatron's DistributedDataParallel lays them out in one buffer."""
    buffer, other = torch.zeros(3, 4, 8), [nn.Parameter(torch.zeros(4, 8)) for _ in range(3)]
    parts: dict[str, list[Tensor]] = {
        "one buffer": list(buffer.unbind()),
        "shared with another model": [each.data for each in other],
    }
    parameters = tuple(map(nn.Parameter, parts.pop(held)))
    pointers = [parameter.data_ptr() for parameter in parameters]
    share_storage(parameters)
    assert [parameter.data_ptr() for parameter in parameters] == pointers
