"""The parameters of Megatron's experts: how they are found and ordered for a grouped GEMM."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")


from megatron_fluid.moe.expert_weights import ExpertWeights as StackedWeights
from megatron_fluid.patches.moe.expert_parameters import ExpertParameters, share_storage


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


def test_grouped_weights_are_found_by_number_and_read_anew() -> None:
    experts = _Grouped()
    weights = ExpertParameters(experts)
    w1, w2 = weights.current()
    assert [w[0, 0].item() for w in w1] == [0.0, 1.0, 2.0] == [w[0, 0].item() for w in w2]
    assert [tuple(w.shape) for w in (w1[0], w2[0])] == [(8, 4), (4, 4)]
    experts.linear_fc1.weight1.data = torch.full((8, 4), 9.0)  # as the distributed optimizer does
    experts.linear_fc2.weight2 = torch.nn.Parameter(torch.full((4, 4), 7.0))  # as some loaders do
    w1, w2 = weights.current()
    assert w1[1] is experts.linear_fc1.weight1 and w1[1][0, 0].item() == 9.0
    assert w2[2] is experts.linear_fc2.weight2


def _in_one_buffer(experts: _Grouped, order: list[int], gap: int = 0) -> None:
    """Lay the parameters out in one storage in that order of experts, all of fc1 before all of
    fc2."""
    for linear in (experts.linear_fc1, experts.linear_fc2):
        size = linear.weight0.numel()
        buffer = torch.empty(3 * (size + gap))
        for place, number in enumerate(order):
            parameter = getattr(linear, f"weight{number}")
            view = buffer[place * (size + gap) :][:size].view(parameter.shape)
            parameter.data = view.copy_(parameter.data)


@pytest.mark.parametrize("gap", [0, 16])
def test_a_reversed_buffer_is_read_in_reverse_as_one_stack(gap: int) -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [2, 1, 0], gap)  # as Megatron's parameter buffers have them
    weights = ExpertParameters(experts)
    assert weights.arrange() and weights.order == [2, 1, 0]
    for projection in weights.current():
        assert [w[0, 0].item() for w in projection] == [2.0, 1.0, 0.0]
        stack = StackedWeights(projection, 3).stack
        assert stack is not None and stack.data_ptr() == projection[0].data_ptr()


def test_an_ascending_buffer_is_left_as_it_is() -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [0, 1, 2])
    pointers = [p.data_ptr() for p in experts.parameters()]
    weights = ExpertParameters(experts)
    assert not weights.arrange() and weights.order == [0, 1, 2]
    assert [p.data_ptr() for p in experts.parameters()] == pointers
    assert StackedWeights(weights.current()[0], 3).stack is not None


def test_separate_parameters_move_into_one_storage_and_keep_their_identity() -> None:
    experts = _Grouped()
    before = {name: (id(p), p.detach().clone()) for name, p in experts.named_parameters()}
    for projection in ExpertParameters(experts).current():
        assert (
            StackedWeights(projection, 3).stack is None
            or len({p.data_ptr() for p in projection}) == 3
        )
        share_storage(projection)
        stack = StackedWeights(projection, 3).stack
        assert stack is not None and len({p.untyped_storage().data_ptr() for p in projection}) == 1
    for name, parameter in experts.named_parameters():
        assert (
            id(parameter) == before[name][0]
            and torch.equal(parameter, before[name][1])
            and parameter.is_leaf
        )


def test_parameters_of_a_buffer_are_not_moved() -> None:
    experts = _Grouped()
    _in_one_buffer(experts, [1, 2, 0])
    pointers = [p.data_ptr() for p in experts.parameters()]
    for projection in ExpertParameters(experts).current():
        share_storage(projection)
    assert [p.data_ptr() for p in experts.parameters()] == pointers
