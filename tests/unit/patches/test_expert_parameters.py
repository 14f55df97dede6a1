"""The parameters of Megatron's experts: how they are found and ordered for a grouped GEMM."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")


from megatron_fluid.moe.expert_weights import ExpertWeights as StackedWeights
from megatron_fluid.patches.moe.expert_modules import share_storage
from megatron_fluid.patches.moe.own_experts import ExpertParameters
from tests.support import grouped_tensor


class _Grouped(torch.nn.Module):
    """Parameters laid out as TEGroupedMLP's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_local_experts = 3
        for name, shape in (("linear_fc1", (8, 4)), ("linear_fc2", (4, 4))):
            linear = torch.nn.Module()
            for i in reversed(range(3)):
                linear.register_parameter(
                    f"weight{i}", torch.nn.Parameter(torch.full(shape, float(i)))
                )
            self.add_module(name, linear)


def _in_one_buffer(experts: _Grouped, order: list[int]) -> None:
    """Lay the parameters of each linear out in one storage in that order of experts."""
    for linear in (experts.linear_fc1, experts.linear_fc2):
        parameters = [getattr(linear, f"weight{number}") for number in order]
        buffer = torch.stack([parameter.detach() for parameter in parameters])
        for parameter, view in zip(parameters, buffer, strict=True):
            parameter.data = view


def test_separate_parameters_move_into_one_storage_and_keep_their_identity() -> None:
    experts = _Grouped()
    before = {name: (id(p), p.detach().clone()) for name, p in experts.named_parameters()}
    for projection in ExpertParameters(experts).current():
        assert len({p.untyped_storage().data_ptr() for p in projection}) == 3
        share_storage(projection)
        stack = StackedWeights(projection, 3).stack
        assert stack is not None and len({p.untyped_storage().data_ptr() for p in projection}) == 1
    for name, parameter in experts.named_parameters():
        own, value = before[name]
        assert id(parameter) == own and torch.equal(parameter, value) and parameter.is_leaf


def test_parameters_of_a_buffer_are_not_moved() -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [1, 2, 0])
    pointers = [p.data_ptr() for p in experts.parameters()]
    for projection in ExpertParameters(experts).current():
        share_storage(projection)
    assert [p.data_ptr() for p in experts.parameters()] == pointers


def _packed(plain: bool = False) -> _Grouped:
    experts = _Grouped()
    for linear in (experts.linear_fc1, experts.linear_fc2):
        members = [getattr(linear, f"weight{i}").detach() for i in range(3)]
        stacked = torch.stack(members)
        for i in range(3):
            linear.register_parameter(f"weight{i}", None)
        values = stacked if plain else grouped_tensor.GroupedTensor(stacked)
        linear.register_parameter("weight", torch.nn.Parameter(values))
    return experts


@pytest.mark.parametrize("plain", [False, True], ids=["GroupedTensor", "plain"])
def test_one_parameter_of_all_experts_is_read_where_its_values_lie(plain: bool) -> None:
    experts = _packed(plain)
    weights = ExpertParameters(experts)
    assert weights.packed == (True, False) and not weights.arrange() and weights.order == [0, 1, 2]
    assert weights.current() == ((experts.linear_fc1.weight,), (experts.linear_fc2.weight,))
    copies = grouped_tensor.GroupedTensor.copies
    fc1, fc2 = weights.matrices()
    assert fc1.params == (experts.linear_fc1.weight,) and fc1.requires_grad() and fc1.deferrable()
    for fc, linear in ((fc1, experts.linear_fc1), (fc2, experts.linear_fc2)):
        values = linear.weight if plain else linear.weight.rowwise_data
        assert fc.stack is not None and fc.stack.data_ptr() == values.data_ptr()
        assert [m[0, 0].item() for m in fc.matrices] == [0.0, 1.0, 2.0]
        assert type(fc.stack) is torch.Tensor and not fc.stack.requires_grad
    assert grouped_tensor.GroupedTensor.copies == copies


def test_values_that_were_moved_are_found_and_counted_as_a_change_of_the_parameter() -> None:
    experts = _packed()
    weights, weight = ExpertParameters(experts), experts.linear_fc1.weight
    before, state = weights.matrices()[0], weights.look().state
    versions = before.versions()
    buffer = torch.zeros(500)  # as DistributedDataParallel does, in its buffer
    buffer[7:103].copy_(weight.rowwise_data)
    weight.rowwise_data = buffer[7:103]
    assert weights.look().state != state
    moved = weights.matrices()[0]
    assert moved.stack is not None and moved.stack.data_ptr() == buffer[7:].data_ptr()
    assert moved.kept is not before.kept and weights.matrices()[0].kept is moved.kept
    buffer[200] = 1.0  # another parameter, gathered in between
    assert moved.versions() == versions
    with torch.no_grad():
        weight.copy_(torch.full((3, 8, 4), 9.0))  # as loading does
    assert moved.versions() != versions and moved.stack[1, 0, 0].item() == 9.0
