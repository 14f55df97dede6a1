"""The one thread of this process that looks after waits for peers: collectives on a GPU (waits.py),
waits of kernels (failed_waits.py), and the main thread in Megatron's collectives (peer_watch.py);
and how a process ends whose wait cannot be cancelled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from megatron_fluid.cuda import driver_api

__all__ = ["EXIT_CODE", "WATCHER", "Watcher", "allow_queries_during_capture", "end_process", "say"]

EXIT_CODE = 75  # exit status of a process that the watcher ended

_AFTER_ERROR_S = 5.0

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


class Watcher:
    """Calls functions now and then in a daemon thread, which starts with the first of them.

    A function gets the time (seconds, monotonic) and returns after how many seconds it is to be
    called again. What it waits for itself has to be bounded: the others wait, too.
    """

    def __init__(self) -> None:
        self._due: dict[Look, float] = {}
        self._changed = threading.Condition()
        self._busy = threading.Lock()  # held while a function runs
        self._thread: threading.Thread | None = None

    def add(self, look: Look) -> None:
        """Call `look` now, and again and again."""
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
