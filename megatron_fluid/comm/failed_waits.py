"""From a wait that a kernel gave up to an error on the host, before its result is used.

A kernel cannot raise. It leaves a record in `ErrorWords`, which lie in pinned host memory, marks
its result, and goes on. The host reads the records at these points:

- at the next call of the operation, and at the end of each backward that went through one of this
  package's functions: a plain load, which may lag the device;
- before `finalize_model_grads` of Megatron reduces gradients: a plain load, too;
- before every `torch.optim.Optimizer.step` and before Megatron writes a checkpoint: after the
  current stream is synchronised, so that no wait is still undecided. Megatron's optimizers read
  the norm of the gradients on the host immediately before, so the stream is idle there and this
  costs a few microseconds. Without such a read the host loses its lead over the device once a step;
- when the process exits.

The error is PeerTimeoutError. A thread looks every half second, too. It prints the error, and ends
the process with EXIT_CODE if the main thread has not raised it within GRACE_S: a process that waits
inside NCCL for a rank that is lost cannot raise.

What else a workspace's owner has added (ErrorWords.further), an error of a kernel that cannot raise
either, is raised and printed there, too; the thread ends no process for it.

Only workspaces whose memory several processes share are watched here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_fluid.comm.waits import EXIT_CODE, end_process, say
from megatron_fluid.errors import PeerTimeoutError

__all__ = [
    "GRACE_S",
    "ErrorWords",
    "check_after_backward",
    "check_for_failed_waits",
    "forget",
    "raise_if_failed",
    "watch",
]

GRACE_S = 30.0  # from the record of a failed wait until the process is ended
_INTERVAL_S = 0.5
_RECORD = 1 << 62


class ErrorWords:
    """The records of the kernels of one workspace that gave up a wait.

    words: int64 [W, 2], visible to the host. abort: int32 [1], on the device: not 0 once a wait has
    been given up. further: give other errors of the workspace's kernels, None where there is none;
    they must not hold the workspace.

    Args:
        rank, world_size: of the workspace.
        device: of its kernels.
        timeout_s: the bound on one wait.
        operations: the names of its operations by number; the workspace adds to it.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout_s: float,
        operations: list[str],
    ) -> None:  # fmt: skip
        self._rank, self._operations = rank, operations
        self.device, self.timeout_s = device, timeout_s
        self.words = torch.zeros(world_size, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same memory, read without an operation of torch.
        self.on_host = (ctypes.c_int64 * (2 * world_size)).from_address(self.words.data_ptr())
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)
        self.further: list[Callable[[], Exception | None]] = []
        self.raised = False  # once it was raised, nothing else ends the process
        self.seen_at: float | None = None  # when the watching thread found a record

    def failed(self) -> bool:
        """Return whether a record or another error is there. Reads host memory only, and may lag a
        kernel."""
        return any(self.on_host) or (bool(self.further) and self._other() is not None)

    def _other(self) -> Exception | None:
        return next((found for look in self.further if (found := look()) is not None), None)

    def error(self) -> Exception | None:
        """Return the first record as an error, else another one; None if there is none."""
        for peer, (head, tail) in enumerate(self.words.tolist()):
            if head & _RECORD:
                return PeerTimeoutError(
                    rank=self._rank,
                    peer=peer,
                    operation=self._operations[(head & ~_RECORD) >> 32],
                    round_index=head & 0xFFFFFFFF,
                    timeout_s=self.timeout_s,
                    detail=f"expected generation {tail >> 32}, seen {tail & 0xFFFFFFFF}",
                )
        return self._other()

    def check(self) -> None:
        """Raise the first record as PeerTimeoutError, else another error that is there."""
        if self.failed() and (error := self.error()) is not None:
            self.raised = True
            raise error


# Replaced as a whole, so that no reader needs the lock.
_watched: tuple[ErrorWords, ...] = ()
_lock = threading.Lock()
_started = False
_last_backward = -1


def watch(errors: ErrorWords, owner: object) -> None:
    """Look at `errors` from now on. Records outlive `owner`, the workspace: without any, they are
    forgotten with it."""
    global _watched, _started
    with _lock:
        _watched = (*_watched, errors)
        if not _started:
            _started = True
            register_optimizer_step_pre_hook(_before_step)
            atexit.register(_at_exit)
            name = "megatron_fluid failed waits"
            threading.Thread(target=_look_for_ever, name=name, daemon=True).start()
    weakref.finalize(owner, _forget_if_sound, errors)


def forget(errors: ErrorWords) -> None:
    """Look at `errors` no more."""
    global _watched
    with _lock:
        _watched = tuple(kept for kept in _watched if kept is not errors)


def _forget_if_sound(errors: ErrorWords) -> None:
    if not errors.failed():
        forget(errors)


def raise_if_failed(synchronize: bool = False) -> None:
    """Raise PeerTimeoutError if a kernel of this process has given up a wait for a peer, or another
    error that workspaces have been given (ErrorWords.further).

    Args:
        synchronize: first wait for the work of the current stream (not while it is captured into a
            CUDA graph). Without it the answer may lag the device.
    """
    watched = _watched
    if not watched:
        return
    on_gpu = synchronize and any(errors.device.type == "cuda" for errors in watched)
    if on_gpu and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
    for errors in watched:
        errors.check()


def check_for_failed_waits() -> None:
    """Raise PeerTimeoutError if a wait of this process for a peer has timed out.

    Waits for the work of the current stream. For training loops that use results without an
    optimizer of torch, or that write checkpoints themselves: call it before a result leaves the
    process.
    """
    raise_if_failed(synchronize=True)


def check_after_backward() -> None:
    """Called inside a backward: raise at the end of this backward if a wait is known to have failed
    by then."""
    global _last_backward
    if not _watched:
        return
    task = torch._C._current_graph_task_id()
    if task != _last_backward and task >= 0:
        _last_backward = task
        torch.autograd.Variable._execution_engine.queue_callback(raise_if_failed)  # type: ignore[attr-defined]


def _before_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if not torch.compiler.is_compiling():
        raise_if_failed(synchronize=True)


def _look_for_ever() -> None:
    while True:
        time.sleep(_INTERVAL_S)
        look(time.monotonic())


def look(now: float, end: Callable[[Exception], None] = end_process) -> None:
    """Look at all records once at time `now` (seconds, monotonic): report new ones, and `end` what
    has not raised a failed wait in time. Other errors leave no main thread waiting inside NCCL."""
    for errors in _watched:
        if errors.raised or not errors.failed() or (error := errors.error()) is None:
            continue
        if errors.seen_at is None:
            errors.seen_at = now
            say(error)
        elif any(errors.on_host) and now - errors.seen_at > GRACE_S:
            end(error)


def _at_exit() -> None:
    """End the process with EXIT_CODE if it is about to end as if nothing had happened."""
    if not _watched:
        return
    limit = max(errors.timeout_s for errors in _watched) + GRACE_S
    if any(errors.device.type == "cuda" for errors in _watched):
        # In a thread: work that waits inside NCCL has no bound.
        waiter = threading.Thread(target=_synchronize, daemon=True)
        waiter.start()
        waiter.join(limit)
    for errors in _watched:
        if not errors.raised and (error := errors.error()) is not None:
            say(error)
            logging.shutdown()
            sys.stdout.flush()
            os._exit(EXIT_CODE)


def _synchronize() -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
