"""Attention over symmetric memory against the one-process reference: W ranks as threads of one
process (thread_ranks.py), kernels interpreted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fluid.attention.attention_kernels import CoreCase, run_sdpa
from megatron_fluid.attention.exchange import symmetric
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange
from megatron_fluid.attention.exchanged import exchanged_attention
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.overlap import AttentionCall, AttentionWeights, overlapped_attention
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError
from tests.distributed.test_attention import Case, _compare, _data, _layers, run_steps
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.thread_ranks import ThreadBuffers, run_threads

pytestmark = NEEDS_INTERPRETER


def _lying_apart(q: Tensor, k: Tensor, v: Tensor, case: CoreCase) -> Tensor:
    """SDPA of what Transformer Engine's get_qkv_layout takes: one after the other from the
    beginning of a storage, or each its own."""
    assert all(t.is_contiguous() for t in (q, k, v))
    offsets = [t.storage_offset() for t in (q, k, v)]
    assert offsets in ([0, 0, 0], [0, q.numel(), q.numel() + k.numel()])
    return run_sdpa(q, k, v, case)


def _rank(case: Case, buffers: ThreadBuffers, apart: bool) -> dict[str, Any]:
    rank, world = buffers.rank, buffers.world
    layers = _layers(replace(case, groups=1), None, torch.device("cpu"))
    scheduler = WeightGradScheduler()
    scheduler.enabled = case.scheduler
    heads = HeadLayout(case.heads, case.kv_heads, case.head_dim, world, case.groups)
    sequence = SequenceLayout(case.length, world, case.layout)
    core = CoreCase(case.head_dim, case.dtype, "cpu", case.causal, case.window)
    rotary, device = case.rotary, torch.device("cpu")
    table = None if rotary is None else rotary.table(case.length, device, case.dtype)
    kernel = _lying_apart if apart else run_sdpa

    def attend(index: int, h: Tensor) -> Tensor:
        exchange, layer = SymmetricExchange(buffers, heads, sequence, apart), layers[index]
        call = AttentionCall(exchange, kernel, core, table, name=f"attention {index}")
        call = replace(call, norm_eps=layer.config.norm_eps, dx_chunks=case.chunks)
        return overlapped_attention(h, layer.weights(), call, scheduler)

    found = run_steps(case, rank, world, attend, scheduler)
    grads = [p.grad for layer in layers for p in layer.parameters()]
    return found | {"grads": grads, "extra": buffers.extra_barriers}


def check(world: int, transport: str, case: Case, apart: bool = False) -> None:
    results = run_threads(world, transport, lambda buffers: _rank(case, buffers, apart))
    for index in range(len(results[0]["grads"])):
        shares = [result["grads"][index] for result in results]
        whole: Tensor = sum(share.double() for share in shares).to(shares[0].dtype)
        for result in results:
            result["grads"][index] = whole
    _compare(case, world, results)
    assert [result["extra"] for result in results] == [0] * world, (
        "training needs no barrier but the exchanges' own"
    )


CORE = CoreCase(8, torch.float64, "cpu")
BASE = Case(head_dim=8, rotary=Rotary(8), heads=8, kv_heads=4, length=16)
TRANSPORTS = pytest.mark.parametrize("transport", ["sm_push", "copy_engine"])


ODD = replace(BASE, heads=12, kv_heads=6, layout="zigzag", length=11)
F32 = torch.float32
CASES: dict[str, tuple[Case, int]] = {
    "plain": (BASE, 4),
    "zigzag-norm-deferred": (
        replace(BASE, layout="zigzag", qk_norm=True, bias=True, layers=2, scheduler=True),
        4,
    ),
    "groups-uneven": (
        replace(BASE, heads=16, kv_heads=8, groups=2, length=13, layout="zigzag", chunks=2),
        4,
    ),
    "mqa": (replace(BASE, kv_heads=1, rotary=Rotary(4, 500.0, True), microbatches=2), 4),
    "gqa-shared": (
        replace(BASE, heads=12, kv_heads=2, causal=False, dtype=F32, batch=1, bias=True),
        4,
    ),
    "bf16": (replace(BASE, dtype=torch.bfloat16, length=70, qk_norm=True, batch=1), 4),
    "two-ranks": (ODD, 2),
    "three-ranks": (ODD, 3),
}


@TRANSPORTS
@pytest.mark.parametrize("apart", [False, True], ids=["packed", "apart"])
@pytest.mark.parametrize(("case", "world"), CASES.values(), ids=CASES)
def test_equals_the_reference(case: Case, world: int, apart: bool, transport: str) -> None:
    """apart: queries, keys and values arrive apart, without norms, which need them together."""
    check(world, transport, replace(case, qk_norm=case.qk_norm and not apart), apart)


@TRANSPORTS
def test_a_backward_under_autocast_moves_what_the_forward_would_have(transport: str) -> None:
    """Whoever wraps more than the forward: the gradients travel in the activations' type, not in
    autocast's."""
    case = replace(BASE, rotary=None, dtype=torch.float32)
    layer = _layers(replace(case, groups=1), None, torch.device("cpu"))[0]
    heads, core = (
        HeadLayout(case.heads, case.kv_heads, case.head_dim, 2),
        CoreCase(case.head_dim, case.dtype, "cpu"),
    )
    sequence = SequenceLayout(case.length, 2)

    def body(buffers: ThreadBuffers) -> list[Tensor]:
        x, g = (t[sequence.positions(buffers.rank)] for t in _data(case, 0))
        call = AttentionCall(SymmetricExchange(buffers, heads, sequence), run_sdpa, core)
        found = []
        for under in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            local = x.detach().requires_grad_()
            y = overlapped_attention(local, layer.weights(), call)
            with under:
                y.backward(g)
            assert local.grad is not None
            found.append(local.grad)
        return found

    for expected, found in run_threads(2, transport, body):
        assert (found - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "groups", "layout", "transport", "values"),
    [
        (4, 8, 1, 1, "zigzag", "sm_push", 8),
        (4, 12, 2, 1, "contiguous", "copy_engine", 8),
        (2, 8, 4, 2, "zigzag", "sm_push", 8),
        (2, 8, 4, 2, "zigzag", "copy_engine", 8),
        (2, 4, 4, 2, "zigzag", "copy_engine", 4),  # as latent attention has them
        (4, 8, 2, 1, "zigzag", "sm_push", 12),
        (4, 12, 2, 1, "contiguous", "copy_engine", 4),
    ],
)
def test_attention_between_two_exchanges(
    world: int, heads: int, kv_heads: int, groups: int, layout: str, transport: str, values: int
) -> None:
    batch, dim = 2, 8
    split_heads, sequence = (
        HeadLayout(heads, kv_heads, dim, world, groups, values),
        SequenceLayout(24, world, layout),
    )
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(24, batch, *shape, generator=generator, dtype=torch.float64)
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, values))
    ]
    upstream = torch.randn(24, batch, heads * values, generator=generator, dtype=torch.float64)

    def attend(part: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # What Transformer Engine's get_qkv_layout asks of contiguous tensors.
        offsets = [t.storage_offset() for t in (q, k, v)]
        assert offsets in ([0, 0, 0], [0, q.numel(), q.numel() + k.numel()])
        return run_sdpa(q, k, v, CORE).flatten(2)

    def body(buffers: ThreadBuffers) -> list[Tensor]:
        rows = sequence.positions(buffers.rank)
        # Strides as a framework has them: keys and values are columns of one tensor.
        both = torch.cat([t.detach()[rows] for t in whole[1:]], 3)
        inputs = [
            whole[0].detach()[rows].requires_grad_(),
            *(t.detach().requires_grad_() for t in both.split([dim, values], 3)),
        ]
        y = exchanged_attention(SymmetricExchange(buffers, split_heads, sequence), *inputs, attend)
        y.backward(upstream[rows], retain_graph=True)
        for t in inputs:
            t.grad = None
        y.backward(upstream[rows])  # a graph that was kept gives the same once more
        return [y.detach(), *(t.grad for t in inputs if t.grad is not None)]

    inputs = [t.requires_grad_() for t in whole]
    expected = attend(None, *inputs)
    expected.backward(upstream)
    for rank, found in enumerate(run_threads(world, transport, body)):
        rows = sequence.positions(rank)
        for a, b in zip(found, [expected.detach(), *(t.grad for t in inputs)], strict=True):
            assert b is not None
            torch.testing.assert_close(a, b[rows], rtol=1e-11, atol=1e-11)


def test_gradients_of_gradients_are_refused() -> None:
    heads, sequence = HeadLayout(4, 4, 8, 2), SequenceLayout(12, 2)

    def body(buffers: ThreadBuffers) -> None:
        exchange = SymmetricExchange(buffers, heads, sequence)
        call = AttentionCall(exchange, run_sdpa, CORE)
        x = torch.randn(6, 1, 32, dtype=torch.float64, requires_grad=True)
        weights = AttentionWeights(torch.randn(96, 32).double(), torch.randn(32, 32).double())
        q, k, v = (x.view(6, 1, 4, 8) for _ in range(3))
        alone = exchanged_attention(exchange, q, k, v, lambda part, *qkv: run_sdpa(*qkv, CORE))
        for y in (alone, overlapped_attention(x, weights, call)):
            for loss in (y.square().sum(), y.sum()):
                with pytest.raises(ConfigError, match="backward: create_graph: found True"):
                    torch.autograd.grad(loss, x, create_graph=True)

    run_threads(2, "sm_push", body)


def _same_when_recomputed(layer: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> None:
    """Two layers in a row give the same, and the same gradient, under checkpoints as without."""
    results = []
    for recompute in (False, True):
        h = mine = x.clone().requires_grad_()
        for _ in range(2):
            h = checkpoint(layer, h, use_reentrant=reentrant) if recompute else layer(h)
        h.square().sum().backward()
        assert mine.grad is not None
        results.append((h.detach(), mine.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("reentrant", "transport"), [(False, "sm_push"), (False, "copy_engine"), (True, "sm_push")]
)
def test_a_recomputation_that_stops_early_leaves_no_trace(reentrant: bool, transport: str) -> None:
    heads, sequence = HeadLayout(4, 4, 8, 2, 2), SequenceLayout(8, 2, "zigzag")

    def body(buffers: ThreadBuffers) -> None:
        def layer(x: Tensor) -> Tensor:
            q, k, v = (x.view(4, 1, 4, 8) * factor for factor in (1.0, 0.5, 2.0))
            exchange = SymmetricExchange(buffers, heads, sequence)
            return x + exchanged_attention(
                exchange, q, k, v, lambda part, *heads: run_sdpa(*heads, CORE)
            )

        x = torch.randn(
            4, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(buffers.rank)
        )
        _same_when_recomputed(layer, x, reentrant)
        assert (buffers.extra_barriers > 0) == (not reentrant), "whether it did stop early"

    run_threads(2, transport, body)


def test_all_ranks_choose_one_transport_though_their_shares_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[int, list[int]] = {}

    def choose(transport: str, sent_bytes: int) -> str:
        sizes.setdefault(threading.get_ident(), []).append(sent_bytes)
        return "sm_push"

    monkeypatch.setattr(symmetric, "choose_transport", choose)
    # Ranks hold 4 or 3 positions.
    check(4, "auto", replace(BASE, heads=12, kv_heads=2, length=13))
    first, *others = sizes.values()
    assert len(first) == 4 and others == [first] * 3
