"""The gradient of the input alone, through attention that is overlapped over peer rounds."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.packed import Rotary
from tests.support.launch import run_ranks


def _inputs_alone(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    layer = SelfAttention(16, 4, group=dist.group.WORLD, rotary=Rotary(4), dtype=torch.float64)
    x = torch.randn(4, 2, 16, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    layer.scheduler.enable()
    y = layer(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(dx, expected) and all(
        parameter.grad is None for parameter in layer.parameters()
    )
    y.backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_the_gradient_of_the_input_alone_leaves_deferred_weights_as_they_are() -> None:
    run_ranks(_inputs_alone, 2)
