"""Signals, barriers and bounded waits over a simulated workspace: on a GPU, or with Triton's
interpreter on a CPU."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fluid.comm.workspace import Buffer, Workspace
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from tests.support.machine import INTERPRETED
from tests.support.simulated_driver import head_buffers
from tests.support.simulated_workspace import SimulatedWorkspace

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.interpreter
def test_signals_reach_every_rank_and_generations_grow() -> None:
    simulated = SimulatedWorkspace(3, DEVICE)
    domains = [head_buffers(simulated.rank(rank)) for rank in range(3)]
    for generation in (1, 2, 3):
        for domain in domains:
            domain.barrier("heads")
            domain.workspace.errors.abort.zero_()  # in a sequential run others are late
        domains[2].workspace.check_errors()
        for domain in domains:
            assert domain.workspace.flags("attention heads").flags.tolist() == [generation] * 3
    domains[2].workspace.close()
    with pytest.raises(FluidError, match="closed"):
        domains[2].barrier("heads")


@pytest.mark.interpreter
def test_a_missing_peer_is_named_and_the_next_wait_gives_up_at_once() -> None:
    space = SimulatedWorkspace(3, DEVICE).rank(0)
    head_buffers(space).barrier("heads")  # ranks 1 and 2 never arrive
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # errors are read from the host's memory
    with pytest.raises(PeerTimeoutError, match=r"rank 0.*peer 1.*attention heads") as caught:
        space.check_errors()
    assert "expected generation 1, seen 0" in str(caught.value)
    assert space.errors.abort.item() == 1


def test_ranks_meet_around_growth_and_old_memory_goes_first() -> None:
    """Else a peer writes into memory that is still to be zeroed, or that somebody still reads."""
    steps: list[str] = []

    class Noted(Workspace):
        old: weakref.ref[torch.Tensor] | None = None

        def _before_growth(self, name: str, nbytes: int) -> None:
            steps.append(f"before {nbytes}")

        def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
            assert self.old is None or self.old() is None
            steps.append("allocate")
            local = torch.empty(numel, dtype=dtype)
            self.old = weakref.ref(local)
            return Buffer(local, [], torch.empty(0), None)

        def _after_growth(self) -> None:
            steps.append("after")

    space = Noted(0, 2, torch.device("cpu"), 1.0)
    gc.disable()
    try:
        for numel in (4, 2, 8):
            space.buffer("x", (numel,), torch.float32)
    finally:
        gc.enable()
    assert steps == ["before 16", "allocate", "after", "before 32", "allocate", "after"]


def test_buffers_keep_their_address_and_are_seen_by_peers() -> None:
    simulated = SimulatedWorkspace(2)
    big = simulated.rank(0).buffer("x", (4, 8), torch.float32)
    small = simulated.rank(0).buffer("x", (2, 8), torch.float32)
    assert small.data_ptr() == big.data_ptr()
    simulated.rank(1).buffer("x", (4, 8), torch.float32).fill_(3.0)
    peers = simulated.rank(0).peer_buffers("x", torch.float32)
    assert torch.equal(peers[1], torch.full((32,), 3.0))
    first, second = (simulated.rank(rank).peer_pointers("x").tolist() for rank in range(2))
    assert first == second
    with pytest.raises(ConfigError, match="no-such"):
        simulated.rank(0).peer_pointers("no-such")


def test_closed_workspace_refuses() -> None:
    space = SimulatedWorkspace(1).rank(0)
    space.close()
    space.close()
    with pytest.raises(FluidError, match="closed"):
        space.buffer("x", (1,), torch.float32)


def test_memory_first_asked_for_in_inference_can_be_trained_with() -> None:
    workspace = SimulatedWorkspace(2, "cpu").rank(0)
    with torch.inference_mode():
        found = [workspace.reserve("rows", 4, torch.float32), workspace.flags("move").counter]
    assert not any(tensor.is_inference() for tensor in found)


class _NoWork(TorchDispatchMode):
    """Refuses every operator but those that only look at memory in another way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.is_view, f"{func} would be enqueued on the current stream"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_region_enqueues_nothing(ranks: int) -> None:
    """A kernel on another stream may use it at once: nothing of it may still be on its way."""
    space = SimulatedWorkspace(ranks, DEVICE).rank(1)
    first = space.flags("first", counters=2)
    with _NoWork():
        region = space.flags("second", slots=40, counters=3)
        third = space.flags("third")
    for name in ("flags", "addresses", "counter"):
        own, before = getattr(region, name), getattr(first, name)
        assert own.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    for found in (first, region, third):
        assert found.addresses[1] == found.flags.data_ptr()
        assert found.addresses.data_ptr() % 16 == 0
        assert not found.flags.any() and not found.counter.any()
    shapes = [tensor.shape for tensor in (region.addresses, region.counter, region.flags)]
    assert shapes == [(ranks,), (3,), (40,)]


def test_a_region_that_does_not_fit_is_refused() -> None:
    space = SimulatedWorkspace(2).rank(0)
    with pytest.raises(FluidError, match="no space for 65537 flags of 'much'"):
        space.flags("much", slots=(1 << 16) + 1)
    for number in range(512):
        space.flags(f"region {number}")
    with pytest.raises(FluidError, match="no space for 1 counters of 'one more': 16384 of 16384"):
        space.flags("one more")
    with pytest.raises(ConfigError, match="region 0"):
        space.flags("region 0", counters=2)
