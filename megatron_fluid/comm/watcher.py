"""The one thread of this process that looks after waits for peers, and how a process ends whose
wait cannot be cancelled.

`WATCHER.watch` registers a wait: of a collective on a GPU, or of the host in a library (waits.py).
`WATCHER.add` calls what looks after the waits of kernels (failed_waits.py) and after the main
thread in Megatron's collectives (peer_watch.py). Past a wait's deadline the watcher prints its
error and the stacks of all Python threads, and ends the process: work that waits inside NCCL cannot
be cancelled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_fluid.cuda import driver_api

__all__ = ["EXIT_CODE", "WATCHER", "Watcher", "allow_queries_during_capture", "end_process", "say"]

EXIT_CODE = 75  # exit status of a process that the watcher ended

_AFTER_ERROR_S = 5.0
_GRACE_S = 2.0  # until another rank's failure ends a wait, which may yet finish

type Look = Callable[[float], float]


def say(error: Exception) -> None:
    """Print `error` to stderr at once."""
    print(f"megatron_fluid: {error}", file=sys.stderr, flush=True)


def end_process(error: Exception) -> None:
    """Print `error` and the stacks of all threads, and end the process with EXIT_CODE."""
    say(error)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    sys.stdout.flush()
    # Neither destructors nor NCCL's own shutdown may run: both wait for the stream that never ends.
    os._exit(EXIT_CODE)


def allow_queries_during_capture(device: torch.device | int) -> None:
    """Let this thread query events of a GPU while another thread captures a CUDA graph."""
    if torch.version.cuda is None:
        return
    with contextlib.suppress(ImportError, RuntimeError):  # a machine without a driver
        driver_api.allow_calls_during_capture()
        # A new thread's GPU is number 0: its first query would make a context there, of half a GiB.
        torch.cuda.set_device(device)


@dataclass
class _Wait:
    """One wait; its time runs from `started` to `finished`."""

    started: Callable[[], bool]
    finished: Callable[[], bool]
    timeout_s: float
    error: Callable[[], Exception]
    failed_already: Callable[[], bool]
    since: float | None = None

    def is_over(self, now: float) -> bool:
        """Return whether its time is over, or another rank has failed."""
        if self.since is None:
            self.since = now if self.started() else None
            return False
        waited = now - self.since
        return waited > self.timeout_s or (waited > _GRACE_S and self.failed_already())


class Watcher:
    """Looks after waits, and calls functions now and then, in a daemon thread, which starts with
    the first of them.

    Args:
        on_timeout: receives the error of a wait that outlives its timeout; by default it is printed
            and the process ends with EXIT_CODE.
        interval_s: seconds between two looks at the waits.
    """

    def __init__(
        self, on_timeout: Callable[[Exception], None] = end_process, interval_s: float = 0.25
    ) -> None:
        self._on_timeout, self._interval_s = on_timeout, interval_s
        # Waits of one stream finish in order, so only its first unfinished one is looked at.
        self._lanes: dict[object, deque[_Wait]] = {}
        self._gpu: int | None = None  # of the first wait after CUDA was initialised
        self._queries_allowed = False  # to the thread
        self._due: dict[Look, float] = {}
        self._changed = threading.Condition()
        self._busy = threading.Lock()  # held while a function runs
        self._thread: threading.Thread | None = None

    def watch(
        self, lane: object, started: Callable[[], bool], finished: Callable[[], bool],
        timeout_s: float, error: Callable[[], Exception],
        failed_already: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Watch one wait. Takes no lock that the thread may hold.

        Args:
            lane: the stream it is queued on (any hashable); waits of one lane finish in order.
            started, finished: whether it has, without blocking: `query` of its events.
            timeout_s: seconds allowed from `started` to `finished`.
            error: makes the error to report; called at the deadline only.
            failed_already: whether another rank has failed: then this wait cannot finish.
        """
        if self._gpu is None and torch.cuda.is_initialized():
            self._gpu = torch.cuda.current_device()
        first = not self._lanes
        wait = _Wait(started, finished, timeout_s, error, failed_already)
        self._lanes.setdefault(lane, deque()).append(wait)
        if first:
            self.add(self.look)

    def look(self, now: float) -> float:
        """Look at all waits once at time `now` (seconds, monotonic). Return after how many seconds
        to look again."""
        if self._gpu is not None and not self._queries_allowed:
            # Not earlier: the driver refuses it where CUDA is not initialised.
            allow_queries_during_capture(self._gpu)
            self._queries_allowed = True
        for lane in list(self._lanes.values()):
            while lane and lane[0].finished():
                lane.popleft()
            if lane and lane[0].is_over(now):
                self._on_timeout(lane.popleft().error())
        return self._interval_s

    def add(self, look: Look) -> None:
        """Call `look` now, and again and again: it gets the time (seconds, monotonic) and returns
        after how many seconds it is to be called again. What it waits for itself has to be bounded:
        the others wait, too."""
        with self._changed:
            self._due.setdefault(look, 0.0)
            if self._thread is None:
                name = "megatron_fluid watcher"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, look: Look, limit_s: float) -> None:
        """Call `look` no more. Waits limit_s seconds at most for a call that runs."""
        with self._changed:
            self._due.pop(look, None)
        if self._busy.acquire(timeout=limit_s):
            self._busy.release()

    def _run(self) -> None:
        while True:
            with self._changed:
                first = min(self._due.values(), default=threading.TIMEOUT_MAX)
                self._changed.wait(max(0.0, min(first - time.monotonic(), threading.TIMEOUT_MAX)))
                looks = [look for look, at in self._due.items() if at <= time.monotonic()]
            for look in looks:
                with self._busy:
                    pause_s = self._call(look)
                with self._changed:
                    if look in self._due:
                        self._due[look] = time.monotonic() + pause_s

    def _call(self, look: Look) -> float:
        if look not in self._due:  # removed by now
            return 0.0
        try:
            return look(time.monotonic())
        except Exception as error:  # the others are watched all the same
            say(error)
            return _AFTER_ERROR_S


WATCHER = Watcher()
