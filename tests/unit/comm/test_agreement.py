"""Values between ranks: what an earlier session of a group has stored is never read."""

import contextlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fluid.comm import agreement as module
from megatron_fluid.comm.agreement import Agreement, agreement
from megatron_fluid.comm.groups import close_group
from megatron_fluid.comm.p2p_rounds import detect_hosts
from megatron_fluid.errors import FluidError, PeerTimeoutError
from tests.support.agreements import FrozenStore, agreements, joined, on_all
from tests.support.launch import on_ranks, world_group

PACKAGE = Path(__file__).resolve().parents[3]
# Calls of a store's methods on something that is named like one, and exchanges of objects, which
# have no bound and no name.
STORE_CALLS = re.compile(
    r"store\w*\.(set|get|add|check|wait|compare_set|delete_key|multi_get)\("
    r"|(get_group_store|_get_default_store)\("
    r"|\b(dist|torch\.distributed)\.(all_gather_object|broadcast_object_list|gather_object|barrier)\("
)


def test_every_rank_gets_every_value_by_rank() -> None:
    channels = agreements(3)
    assert on_all(channels, lambda w: w.gather("sizes", w.rank * 10)) == [[0, 10, 20]] * 3
    assert on_all(channels, lambda w: w.first("choice", f"of {w.rank}")) == ["of 0"] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_a_second_session_waits_for_the_late_rank_and_reads_no_old_value(late: int) -> None:
    store = dist.HashStore()
    on_all(agreements(2, store), lambda w: w.gather("figures", f"first session, {w.rank}"))
    channels, released = agreements(2, store), threading.Event()

    def second(w: Agreement) -> list[str]:
        if w.rank == late:
            released.wait(0.3)
        return w.gather("figures", f"second session, {w.rank}")

    assert on_all(channels, second) == [["second session, 0", "second session, 1"]] * 2


def test_a_first_rank_that_stops_in_the_handshake_is_the_one_that_is_named() -> None:
    """It has answered one rank, which finds no value of the other: that one waits for an answer."""
    first, *others = agreements(3, timeout_s=3.0)

    def stop_half_way() -> None:
        first._set(f"{first._session}/0/0", ("meet", None))
        while (request := first._request_of(1)) is None:
            time.sleep(0.001)
        first._set(f"{first._group_key}/accept/{request}", first._session)

    threading.Thread(target=stop_half_way).start()
    for error in on_all(others, lambda w: w.gather("meet", w.rank)):
        assert isinstance(error, PeerTimeoutError)
        assert error.peer == 0 and "rank 0 did not come" in str(error)


def test_published_values_are_of_this_session_and_the_newest_counts() -> None:
    store = dist.HashStore()
    for number in range(3):
        channels = agreements(2, store)
        assert channels[0].read("remark", [1]) == {}
        reader = threading.Thread(target=channels[1].publish, args=("remark", f"session {number}"))
        reader.start()
        assert channels[0].read("remark", [1], 30.0) == {1: f"session {number}"}
        reader.join()
        channels[1].publish("remark", "newer")
        assert channels[0].read("remark", [0, 1]) == {1: "newer"}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named_with_the_operation(lost: int) -> None:
    channels = [w for w in agreements(3, timeout_s=3.0) if w.rank != lost]
    for error in on_all(channels, lambda w: w.barrier("growth of memory")):
        assert isinstance(error, PeerTimeoutError) and error.peer == lost
        assert f"growth of memory after 3 s: rank {lost} did not come" in str(error)


def test_ranks_in_different_operations_are_told_apart_at_once() -> None:
    channels = agreements(2)
    found = on_all(channels, lambda w: w.gather(["make the workspace", "measure links"][w.rank], 0))
    for error in found:
        assert isinstance(error, FluidError)
        assert "rank 0: make the workspace; rank 1: measure links" in str(error)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failure_of_one_rank_ends_the_waits_of_the_others(failed: int) -> None:
    channels = joined(2)
    channels[failed].report_failure(None, "the experts of this rank have changed")
    error = on_all([channels[1 - failed]], lambda w: w.barrier("next"))[0]
    assert isinstance(error, FluidError) and "experts of this rank have changed" in str(error)
    assert channels[1 - failed].failed() == "the experts of this rank have changed"


def test_a_group_of_one_process_asks_nobody() -> None:
    channels = Agreement(None, "", 0, range(4), lambda: 0.0)
    assert channels.gather("sizes", 3) == [3] * 4
    channels.publish("remark", "x")
    assert channels.read("remark", range(4), 10.0) == {} and channels.failed() == ""


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fluid.comm.agreement.STORE_S", 0.05)
    store = FrozenStore()
    channels = Agreement(store, "group", 0, range(2), lambda: 0.1)  # type: ignore[arg-type]
    begin = time.monotonic()
    for _ in range(20):
        assert channels.failed() == "" and channels.read("beat", [0, 1]) == {}
    with pytest.raises(PeerTimeoutError, match="the store of the job does not answer"):
        channels.barrier("growth")
    assert time.monotonic() - begin < 10 and store.calls == 1


# ---- process groups of torch


@on_ranks(2)
def test_a_closed_group_and_twins_keep_their_values_apart(rank: int, world: int) -> None:
    group = world_group()
    for number in range(3):
        if rank == number % 2:
            time.sleep(0.2)
        found = agreement(group).gather("session", (number, rank))
        assert found == [(number, 0), (number, 1)]
        assert detect_hosts(group)[0] == [0, 0]
        close_group(group)
    twins = [dist.new_group([0, 1]) for _ in range(2)]  # groups of the same ranks
    for number, twin in enumerate(twins):
        assert agreement(twin).gather("twin", (number, rank)) == [(number, 0), (number, 1)]


@on_ranks(2)
def test_threads_that_ask_at_once_share_one_session(rank: int, world: int) -> None:
    both, real = threading.Barrier(2), module._of

    def slow(group: Any) -> Agreement:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1.0)  # until the other thread is here, too
        return real(group)

    with mock.patch.object(module, "_of", slow), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(agreement, [world_group()] * 2)
    assert first is second


# ---- the only user of stores


def test_stores_and_unbounded_exchanges_are_used_by_the_agreement_alone() -> None:
    files = [*(PACKAGE / "megatron_fluid").rglob("*.py"), *(PACKAGE / "patches").rglob("*.py")]
    assert len(files) > 100
    users = [
        path.name
        for path in files
        if "cli" not in path.parts and STORE_CALLS.search(path.read_text())
    ]
    assert users == ["agreement.py"]
