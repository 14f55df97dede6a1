"""Ctrl-C and SIGTERM: the iteration is finished, a checkpoint written, the run summed up."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import popen_spawn_posix, resource_tracker
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]

# torchrun passes on a Ctrl-C that its ranks may have had from the terminal already
_ONE_REQUEST_S = 2.0
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class StopRequest:
    """Handles SIGINT and Megatron's ``--exit-signal`` alike.

    Megatron's ``--exit-signal-handler`` lets all ranks save and leave after the same iteration.
    Before the first iteration there is nothing to save: the signal ends the process. A signal that
    comes again, at least 2 s later, ends it too.
    """

    def __init__(self, exit_signal: int = signal.SIGTERM) -> None:
        self._exit_signal = exit_signal
        self._megatrons: Any = None
        # The signal that has asked this rank for the end of the run, 0 where none has.
        self.asked = 0
        self._asked_at = 0.0
        self._pid = os.getpid()
        # Processes that read data are forked from this one, with its handlers, and see this page.
        self._training = mmap.mmap(-1, 1)

    def install(self) -> None:
        """Take both signals over; Megatron's own handler must be there.

        Until training begins they end the process at once: a handler of Python would run only after
        a call that may wait for another rank, which the same signal has ended.
        """
        self._megatrons = signal.getsignal(self._exit_signal)
        _shield_helpers({signal.SIGINT, self._exit_signal})
        self._answer(signal.SIG_DFL)
        os.register_at_fork(after_in_child=lambda: self._answer(self._handle))  # reads data

    def begin_training(self) -> None:
        """From here on there is something to save."""
        if not self._training[0]:
            self._answer(self._handle)
            self._training[0] = 1

    def _answer(self, handler: Any) -> None:
        for number in {signal.SIGINT, self._exit_signal}:
            signal.signal(number, handler)

    def end_training(self) -> None:
        """From here on there is nothing to save, and processes that read data are ended.

        In them Megatron ignores SIGTERM, if it handles signals, and Python waits for them at exit.
        """
        self._training[0] = 0
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call it a failure
        for reader in multiprocessing.active_children():
            if reader.daemon:
                reader.kill()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, reads = time.monotonic(), os.getpid() != self._pid
        # A launcher signals a rank's whole process group. A process that reads data must outlive
        # the iteration that its rank finishes, and end after it.
        if reads and self._training[0] and os.getppid() == self._pid:
            return
        again = self.asked and now - self._asked_at > _ONE_REQUEST_S
        if reads or again:  # at once: a summary would wait for ranks that are elsewhere
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._training[0]:
            raise SystemExit(128 + number)
        if not self.asked:
            self.asked, self._asked_at = number, now
            self._megatrons(number, frame)


def _shield_helpers(signals: set[int]) -> None:
    """Let processes that are started from here on, not forked, have `signals` blocked: one holds
    the results of Megatron's saves, and a launcher signals a rank's whole process group. They end
    when this process does, however that ends."""
    spawn: Any = popen_spawn_posix.Popen
    launch = spawn._launch

    def shielded(popen: Any, process: Any) -> None:
        resource_tracker.ensure_running()  # to start it later would unblock the signals
        # The kernel ends it with the thread that starts it.
        if process._target is not None and threading.current_thread() is threading.main_thread():
            process._target = partial(_end_with, os.getpid(), process._target)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            launch(popen, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    spawn._launch = shielded


def _end_with(starter: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run `target` in a process that the kernel kills when `starter` has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == starter:  # else it has ended already
        target(*args, **kwargs)
