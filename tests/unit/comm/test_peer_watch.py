"""What a rank finds out about peers that are gone, with clocks and stacks that the test sets."""

import os
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_fluid.comm import peer_watch
from megatron_fluid.comm.peer_watch import PeerWatch, place_of, watched_peers
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from tests.support.agreements import agreements, joined

BOUND_S = 10.0  # beats are 1 s apart
COLLECTIVE, OWN = ("all_reduce (megatron/a.py:1)", True), ("write (megatron/b.py:2)", False)


class World:
    """Watches of all ranks on one store; their threads are the test."""

    def __init__(self, end: bool = True) -> None:
        self.ended: list[PeerTimeoutError] = []
        self.watches = [
            PeerWatch(of, BOUND_S, end, on_timeout=self.ended.append, thread=-1) for of in joined(3)
        ]
        for watch in self.watches:
            self.stand(watch, COLLECTIVE, 0.0)

    def stand(self, watch: PeerWatch, where: tuple[str, bool], since: float) -> None:
        (watch._place, watch._waits), watch._moved_at = where, since

    def beat(self, until: float, lost: int | None = None, at: float = 0.0) -> None:
        """Beats of all ranks each second; the lost one's stop at `at`."""
        for second in range(int(until) + 1):
            for rank, watch in enumerate(self.watches):
                if rank != lost or second < at:
                    watch.step(float(second))


def test_a_rank_that_is_lost_is_named_with_the_operation_and_the_process_ends() -> None:
    world = World()
    world.beat(12, lost=2)
    assert "rank 2 never came" in str(world.ended[0])
    world = World()
    world.beat(9, lost=2, at=3)
    assert not world.ended, "within the bound"
    world.beat(12, lost=2)
    assert [(error.rank, error.peer) for error in world.ended] == [(0, 2), (1, 2)]
    assert "in all_reduce (megatron/a.py:1) after 1" in str(world.ended[0])
    assert "rank 2 stopped beating" in str(world.ended[0])


def test_without_being_asked_to_end_it_only_tells(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(end=False)
    world.beat(40, lost=1, at=2)
    told = capsys.readouterr().err.splitlines()
    assert not world.ended
    assert len(told) == 2, "once a rank"
    assert "rank 0: no answer from peer 1 in all_reduce" in told[0]


def test_ranks_that_all_wait_for_each_other_end_and_say_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World()
    world.stand(world.watches[1], ("barrier (megatron/c.py:3)", True), 1.0)
    world.beat(12)
    error = str(world.ended[0])
    assert "no answer from its group in all_reduce" in error
    assert "no rank is missing; rank 1 in barrier (megatron/c.py:3) for" in error
    assert "rank 2 in all_reduce" in error


def test_a_rank_that_works_for_long_ends_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.stand(world.watches[1], OWN, 0.0)
    world.beat(30)
    assert not world.ended
    told = capsys.readouterr().err
    assert "rank 1 in write (megatron/b.py:2) for" in told
    assert "rank 1: no answer" not in told, "a rank that works waits for nobody"


def test_moving_on_starts_the_clock_again() -> None:
    world = World()
    world.beat(8, lost=2, at=3)
    for watch in world.watches:
        watch._moved_at = 8.0
    world.beat(16, lost=2, at=3)
    assert not world.ended


def gloo_error() -> RuntimeError:
    return RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


@pytest.fixture
def fast() -> World:
    """Beats 10 ms apart."""
    world = World()
    for watch in world.watches:
        watch.interval_s = 0.01
        watch.step(0.0)
    return world


def test_an_error_of_a_connection_names_the_rank_that_stopped(
    fast: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = [2]

    def sleep(seconds: float) -> None:
        for rank in alive:
            fast.watches[rank].step(0.0)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(peer_watch, "time", clock)
    error = fast.watches[0].explain(gloo_error())
    assert error is not None and error.peer == 1
    assert "rank 1 stopped beating" in str(error)
    assert "Connection closed by peer" in str(error)
    alive.append(1)
    assert fast.watches[0].explain(gloo_error()) is None, "all are alive"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_before_the_first_beat_names_the_rank_that_never_came(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the store, where a rank that rank 0 has not let in yet finds no beat."""
    world = World()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        world.watches[1 - rank].step(clock.now)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(peer_watch, "time", clock)
    error = world.watches[rank].explain(gloo_error())
    assert error is not None and error.peer == 2 and "rank 2 never came" in str(error)


@pytest.mark.parametrize(("first", "told"), [
    ("ValueError: NaN in the loss", "rank 1 ended: ValueError: NaN in the loss"),
    ("done", "no answer from peer 3"),
])  # fmt: skip
def test_what_other_ranks_ended_with_is_the_cause(fast: World, first: str, told: str) -> None:
    fast.watches[1].end(first)
    fast.watches[2].end(f"lost: rank 2: no answer from peer {1 if first != 'done' else 3}")
    assert told in str(fast.watches[0].explain(gloo_error()))
    own = fast.watches[0].explain(PeerTimeoutError(0, None, "moe row counts", None, 5.0))
    assert str(own).startswith("rank 0: no answer from its group in moe row counts after 5 s: ")
    assert told in str(own), "an error of our own keeps its words"


def test_the_holder_of_the_store_lets_the_others_read_before_it_ends(
    fast: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, looks = fast.watches[0], list[float]()
    holder._holds_store = True

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        fast.watches[1].step(0.0)  # alive for two looks
        if len(looks) == 2:
            fast.watches[1].end("lost: rank 1: no answer from peer 2")

    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    holder.end("lost: rank 0: no answer from peer 2")
    assert len(looks) == 2
    holder.end("done")
    assert len(looks) == 2


@pytest.mark.parametrize("error", [ConfigError("timeout: found 0"), ValueError("shape")])
def test_errors_that_no_peer_causes_are_left_alone(fast: World, error: Exception) -> None:
    assert fast.watches[0].explain(error) is None


@pytest.mark.parametrize("own", [OSError(28, "No space left on device"), gloo_error()])
def test_of_a_failed_checkpoint_a_peer_is_named_where_a_connection_broke(
    fast: World, own: Exception
) -> None:
    fast.watches[1].end("CheckpointException: of a rank's own error")
    with pytest.raises(CheckpointException) as raised:
        _DistWrapper(None, False, 0).all_reduce("write", Mock(side_effect=own), list)
    named = fast.watches[0].explain(raised.value)
    assert (named is not None) == (type(own) is RuntimeError)


def test_the_place_is_the_collective_and_who_called_it() -> None:
    torch = "/x/site-packages/torch/distributed/"
    stack = [
        (f"{os.__file__}", "wait", 1),
        (f"{torch}distributed_c10d.py", "_wait", 2),
        (f"{torch}distributed_c10d.py", "all_gather_object", 3),
        (f"{torch}c10d_logger.py", "wrapper", 4),
        ("/x/patches/cpu/device.py", "__torch_function__", 4),
        ("/x/site-packages/megatron/core/optimizer/clip_grads.py", "norm", 5),
    ]
    assert place_of(stack) == ("all_gather_object (core/optimizer/clip_grads.py:5)", True)
    assert place_of(stack[5:]) == ("norm (core/optimizer/clip_grads.py:5)", False)
    assert place_of([]) == ("unknown", False)


def test_outside_a_job_nothing_is_watched_and_errors_pass() -> None:
    before = dict(peer_watch.WATCHER._due)
    with pytest.raises(KeyError), watched_peers():
        raise KeyError("own")
    assert peer_watch.WATCHER._due.keys() == before.keys()


def test_a_thread_that_comes_back_to_the_same_call_moves_and_one_that_stays_there_stands() -> None:
    stay, left = threading.Event(), threading.Event()
    calls = [0]

    def wait(seconds: float) -> None:
        calls[0] += 1
        left.wait(seconds)

    def work() -> None:
        while not stay.is_set():
            wait(0.002)
        wait(120.0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    watch = PeerWatch(agreements(2)[0], BOUND_S, thread=thread.ident)
    try:
        for look in range(20):
            before, deadline = calls[0], time.monotonic() + 60
            while calls[0] < before + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            watch._sample(float(look))
            assert watch._moved_at == look
        stay.set()
        time.sleep(2)  # it enters the last call
        for look in range(100, 105):
            watch._sample(float(look))
        assert watch._moved_at == 100 and watch._place.startswith("wait (")
    finally:
        stay.set()
        left.set()
        thread.join()
