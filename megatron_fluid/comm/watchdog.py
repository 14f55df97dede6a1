"""Timeouts of peers: the first failure is recorded for all ranks, and no GPU is left spinning.

On a CPU every wait has a timeout and raises. On a GPU the host enqueues an exchange and goes on, so
a thread watches the CUDA events of the queued rounds. Past the deadline it names rank, peer,
operation and round, prints the stacks of all Python threads, and ends the process, since work that
waits inside NCCL cannot be cancelled.

A rank that fails records in the store of the default process group which rank it waited for. Ranks
that waited for it follow that chain and name the root cause.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_fluid.cuda import driver_api
from megatron_fluid.errors import PeerTimeoutError

__all__ = [
    "EXIT_CODE",
    "STORE_S",
    "FailureLog",
    "RoundMonitor",
    "Watchable",
    "bounded",
    "end_process",
    "get_monitor",
    "say",
]

EXIT_CODE = 75  # exit status of a process that the monitor ended
_KEY = "megatron_fluid/first_failure"
_REMARK = f"{_KEY}/remark"
_GRACE_S = 2.0
STORE_S = 5.0  # in which a store that is alive has answered


def bounded[T](work: Callable[[], T], seconds: float) -> T | None:
    """Return work(), or None if it takes longer than `seconds` or raises.

    For calls on a store: neither their own timeout nor a signal ends one whose host is frozen. The
    thread that is still in it ends with the process.
    """
    result: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            result.append(work())

    thread = threading.Thread(target=run, name="megatron_fluid store", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def say(error: Exception) -> None:
    """Print `error` to stderr at once."""
    print(f"megatron_fluid: {error}", file=sys.stderr, flush=True)


class FailureLog:
    """Failed ranks and the ranks they waited for, in the store of the default process group. Ranks
    are global ones here."""

    def __init__(self, store: dist.Store, grace_s: float = _GRACE_S) -> None:
        self._store = store
        self._grace_s = grace_s
        self._asking = False

    def first(self) -> str:
        """Return the first failure of any rank, '' if there is none or the store is unreachable."""
        if self._asking:  # since an earlier call, in a store that does not answer
            return ""
        self._asking = True

        def read() -> str:
            found = self._read(_KEY)
            self._asking = False
            return found

        return bounded(read, STORE_S) or ""

    def explain(self, error: PeerTimeoutError, rank: int, peer: int | None) -> PeerTimeoutError:
        """Print and record `error` of `rank`, which waited for `peer`; return it with the root
        cause if that is another rank's failure.

        Bounded, also where the rank that holds the store is frozen.

        A peer that did not answer may itself have waited for a third. Its timeout ends at about the
        same time, so this waits a moment for its record, and follows the chain to the rank that has
        recorded nothing.
        """
        own = str(error)

        def find() -> str:
            with contextlib.suppress(RuntimeError):  # the store may have died with its rank
                self._store.set(f"{_KEY}/{rank}", f"{'' if peer is None else peer} {own}")
                self._store.compare_set(_KEY, "", own)
            root, waited_for = self._root(rank, peer)
            return root or self._remark_of([*waited_for, self._read(_REMARK)]) or self.first()

        say(error)
        root = bounded(find, self._grace_s + STORE_S)
        if root is None:
            lost = "the store of the job does not answer: the rank that holds it is lost, too"
            return error.with_detail(lost)
        return error if root in ("", own) else error.with_detail(f"root cause: {root}")

    def remark(self, rank: int, text: str) -> None:
        """Leave word why others may wait for `rank` in vain, for the errors of those that do."""

        def leave() -> None:
            self._store.set(f"{_REMARK}/{rank}", text)
            self._store.set(_REMARK, str(rank))  # for those who do not know for whom they wait

        bounded(leave, STORE_S)

    def withdraw_remark(self, rank: int) -> None:
        """Take back what ``remark`` left of `rank`: nobody waits. Others may have left word since,
        for ranks end an agreement at different times."""
        bounded(lambda: self._store.delete_key(f"{_REMARK}/{rank}"), STORE_S)

    def _remark_of(self, ranks: Sequence[int | str]) -> str:
        return next(filter(None, (self._read(f"{_REMARK}/{rank}") for rank in ranks)), "")

    def _root(self, rank: int, peer: int | None) -> tuple[str, list[int]]:
        """Return the failure at the end of the chain from `peer`, '' if it has recorded none, and
        the ranks that were waited for on the way."""
        seen, text = {rank}, ""
        waited_for: list[int] = []
        deadline = time.monotonic() + self._grace_s
        while peer is not None and peer not in seen:
            if peer not in waited_for:
                waited_for.append(peer)
            found = self._read(f"{_KEY}/{peer}")
            if found:
                seen.add(peer)
                next_peer, text = found.split(" ", 1)
                peer = int(next_peer) if next_peer else None
            elif time.monotonic() < deadline:
                time.sleep(0.05)
            else:
                break
        return text, waited_for

    def _read(self, key: str) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""


class Watchable(Protocol):
    """Anything that reports without blocking whether it has happened: a torch.cuda.Event."""

    def query(self) -> bool: ...


@dataclass
class _Watch:
    """One queued round; its time runs from `started` to `finished`."""

    started: Watchable
    finished: Watchable
    timeout_s: float
    error: Callable[[], PeerTimeoutError]
    failed_already: Callable[[], bool]
    since: float | None = None


# Rounds of one stream. They finish in order, so only the first unfinished one is looked at.
type _Lane = deque[_Watch]


def end_process(error: Exception) -> None:
    """Print `error` and the stacks of all threads, and end the process with EXIT_CODE."""
    say(error)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    sys.stdout.flush()
    # Neither destructors nor NCCL's own shutdown may run: both wait for the stream that never ends.
    os._exit(EXIT_CODE)


class RoundMonitor:
    """A daemon thread that watches queued rounds and acts when one outlives its timeout.

    Args:
        on_timeout: receives the error; by default it is printed and the process ends with
            EXIT_CODE.
        interval_s: seconds between two looks.
    """

    def __init__(
        self, on_timeout: Callable[[PeerTimeoutError], None] = end_process, interval_s: float = 0.25
    ) -> None:
        self._on_timeout, self._interval_s = on_timeout, interval_s
        self._lanes: dict[object, _Lane] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(
        self, lane: object, started: Watchable, finished: Watchable, timeout_s: float,
        error: Callable[[], PeerTimeoutError], failed_already: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Watch one round.

        Args:
            lane: the stream it is queued on (any hashable); rounds of one lane finish in order.
            started, finished: its events.
            timeout_s: seconds allowed from `started` to `finished`.
            error: makes the error to report; called at the deadline only.
            failed_already: whether another rank has failed: then this round cannot finish.
        """
        with self._lock:
            watch = _Watch(started, finished, timeout_s, error, failed_already)
            self._lanes.setdefault(lane, deque()).append(watch)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="megatron_fluid round monitor", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def pending(self) -> int:
        """Return the number of rounds not yet seen to be finished."""
        with self._lock:
            return sum(map(len, self._lanes.values()))

    def _run(self) -> None:
        _allow_queries_during_capture()
        while True:
            self._wake.wait()
            self._wake.clear()
            while self.pending():
                self.look(time.monotonic())
                time.sleep(self._interval_s)

    def look(self, now: float) -> None:
        """Look at all lanes once at time `now` (seconds, monotonic)."""
        with self._lock:
            lanes = list(self._lanes.values())
        # Outside the lock: enqueuing a round must not wait for a store that does not answer.
        for lane in lanes:
            watch = _overdue(lane, now)
            if watch is not None:
                self._on_timeout(watch.error())


def _overdue(lane: _Lane, now: float) -> _Watch | None:
    """Drop the lane's finished rounds; return the first unfinished one if its time is over."""
    while lane and lane[0].finished.query():
        lane.popleft()
    if not lane:
        return None
    head = lane[0]
    if head.since is None:
        if head.started.query():
            head.since = now
        return None
    waited = now - head.since
    late = waited > head.timeout_s
    if not late and waited > _GRACE_S:
        late = head.failed_already()
    return lane.popleft() if late else None


def _allow_queries_during_capture() -> None:
    """Let this thread query events while another captures a CUDA graph."""
    if torch.version.cuda is None:
        return
    with contextlib.suppress(ImportError, RuntimeError):  # a machine without a driver
        driver_api.allow_calls_during_capture()


_MONITOR = RoundMonitor()


def get_monitor() -> RoundMonitor:
    """Return the process-wide monitor; its thread starts with the first round."""
    return _MONITOR
