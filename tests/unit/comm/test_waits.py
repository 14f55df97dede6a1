"""The watcher of waits, with events that the test sets by hand, and what failures tell."""

import threading
import time
from unittest import mock

import pytest
import torch

from megatron_fluid.comm import waits
from megatron_fluid.comm import watcher as watcher_module
from megatron_fluid.comm.agreement import Agreement
from megatron_fluid.comm.waits import GroupWaits, explain
from megatron_fluid.comm.watcher import Watcher
from megatron_fluid.errors import PeerTimeoutError
from tests.support.agreements import agreements, joined

HAPPENED, NEVER = (lambda: True), (lambda: False)


def lost(round_index: int) -> PeerTimeoutError:
    return PeerTimeoutError(1, 2, "moe dispatch", round_index, 5.0)


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    """A watcher without its thread: the test decides when it looks."""
    errors.clear()
    monkeypatch.setattr(Watcher, "add", lambda self, look: None)
    return Watcher(errors.append)


errors: list[Exception] = []


def test_the_clock_of_each_lane_starts_when_its_first_unfinished_wait_does(
    watcher: Watcher,
) -> None:
    started, late = threading.Event(), threading.Event()
    watcher.watch("a", HAPPENED, HAPPENED, 5.0, lambda: lost(0))
    watcher.watch("a", HAPPENED, late.is_set, 5.0, lambda: lost(1))
    watcher.watch("b", started.is_set, NEVER, 5.0, lambda: lost(3))
    watcher.look(0.0)
    assert len(watcher._lanes["a"]) == 1, "what has finished is forgotten"
    late.set()
    watcher.look(1000.0)  # b is still behind a long computation
    started.set()
    for now in (1001.0, 1005.9):
        watcher.look(now)
        assert not errors and not watcher._lanes["a"]
    watcher.look(1006.1)
    assert "rank 1: no answer from peer 2 in moe dispatch, round 3 after 5 s" in str(errors[0])


def test_another_ranks_failure_ends_the_wait_early(watcher: Watcher) -> None:
    channels = joined(2)
    failed = channels[0].failed
    watcher.watch("a", HAPPENED, NEVER, 300.0, lambda: lost(4), lambda: bool(failed()))
    watcher.look(0.0)
    watcher.look(10.0)
    assert not errors
    channels[1].report_failure(0, "rank 1 waited")
    watcher.look(20.0)
    assert [error.round_index for error in errors] == [4]


def test_the_watcher_looks_by_itself_and_may_query_during_a_capture_from_the_first_wait_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver lets a thread query only where CUDA is initialised, and the watcher may have
    started before that. Queries are for the GPU of the thread that waits, not for GPU 0."""
    seen: list[PeerTimeoutError] = []
    threads: list[tuple[threading.Thread, int]] = []
    monkeypatch.setattr(
        watcher_module,
        "allow_queries_during_capture",
        lambda device: threads.append((threading.current_thread(), device)),
    )
    looked = threading.Event()
    watcher = Watcher(on_timeout=seen.append, interval_s=0.01)
    watcher.add(lambda now: looked.set() or 60.0)  # type: ignore[func-returns-value]
    assert looked.wait(20) and not threads
    watcher.watch("a", HAPPENED, HAPPENED, 5.0, lambda: lost(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    watcher.watch("a", HAPPENED, NEVER, 0.05, lambda: lost(2))
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [error.round_index for error in seen] == [2]
    assert threads == [(watcher._thread, 3)]


def explained(channels: Agreement, error: PeerTimeoutError) -> str:
    return explain(error, channels, grace_s=0)


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
    of_both, channels = joined(2, "other"), joined(2)
    with mock.patch.object(waits, "live_agreements", return_value=[channels[1]]):
        explain(PeerTimeoutError(0, 1, "attention", None, 5.0), of_both[0], grace_s=0)
    assert "attention" in channels[0].failed()
    assert "attention" in explained(channels[0], PeerTimeoutError(0, 1, "moe dispatch", 1, 5.0))


@pytest.mark.parametrize("capturing", [False, True])
def test_a_collective_on_a_gpu_is_watched_unless_it_is_captured(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    happened, watcher = mock.Mock(), mock.Mock()
    events = [happened.started, happened.finished]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.pop(0))
    monkeypatch.setattr(waits, "WATCHER", watcher)
    monkeypatch.setattr(waits, "_GRACE_S", 0.0)
    group = object.__new__(GroupWaits)
    group.rank, group.channel, group._used = 2, agreements(4)[2], True
    group.device, group._place = torch.device("cuda", 0), lambda peer: ""
    group.collective("low_latency.dispatch over nccl", lambda: happened.work, 7.0)
    order = [call[0] for call in happened.mock_calls]
    if capturing:
        assert order == ["work.wait"] and not watcher.mock_calls
        return
    assert order == ["started.record", "work.wait", "finished.record"]
    lane, started, finished, timeout_s, error, _ = watcher.watch.call_args.args
    queries = happened.started.query, happened.finished.query
    assert (lane, started, finished, timeout_s) == ("stream", *queries, 7.0)
    told = "rank 2: no answer from its group in low_latency.dispatch over nccl after 7 s"
    assert told in str(error())
