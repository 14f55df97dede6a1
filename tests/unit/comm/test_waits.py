"""The monitor of waits, with events that the test sets by hand, and what failures tell."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fluid.comm import waits
from megatron_fluid.comm.agreement import Agreement
from megatron_fluid.comm.waits import GroupWaits, WaitMonitor, explain
from megatron_fluid.comm.watcher import Watcher
from megatron_fluid.errors import PeerTimeoutError
from tests.support.agreements import agreements, on_all

HAPPENED, NEVER = (lambda: True), (lambda: False)


def lost(round_index: int) -> PeerTimeoutError:
    return PeerTimeoutError(1, 2, "moe dispatch", round_index, 5.0)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> WaitMonitor:
    """A monitor without its thread: the test decides when it looks."""
    errors.clear()
    return WaitMonitor(errors.append, watcher=mock.Mock())


errors: list[PeerTimeoutError] = []


def test_finished_rounds_are_forgotten(monitor: WaitMonitor) -> None:
    waiting = threading.Event()
    monitor.watch("a", HAPPENED, HAPPENED, 5.0, lambda: lost(0))
    monitor.watch("a", HAPPENED, waiting.is_set, 5.0, lambda: lost(1))
    monitor.look(0.0)
    assert len(monitor._lanes["a"]) == 1
    waiting.set()
    monitor.look(100.0)
    assert not monitor._lanes["a"]
    assert not errors


def test_the_clock_starts_when_the_round_does(monitor: WaitMonitor) -> None:
    started = threading.Event()
    monitor.watch("a", started.is_set, NEVER, 5.0, lambda: lost(3))
    monitor.look(0.0)
    monitor.look(1000.0)  # still behind a long computation
    assert not errors
    started.set()
    monitor.look(1001.0)
    monitor.look(1005.9)
    assert not errors
    monitor.look(1006.1)
    assert [error.round_index for error in errors] == [3]
    assert "rank 1: no answer from peer 2 in moe dispatch, round 3 after 5 s" in str(errors[0])


def test_lanes_are_independent(monitor: WaitMonitor) -> None:
    monitor.watch("a", NEVER, NEVER, 5.0, lambda: lost(0))
    monitor.watch("b", HAPPENED, NEVER, 5.0, lambda: lost(1))
    monitor.look(0.0)
    monitor.look(6.0)
    assert [error.round_index for error in errors] == [1]


def test_another_ranks_failure_ends_the_wait_early(monitor: WaitMonitor) -> None:
    channels = agreements(2)
    on_all(channels, lambda w: w.barrier("begin"))
    failed = channels[0].failed
    monitor.watch("a", HAPPENED, NEVER, 300.0, lambda: lost(4), lambda: bool(failed()))
    monitor.look(0.0)
    monitor.look(10.0)
    assert not errors
    channels[1].report_failure(0, "rank 1 waited")
    monitor.look(20.0)
    assert [error.round_index for error in errors] == [4]


def test_the_watcher_looks_by_itself_and_may_query_during_a_capture_from_the_first_wait_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver lets a thread query only where CUDA is initialised, and the watcher may have
    started before that. Queries are for the GPU of the thread that waits, not for GPU 0."""
    seen: list[PeerTimeoutError] = []
    threads: list[tuple[threading.Thread, int]] = []
    monkeypatch.setattr(
        waits,
        "allow_queries_during_capture",
        lambda device: threads.append((threading.current_thread(), device)),
    )
    looked, watcher = threading.Event(), Watcher()
    watcher.add(lambda now: looked.set() or 60.0)  # type: ignore[func-returns-value]
    assert looked.wait(20) and not threads
    monitor = WaitMonitor(on_timeout=seen.append, interval_s=0.01, watcher=watcher)
    monitor.watch("a", HAPPENED, HAPPENED, 5.0, lambda: lost(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monitor.watch("a", HAPPENED, NEVER, 0.05, lambda: lost(2))
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [error.round_index for error in seen] == [2]
    assert threads == [(watcher._thread, 3)]


def explained(channels: Agreement, error: PeerTimeoutError) -> str:
    return explain(error, channels, grace_s=0)


def joined(ranks: int) -> list[Agreement]:
    channels = agreements(ranks)
    on_all(channels, lambda w: w.barrier("begin"))
    return channels


def test_the_root_cause_is_found_along_the_chain() -> None:
    """0 waits for 1, which waits for 2, which waits for 3, which says nothing. They may report it
    in any order."""
    errors = {rank: PeerTimeoutError(rank, rank + 1, "moe combine", rank, 5.0) for rank in range(3)}
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        channels = joined(4)
        for rank in order:
            explained(channels[rank], errors[rank])
        for rank in range(2):
            assert explained(channels[rank], errors[rank]) == f"root cause: {errors[2]}"
        assert explained(channels[2], errors[2]) == ""


def test_ranks_that_wait_for_each_other_name_each_other() -> None:
    channels = joined(2)
    first = PeerTimeoutError(0, 1, "moe combine", 0, 5.0)
    assert explained(channels[0], first) == ""
    second = PeerTimeoutError(1, 0, "moe dispatch", 2, 5.0)
    assert explained(channels[1], second) == f"root cause: {first}"


def test_a_wait_for_the_whole_group_names_who_is_missing_and_where_the_others_are() -> None:
    channels = joined(4)
    explained(channels[0], PeerTimeoutError(0, None, "moe row counts", None, 5.0))
    explained(channels[3], PeerTimeoutError(3, None, "growth of memory", None, 5.0))
    told = explained(channels[1], PeerTimeoutError(1, None, "moe row counts", None, 5.0))
    assert told.startswith("rank 2 reported no wait: lost, frozen, or in other work; rank 0: ")
    assert "rank 3: rank 3: no answer from its group in growth of memory" in told


def test_a_failure_is_told_to_all_groups_of_the_rank() -> None:
    """0 waits in a group with 1, which waits in another group for a rank that is lost."""
    of_both = agreements(2, group="other")
    on_all(of_both, lambda w: w.barrier("begin"))
    channels = joined(2)
    with mock.patch.object(waits, "live_agreements", return_value=[channels[1]]):
        explain(PeerTimeoutError(0, 1, "attention", None, 5.0), of_both[0], grace_s=0)
    assert "attention" in channels[0].failed()
    assert "attention" in explained(channels[0], PeerTimeoutError(0, 1, "moe dispatch", 1, 5.0))


@pytest.mark.parametrize("capturing", [False, True])
def test_a_collective_on_a_gpu_is_watched_unless_it_is_captured(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    order: list[str] = []
    watched: list[tuple[Any, ...]] = []
    names = iter(("started", "finished"))

    class Recorded:
        def __init__(self) -> None:
            self.name = next(names)

        def record(self, stream: Any) -> None:
            order.append(self.name)

        def query(self) -> str:
            return self.name

    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monitor = SimpleNamespace(watch=lambda *arguments: watched.append(arguments))
    monkeypatch.setattr(waits, "MONITOR", monitor)
    group = object.__new__(GroupWaits)
    group.rank, group.channel, group._used = 2, agreements(4)[2], True
    group.device, group._place = torch.device("cuda", 0), lambda peer: ""
    work = SimpleNamespace(wait=lambda: order.append("wait"))
    group.collective("low_latency.dispatch over nccl", lambda: work, 7.0)  # type: ignore[arg-type, return-value]
    if capturing:
        assert order == ["wait"] and not watched
        return
    assert order == ["started", "wait", "finished"]
    ((lane, started, finished, timeout_s, error, _),) = watched
    assert (started(), finished(), timeout_s) == ("started", "finished", 7.0)
    monkeypatch.setattr(waits, "_GRACE_S", 0.0)
    assert lane is stream
    assert "rank 2: no answer from its group in low_latency.dispatch over nccl after 7 s" in str(
        error()
    )
