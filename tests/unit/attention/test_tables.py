"""Tables that are made once a size, and kept for the CUDA graphs that read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fluid.attention import tables
from megatron_fluid.attention.exchange import symmetric
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.tables import FUSED
from megatron_fluid.errors import FluidError
from tests.support.simulated_driver import head_buffers
from tests.support.simulated_workspace import SimulatedWorkspace


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
