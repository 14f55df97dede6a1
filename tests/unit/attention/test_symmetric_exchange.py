"""Attention over symmetric memory against the one-process reference, and its receive buffers: W
ranks as threads of one process (thread_ranks.py), kernels interpreted."""

import contextlib
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_fluid.attention import tables
from megatron_fluid.attention.attention_kernels import CoreCase, run_sdpa
from megatron_fluid.attention.exchange import symmetric
from megatron_fluid.attention.exchange.protocol import Projection
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange, choose_transport
from megatron_fluid.attention.exchanged import exchanged_attention
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.overlap import AttentionCall, AttentionWeights, overlapped_attention
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.attention.tables import FUSED
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError, FluidError
from tests.distributed.test_attention import Case, _compare, _data, _layers, run_steps
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_driver import head_buffers
from tests.support.simulated_workspace import SimulatedWorkspace
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
        2,
    ),
    "groups-uneven": (replace(BASE, groups=2, length=13, layout="zigzag", chunks=2), 2),
    "mqa": (replace(BASE, kv_heads=1, rotary=Rotary(4, 500.0, True), microbatches=2), 2),
    "gqa-shared": (
        replace(BASE, heads=12, kv_heads=2, causal=False, dtype=F32, batch=1, bias=True),
        4,
    ),
    "bf16": (replace(BASE, dtype=torch.bfloat16, length=70, qk_norm=True, batch=1), 2),
    "two-ranks": (ODD, 2),
    "three-ranks": (ODD, 3),
}


@TRANSPORTS
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, transport: str) -> None:
    check(CASES[name][1], transport, CASES[name][0])


@TRANSPORTS
@pytest.mark.parametrize("name", ["groups-uneven", "mqa", "gqa-shared", "bf16", "three-ranks"])
def test_queries_keys_and_values_that_arrive_apart_equal_the_reference(
    name: str, transport: str
) -> None:
    """Without norms, which need them together."""
    case, world = CASES[name]
    check(world, transport, replace(case, qk_norm=False), apart=True)


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
        SequenceLayout(16, world, layout),
    )
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(16, batch, *shape, generator=generator, dtype=torch.float64)
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, values))
    ]
    upstream = torch.randn(16, batch, heads * values, generator=generator, dtype=torch.float64)

    def attend(part: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _lying_apart(q, k, v, CORE).flatten(2)

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
        wanted = [t[rows] for t in (expected.detach(), *(t.grad for t in inputs)) if t is not None]
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


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


# ---- receive buffers, captures, and the choice of a transport


def test_a_receive_buffer_is_written_again_only_when_every_rank_has_read_it() -> None:
    heads, sequence = HeadLayout(4, 4, 8, 2), SequenceLayout(6, 2)

    def body(buffers: ThreadBuffers) -> list[Tensor]:
        found = []
        for turn in range(4):  # heads, and no rows: what a recomputation does that stops early
            exchange = SymmetricExchange(buffers, heads, sequence)
            x = torch.full((3, 1, 8), float(10 * turn + buffers.rank), dtype=torch.float64)
            matrix = torch.eye(8, dtype=torch.float64).repeat(1, 4)
            projection = Projection(matrix, None, True)
            left = exchange.project("test", torch.zeros_like(x), projection)  # what nobody takes
            sent = exchange.project("test", x, projection)
            with pytest.raises(FluidError, match="another exchange has begun"):
                left.take(0)
            found.append(sent.take(0)[1])
        assert buffers.extra_barriers == 7
        return found

    for transport in ("sm_push", "copy_engine"):
        for found in run_threads(2, transport, body):
            for turn, packed in enumerate(found):
                assert packed[:3].eq(10 * turn).all() and packed[3:].eq(10 * turn + 1).all()


@TRANSPORTS
def test_what_was_taken_is_the_callers_alone(transport: str) -> None:
    heads, sequence = HeadLayout(4, 4, 8, 2, 2), SequenceLayout(8, 2)

    def body(buffers: ThreadBuffers) -> None:
        exchange = SymmetricExchange(buffers, heads, sequence)
        x, weight = torch.randn(4, 1, 8), torch.randn(heads.qkv_rows, 8)
        sent = exchange.project("test", x, Projection(weight.t(), None))
        taken = [sent.take(group)[1] for group in range(heads.groups)]
        kept = StorageWeakRef(taken[0].untyped_storage())
        assert not kept.expired()
        del taken
        gc.collect()  # Triton's interpreter leaves its arguments in cycles
        assert kept.expired(), "the exchange under way keeps what nobody reads again"

    run_threads(2, transport, body)


def test_copies_go_where_a_receive_buffer_is_after_it_has_grown() -> None:
    workspace = SimulatedWorkspace(2).rank(0)
    buffers = head_buffers(workspace)
    kept = []  # so that memory is not given out again
    for numel in (16, 1 << 16):
        kept.append(workspace.reserve("attention heads", numel, torch.float32))
        told = buffers.pointers("heads", torch.float32).tolist()
        assert buffers.addresses("heads", torch.float32) == told
    assert kept[0].data_ptr() != kept[1].data_ptr() == buffers.addresses("heads", torch.float32)[0]


def test_the_transport_is_a_matter_of_bytes() -> None:
    assert [choose_transport("auto", size) for size in (0, 9 << 20, 36 << 20)] == [
        "sm_push",
        "sm_push",
        "copy_engine",
    ]
    assert choose_transport("sm_push", 1 << 40) == "sm_push"
    with pytest.raises(ConfigError, match="transport"):
        head_buffers(SimulatedWorkspace(1).rank(0), "pull")


def test_nothing_grows_in_a_backward() -> None:
    heads, sequence = HeadLayout(8, 4, 8, 2, 2), SequenceLayout(8, 2)

    def body(buffers: ThreadBuffers) -> tuple[int, int]:
        [layer] = _layers(replace(BASE, groups=1), None, torch.device("cpu"))
        x = torch.randn(4, 2, BASE.hidden, dtype=torch.float64, requires_grad=True)
        exchange = SymmetricExchange(buffers, heads, sequence)
        call = AttentionCall(exchange, run_sdpa, CORE)
        y = overlapped_attention(x, layer.weights(), call)
        before = buffers.workspace.growths
        y.sum().backward()
        return before, buffers.workspace.growths

    assert run_threads(2, "sm_push", body) == [(3, 3)] * 2, "heads and the rows of two groups"


def test_heads_that_16_byte_accesses_do_not_fit_are_refused() -> None:
    group: Any = None  # is not asked
    said = SymmetricExchange.unsupported_reason(group, 6, "cuda")
    assert said == "a head of 6 16-bit values is not a multiple of 16 bytes"


def test_head_groups_are_worth_it_where_much_is_sent() -> None:
    def groups(heads: int, kv_heads: int, length: int) -> int:
        layout = HeadLayout(heads, kv_heads, 128, 4)
        return SymmetricExchange.head_groups(None, layout, length, 1, 2)

    assert [groups(32, 8, length) for length in (4096, 16384, 65536)] == [1, 1, 2]
    assert groups(128, 128, 16384) == 4
    assert groups(32, 4, 1 << 20) == 1


def test_tables_that_a_capture_read_are_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    @tables.cached_tables(1)
    def table(length: int) -> Tensor:
        made.append(length)
        return torch.zeros(length)

    kept: dict[int, object] = {}
    monkeypatch.setattr(tables, "_captured", kept)
    before = table(3)
    assert not kept
    monkeypatch.setattr(tables, "capturing", lambda: True)
    assert table(3) is before
    with pytest.raises(FluidError, match="table: run attention once at this size"):
        table(4)
    monkeypatch.setattr(tables, "capturing", lambda: False)
    table(5)
    assert made == [3, 5] and list(kept.values()) == [before]


def test_a_capture_keeps_the_tables_of_an_exchange_that_was_used_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: dict[int, object] = {}
    monkeypatch.setattr(tables, "_captured", kept)
    exchange = SymmetricExchange(
        head_buffers(SimulatedWorkspace(1).rank(0)), HeadLayout(4, 4, 8, 1), SequenceLayout(6, 1)
    )
    before = exchange.tables(FUSED)
    assert exchange.tables(FUSED) is before and not kept
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    assert exchange.tables(FUSED) is before and list(kept.values()) == [before]
