"""What overlapped attention over rounds does besides computing: the gradient of the input alone, a
peer that dies."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.errors import PeerTimeoutError
from tests.support.launch import run_ranks, run_ranks_outcomes


def _layer(rounds: P2PRounds | None = None) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(
        16, 4, group=dist.group.WORLD, rotary=Rotary(4), rounds=rounds, dtype=torch.float64
    )


def _input(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(4, 2, 16, dtype=torch.float64, generator=generator).requires_grad_()


def _inputs_alone(rank: int, world: int) -> None:
    layer, x = _layer(), _input(rank)
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


def _a_peer_dies(rank: int, world: int, phase: str) -> str:
    assert dist.group.WORLD is not None
    layer = _layer(rounds=P2PRounds(dist.group.WORLD, timeout_s=3.0))
    x = _input(rank)
    y = layer(x) if phase == "backward" else None
    if rank == 1:
        os._exit(0)
    try:
        (layer(x) if y is None else y.sum()).sum().backward()
    except PeerTimeoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("phase", "operation"), [("forward", "attention qkv"), ("backward", "attention d-output")]
)
def test_a_peer_that_dies_is_named(phase: str, operation: str) -> None:
    outcomes = run_ranks_outcomes(_a_peer_dies, 2, phase, timeout_s=60)
    assert outcomes[0].ok, outcomes[0].error
    assert "rank 0: no answer from peer 1" in outcomes[0].value and operation in outcomes[0].value
    assert "round 0" in outcomes[0].value
