"""The monitor of queued rounds, with events that the test sets by hand."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from megatron_fluid.comm.watchdog import FailureLog, RoundMonitor
from megatron_fluid.errors import PeerTimeoutError


class Event:
    def __init__(self, happened: bool = False) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


def lost(round_index: int) -> PeerTimeoutError:
    return PeerTimeoutError(1, 2, "moe dispatch", round_index, 5.0)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> RoundMonitor:
    """A monitor without its thread: the test decides when it looks."""
    monitor = RoundMonitor(on_timeout=lambda error: errors.append(error))
    errors.clear()
    monitor._thread = object()  # type: ignore[assignment]
    return monitor


errors: list[PeerTimeoutError] = []


def test_finished_rounds_are_forgotten(monitor: RoundMonitor) -> None:
    done, waiting = Event(True), Event()
    monitor.watch("a", Event(True), done, 5.0, lambda: lost(0))
    monitor.watch("a", Event(True), waiting, 5.0, lambda: lost(1))
    monitor.look(0.0)
    assert monitor.pending() == 1
    waiting.happened = True
    monitor.look(100.0)
    assert monitor.pending() == 0
    assert not errors


def test_the_clock_starts_when_the_round_does(monitor: RoundMonitor) -> None:
    started = Event()
    monitor.watch("a", started, Event(), 5.0, lambda: lost(3))
    monitor.look(0.0)
    monitor.look(1000.0)  # still behind a long computation
    assert not errors
    started.happened = True
    monitor.look(1001.0)
    monitor.look(1005.9)
    assert not errors
    monitor.look(1006.1)
    assert [error.round_index for error in errors] == [3]
    assert "rank 1: no answer from peer 2 in moe dispatch, round 3 after 5 s" in str(errors[0])


def test_lanes_are_independent(monitor: RoundMonitor) -> None:
    monitor.watch("a", Event(), Event(), 5.0, lambda: lost(0))
    monitor.watch("b", Event(True), Event(), 5.0, lambda: lost(1))
    monitor.look(0.0)
    monitor.look(6.0)
    assert [error.round_index for error in errors] == [1]


def test_another_ranks_failure_ends_the_wait_early(monitor: RoundMonitor) -> None:
    log = FailureLog(dist.HashStore(), grace_s=0)
    monitor.watch("a", Event(True), Event(), 300.0, lambda: lost(4), lambda: bool(log.first()))
    monitor.look(0.0)
    monitor.look(10.0)
    assert not errors
    log.explain(lost(0), 7, 8)
    monitor.look(20.0)
    assert [error.round_index for error in errors] == [4]


def test_the_thread_looks_by_itself() -> None:
    seen: list[PeerTimeoutError] = []
    monitor = RoundMonitor(on_timeout=seen.append, interval_s=0.01)
    monitor.watch("a", Event(True), Event(), 0.05, lambda: lost(2))
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [error.round_index for error in seen] == [2]


def test_the_root_cause_is_found_along_the_chain() -> None:
    """0 waits for 1, which waits for 2, which waits for 3, which says nothing. They may record it
    in any order."""
    errors = {rank: PeerTimeoutError(rank, rank + 1, "moe combine", rank, 5.0) for rank in range(3)}
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        log = FailureLog(dist.HashStore(), grace_s=0)
        for rank in order:
            log.explain(errors[rank], rank, rank + 1)
        for rank in range(2):
            explained = log.explain(errors[rank], rank, rank + 1)
            assert (explained.rank, explained.peer, explained.round_index) == (rank, rank + 1, rank)
            assert str(explained).endswith(f"root cause: {errors[2]}")
        assert log.explain(errors[2], 2, 3) is errors[2] or order[0] != 2


def test_ranks_that_wait_for_each_other() -> None:
    log = FailureLog(dist.HashStore(), grace_s=0)
    first = PeerTimeoutError(0, 1, "moe combine", 0, 5.0)
    assert log.explain(first, 0, 1) is first
    second = log.explain(PeerTimeoutError(1, 0, "moe dispatch", 2, 5.0), 1, 0)
    assert str(first) in str(second)
    assert "moe dispatch, round 2" in str(second)


def test_a_wait_for_the_whole_group_names_the_first_failure() -> None:
    log = FailureLog(dist.HashStore(), grace_s=0)
    first = lost(0)
    assert log.explain(first, 1, 2) is first
    assert str(first) in str(
        log.explain(PeerTimeoutError(5, None, "moe row counts", None, 5.0), 5, None)
    )


@pytest.mark.parametrize("peer", [1, None])
def test_a_rank_that_withdraws_its_remark_leaves_those_of_others(peer: int | None) -> None:
    """Ranks end an agreement at different times: one may be in the next by then."""
    log = FailureLog(dist.HashStore(), grace_s=0)
    log.remark(0, "rank 0 has changed")
    log.remark(1, "rank 1 has changed")
    log.withdraw_remark(0)
    error = PeerTimeoutError(0, peer, "attention", None, 5.0)
    assert "rank 1 has changed" in str(log.explain(error, 0, peer))
    log.withdraw_remark(1)
    again = FailureLog(dist.HashStore(), grace_s=0)
    assert "has changed" not in str(again.explain(error, 0, peer))


def test_an_error_names_the_remark_of_its_peer_and_not_of_another_rank() -> None:
    log = FailureLog(dist.HashStore(), grace_s=0)
    log.remark(1, "rank 1 has changed")
    log.remark(2, "rank 2 has changed")
    error = PeerTimeoutError(0, 1, "attention", None, 5.0)
    assert "rank 1 has changed" in str(log.explain(error, 0, 1))
