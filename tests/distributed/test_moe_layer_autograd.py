"""Layers under DistributedDataParallel, in partial backwards and beside other work. Checkpoints,
autocast and repeated backwards: test_torch_compile.py."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fluid import MoEBaseline, MoELayer, SelfAttention, TransformerLayer
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.moe.rounds.plan import ExactPlan
from tests.support.expert_calls import start_rounds
from tests.support.launch import on_ranks
from tests.support.moe_layers import CONFIG, F64, close, group, layer_of, tokens_of


class Recomputed(nn.Module):
    """A layer under activation checkpointing, used twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return (found + self.layer(x)) / 2


@pytest.mark.parametrize("kind", [MoELayer, MoEBaseline, SelfAttention, TransformerLayer])
@on_ranks(2)
def test_distributed_data_parallel(rank: int, world: int, kind: type[nn.Module]) -> None:
    """Two replicas of one rank each: torch's DistributedDataParallel averages, deferred or not."""
    single = [dist.new_group([r]) for r in range(world)][rank]
    torch.manual_seed(0)
    layer = layer_of(kind, single)
    data = [[tokens_of(r + 1, m)[:, None] for m in range(2)] for r in range(world)]
    for x in itertools.chain(*data):
        layer(x).square().sum().backward()
    expected = [p.grad / world for p in layer.parameters() if p.grad is not None]
    counted: dict[str, bool]
    for deferred, recomputed, counted in (
        (False, False, {}),
        (True, False, {}),
        (True, False, {"static_graph": True}),
        (True, True, {}),
        (True, True, {"static_graph": True}),
        (True, False, {"find_unused_parameters": True}),
    ):
        root = Recomputed(layer) if recomputed else layer
        model = nn.parallel.DistributedDataParallel(root, **counted)
        (get_backward_scheduler().enable if deferred else get_backward_scheduler().disable)()
        layer.zero_grad()
        for x in data[rank]:
            model(x).square().sum().backward()
        for p, wanted in zip(layer.parameters(), expected, strict=True):
            close(p.grad, wanted)


@on_ranks(2)
def test_backward_for_some_inputs_only(rank: int, world: int) -> None:
    """backward(inputs=...) may leave out the node that waits for dX: the exchange ends."""
    layer = MoELayer(CONFIG, group(), dtype=F64)
    for _ in range(2):
        x = tokens_of(rank + 1).requires_grad_()
        layer(x).sum().backward(inputs=[layer.weight1])
        assert layer.weight1.grad is not None and layer.weight2.grad is None and x.grad is None
    layer.weight1.requires_grad_(False)
    layer(tokens_of(rank + 1)).sum().backward()
    assert layer.weight2.grad is not None
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    get_backward_scheduler().enable()
    layer = MoELayer(CONFIG, group(), dtype=F64)
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(dx, expected) and all(
        parameter.grad is None for parameter in layer.parameters()
    )


@on_ranks(2)
def test_other_work_runs_while_dx_travels(rank: int, world: int) -> None:
    """What is recorded between start and finish runs its backward before dX is waited for."""
    rounds = shared_rounds(group())
    plan = ExactPlan(rank, ((2,), (3,)), ((2 + rank,),) * 2)
    w1, w2, x = (
        torch.ones(shape, dtype=F64, requires_grad=True) for shape in ((1, 4, 8), (1, 8, 4), (5, 8))
    )
    started = start_rounds(x * 1, None, plan, w1, w2, "gelu", rounds)
    order: list[str] = []

    def note(what: str) -> None:
        order.append(f"{what}, dX travels: {started._state.transport.returning is not None}")

    other = (x * 2).sin()
    other.register_hook(lambda gradient: note("other work"))
    x.register_hook(lambda gradient: note("dX"))
    (started.finish() + other).sum().backward()
    assert order == ["other work, dX travels: True", "dX, dX travels: False"]


@on_ranks(2)
def test_experts_that_thaw_between_forward_and_backward_get_none(rank: int, world: int) -> None:
    """As autograd gives none to what was frozen in the forward."""
    layer, x = MoELayer(CONFIG, group(), dtype=F64), tokens_of(rank + 1)
    for deferred in (False, True):
        (get_backward_scheduler().enable if deferred else get_backward_scheduler().disable)()
        layer.zero_grad()
        layer.weight2.requires_grad_(False)
        y = layer(x)
        layer.weight2.requires_grad_(True)
        y.sum().backward()
        assert layer.weight1.grad is not None and layer.weight2.grad is None


@on_ranks(2)
def test_a_checkpoint_that_has_all_it_needs_is_no_failure(rank: int, world: int) -> None:
    """torch ends a recomputation by an exception: ranks that wait for this one must not end."""
    layer = MoELayer(CONFIG, group(), dtype=F64)
    with mock.patch("megatron_fluid.comm.failed_waits._tell") as told:
        checkpoint(layer, tokens_of(rank + 1), use_reentrant=False).sum().backward()
    told.assert_not_called()


@on_ranks(2)
def test_anomaly_detection_finds_no_nan_in_gradients_that_travel(rank: int, world: int) -> None:
    layer = MoELayer(CONFIG, group(), dtype=F64).requires_grad_(False)  # of DTensors torch has none
    x = tokens_of(rank + 1).requires_grad_()
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    with torch.autograd.detect_anomaly():
        layer(x).sum().backward()
    close(x.grad, expected)
