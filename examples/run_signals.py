"""Ctrl-C and SIGTERM: the iteration is finished, a checkpoint written, the run summed up."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]

# torchrun passes on a Ctrl-C that its ranks may have had from the terminal already
_ONE_REQUEST_S = 2.0


class StopRequest:
    """Handles SIGINT and Megatron's ``--exit-signal`` alike.

    Megatron's ``--exit-signal-handler`` lets all ranks save and leave after the same iteration.
    Before the first iteration there is nothing to save: the signal ends the process. A signal that
    comes again, at least 2 s later, ends it too.
    """

    def __init__(self, exit_signal: int = signal.SIGTERM) -> None:
        self._exit_signal = exit_signal
        self._megatrons: Any = None
        self._asked_at: float | None = None
        self._training = False

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end of the run."""
        return self._asked_at is not None

    def install(self) -> None:
        """Take both signals over; Megatron's own handler must be there."""
        self._megatrons = signal.getsignal(self._exit_signal)
        for number in {signal.SIGINT, self._exit_signal}:
            signal.signal(number, self._handle)

    def begin_training(self) -> None:
        """From here on there is something to save."""
        self._training = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self._asked_at is not None and now - self._asked_at > _ONE_REQUEST_S
        if not self._training or again:
            raise SystemExit(128 + number)
        if self._asked_at is None:
            self._asked_at = now
            self._megatrons(number, frame)
