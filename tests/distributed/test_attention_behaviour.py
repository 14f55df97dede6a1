"""What overlapped attention does besides computing: recomputation, dropout, a second derivative
refused, a peer that dies."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fluid.attention.attention_kernels import CORE_KERNELS, CoreCase
from megatron_fluid.attention.exchange.collective import CollectiveExchange
from megatron_fluid.attention.exchange.rounds import RoundsExchange
from megatron_fluid.attention.exchanged import exchanged_attention
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.errors import PeerTimeoutError
from tests.support.launch import run_ranks, run_ranks_outcomes


def _layer(
    overlap: bool = True, dropout: float = 0.0, rounds: P2PRounds | None = None
) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(
        16,
        4,
        group=dist.group.WORLD,
        rotary=Rotary(4),
        dropout=dropout,
        overlap=overlap,
        rounds=rounds,
        dtype=torch.float64,
    )


def _input(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(4, 2, 16, dtype=torch.float64, generator=generator).requires_grad_()


def _recompute(rank: int, world: int, reentrant: bool) -> None:
    results = []
    for recompute in (False, True):
        layers, x = [_layer(), _layer()], _input(rank)
        h = x
        for layer in layers:
            h = h + (checkpoint(layer, h, use_reentrant=reentrant) if recompute else layer(h))
        h.square().sum().backward()
        assert x.grad is not None
        results.append(
            [h.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]
        )
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_repeats_the_exchange_and_the_gradients(reentrant: bool) -> None:
    run_ranks(_recompute, 2, reentrant)


def _dropout(rank: int, world: int) -> list[Tensor]:
    results = []
    for overlap in (True, False):
        layer, x = _layer(overlap, 0.4), _input(rank)
        torch.manual_seed(20 + rank)
        y = layer(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not torch.allclose(_layer()(_input(rank)), results[0][0])
    return [results[0][0]]


def test_dropout_is_the_same_overlapped_and_plain() -> None:
    run_ranks(_dropout, 2)


def _create_graph(rank: int, world: int, form: str) -> None:
    x, losses = _input(rank), []
    if form == "exchange alone":
        assert dist.group.WORLD is not None
        exchange = CollectiveExchange(
            dist.group.WORLD, HeadLayout(4, 4, 4, world), SequenceLayout(4 * world, world)
        )
        case, heads = CoreCase(4, x.dtype, "cpu"), x.view(4, 2, 4, 4)

        def attend(part: HeadPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            losses.append(q.sum())  # without the exchange back
            return CORE_KERNELS["sdpa"].run(q, k, v, case)

        y = exchanged_attention(exchange, heads, heads, heads, attend)
    else:
        y = _layer(form == "rounds")(x)
    for loss in (y.square().sum(), (x + y.view_as(x)).sum(), *losses):
        (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert torch.equal(gradient, expected)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (x * gradient).sum().backward()


@pytest.mark.parametrize("form", ["rounds", "collectives", "exchange alone"])
def test_gradients_of_gradients_are_refused(form: str) -> None:
    run_ranks(_create_graph, 2, form)


def _exchanges_alone(rank: int, world: int, kv_heads: int) -> None:
    assert dist.group.WORLD is not None
    layouts = HeadLayout(4, kv_heads, 4, world), SequenceLayout(4 * world + 1, world, "zigzag")
    rows, case = layouts[1].local_length(rank), CoreCase(4, torch.float64, "cpu")
    torch.manual_seed(rank)
    given = [torch.randn(rows, 2, heads, 4).double() for heads in (4, kv_heads, kv_heads)]
    results = []
    for exchange in (
        CollectiveExchange(dist.group.WORLD, *layouts),
        RoundsExchange(P2PRounds(dist.group.WORLD), *layouts),
    ):
        inputs = [t.clone().requires_grad_() for t in given]
        y = exchanged_attention(
            exchange, *inputs, lambda part, q, k, v: CORE_KERNELS["sdpa"].run(q, k, v, case)
        )
        y.square().sum().backward()
        results.append([y.detach(), *(t.grad for t in inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_exchanges_alone_agree(kv_heads: int) -> None:
    run_ranks(_exchanges_alone, 2, kv_heads)


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
