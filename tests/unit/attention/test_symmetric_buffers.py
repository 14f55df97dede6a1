"""The receive buffers of attention over symmetric memory: who may write them when, what they keep,
how they grow, and what a capture finds of them and of tables; the choice of a transport."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fluid.attention import tables
from megatron_fluid.attention.attention_kernels import run_sdpa
from megatron_fluid.attention.exchange import symmetric
from megatron_fluid.attention.exchange.protocol import Projection
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange, choose_transport
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.overlap import AttentionCall, overlapped_attention
from megatron_fluid.attention.tables import FUSED
from megatron_fluid.errors import ConfigError, FluidError
from tests.distributed.test_attention import _layers
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_driver import head_buffers
from tests.support.simulated_workspace import SimulatedWorkspace
from tests.support.thread_ranks import ThreadBuffers, run_threads
from tests.unit.attention.test_symmetric_exchange import BASE, CORE, TRANSPORTS

pytestmark = NEEDS_INTERPRETER


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
        [layer] = _layers(dataclasses.replace(BASE, groups=1), None, torch.device("cpu"))
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
