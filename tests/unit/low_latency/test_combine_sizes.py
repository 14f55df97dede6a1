"""A combine that would read past what the dispatch left is refused by name."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.transport import CombineRequest
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace


@pytest.fixture
def dispatched() -> AllToAll:
    """One rank that has dispatched 2 of at most 4 tokens in the packed layout."""
    from megatron_fluid.low_latency.peer_memory import PeerMemory

    layout = Layout(4, 2, 1, 1, 1, 16, 32, 0)
    space = SimulatedWorkspace(1).rank(0)
    ata = AllToAll(layout, PeerMemory(layout, space), torch.device("cpu"))
    counts, offsets = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(ata.packed_rows(8), 16, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    ata.dispatch(
        counts, rows, None, x, None, ids, weights=weights, out_expert_offsets=offsets, alignment=8
    )
    return ata


@NEEDS_INTERPRETER
def test_more_tokens_than_were_dispatched_are_refused(dispatched: AllToAll) -> None:
    y = torch.ones(dispatched.packed_rows(8), 16, dtype=torch.bfloat16)
    out, ids = torch.zeros(3, 16), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="out_tokens: found '3 tokens', allowed: at most the 2"):
        dispatched.combine(out, ids, None, y)
    dispatched.combine(out[:2], torch.tensor([[0], [1]]), None, y)
    assert torch.equal(out[:2], torch.ones(2, 16))


@NEEDS_INTERPRETER
def test_too_few_packed_rows_are_refused(dispatched: AllToAll) -> None:
    rows = dispatched.packed_rows(8)
    y = torch.ones(rows - 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=f"expert_y: found '{rows - 1} packed rows'"):
        dispatched.combine(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.int64), None, y)


@NEEDS_INTERPRETER
def test_weights_of_too_many_entries_belong_to_the_dispatch() -> None:
    from megatron_fluid.low_latency.peer_memory import PeerMemory

    layout = Layout((1 << 16) + 1, 16, 16, 1, 1, 8, 16, 0)
    transport = PeerMemory(layout, SimulatedWorkspace(1).rank(0))
    with pytest.raises(ConfigError, match=r"max_num_tokens \* experts_per_token: found 1048592"):
        transport.combine(CombineRequest(weights=torch.ones(1, 16), send=True, exchange=True))
