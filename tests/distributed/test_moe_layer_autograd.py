"""A MoELayer under hooks, checkpointing, DistributedDataParallel, autocast and partial or repeated
backwards."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fluid import MoEBaseline, MoELayer, SelfAttention, TransformerLayer
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.rounds.plan import ExactPlan
from tests.support.expert_calls import start_rounds
from tests.support.launch import run_ranks
from tests.support.moe_layers import CONFIG, F64, LIMIT_S, close, group, stack, tokens_of

# ---- hooks, DistributedDataParallel, checkpointing, autocast


def hooks_body(rank: int, world: int, deferred: bool) -> None:
    if deferred:
        get_backward_scheduler().enable()
    layer = MoELayer({**CONFIG, "shared_ffn_hidden_size": 4}, group(), dtype=F64)
    fired: dict[str, int] = {}

    def hook(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        fired[name] = fired.get(name, 0) + 1

    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: hook(n, p))
    for turn in range(1, 3):
        sum(layer(tokens_of(rank, use)).sum() for use in range(2)).backward()
        assert fired == {name: turn for name, _ in layer.named_parameters()}, fired


@pytest.mark.parametrize("deferred", [False, True])
def test_hooks_fire_once_for_each_parameter(deferred: bool) -> None:
    run_ranks(hooks_body, 2, deferred, timeout_s=LIMIT_S)


def through(layers: nn.ModuleList, x: Tensor, reentrant: bool | None = None) -> Tensor:
    for layer in layers:
        x = x + (layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant))
    return x


def checkpoint_body(rank: int, world: int, deferred: bool) -> None:
    if deferred:
        get_backward_scheduler().enable()
    found = []
    for reentrant in (None, True, False):
        layers = stack(3)
        x = tokens_of(rank + 1).requires_grad_()
        through(layers, x, reentrant).square().sum().backward()
        found.append([x.grad, *(p.grad for p in layers.parameters())])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            close(b, a)


@pytest.mark.parametrize("deferred", [False, True])
def test_activation_checkpointing(deferred: bool) -> None:
    run_ranks(checkpoint_body, 2, deferred, timeout_s=LIMIT_S)


class Recomputed(nn.Module):
    """A layer under activation checkpointing, used twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return (found + self.layer(x)) / 2


def ddp_body(rank: int, world: int, kind: type[nn.Module]) -> None:
    """Two replicas of one rank each: torch's DistributedDataParallel averages, deferred or not."""
    single = [dist.new_group([r]) for r in range(world)][rank]
    torch.manual_seed(0)
    layer: nn.Module
    if kind is SelfAttention:
        layer = SelfAttention(8, 2, group=single, dtype=F64)
    elif kind is TransformerLayer:
        sizes = {**CONFIG, "num_attention_heads": 2}
        layer = TransformerLayer(sizes, ep_group=single, cp_group=single, dtype=F64)
    else:
        layer = kind(CONFIG, single, dtype=F64)
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


@pytest.mark.parametrize("kind", [MoELayer, MoEBaseline, SelfAttention, TransformerLayer])
def test_distributed_data_parallel(kind: type[nn.Module]) -> None:
    run_ranks(ddp_body, 2, kind, timeout_s=LIMIT_S)


def partial_inputs_body(rank: int, world: int) -> None:
    """backward(inputs=...) may leave out the node that waits for dX: the exchange must still
    end."""
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


def test_backward_for_some_inputs_only() -> None:
    run_ranks(partial_inputs_body, 2, timeout_s=LIMIT_S)


def twice_body(rank: int, world: int, deferred: bool) -> None:
    """A kept graph can be gone through again; gradients of gradients are refused by name."""
    if deferred:
        get_backward_scheduler().enable()
    layer = MoELayer(CONFIG, group(), dtype=F64)
    x = tokens_of(rank + 1).requires_grad_()
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, *layer.parameters()) if t.grad is not None]
    loss.backward()
    for a, t in zip(once, (x, *layer.parameters()), strict=True):
        close(t.grad, 2 * a)
    for loss in (layer(x).square().sum(), (x + layer(x)).sum()):
        with pytest.raises(ConfigError, match="backward: create_graph: found True, allowed: False"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("deferred", [False, True])
def test_backward_twice(deferred: bool) -> None:
    run_ranks(twice_body, 2, deferred, timeout_s=LIMIT_S)


def other_work_body(rank: int, world: int) -> list[str]:
    """What is recorded between start and finish runs its backward before dX is waited for."""
    rounds = shared_rounds(group())
    plan = ExactPlan(rank, ((2,), (3,)), ((2 + rank,),) * 2)
    w1, w2 = (
        torch.ones(1, 4, 8, dtype=F64, requires_grad=True),
        torch.ones(1, 8, 4, dtype=F64, requires_grad=True),
    )
    x = torch.ones(5, 8, dtype=F64, requires_grad=True)
    started = start_rounds(x * 1, None, plan, w1, w2, "gelu", rounds)
    order: list[str] = []

    def note(what: str) -> None:
        order.append(f"{what}, dX travels: {started._state.transport.returning is not None}")

    other = (x * 2).sin()
    other.register_hook(lambda gradient: note("other work"))
    x.register_hook(lambda gradient: note("dX"))
    (started.finish() + other).sum().backward()
    return order


def test_other_work_runs_while_dx_travels() -> None:
    assert (
        run_ranks(other_work_body, 2, timeout_s=LIMIT_S)
        == [["other work, dX travels: True", "dX, dX travels: False"]] * 2
    )
