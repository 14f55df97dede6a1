"""Raises on the host what a kernel's wait for a peer left as a record when it timed out.

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

The error is PeerTimeoutError. The watcher (watcher.py) looks every half second, too. It prints the
error, and ends the process with EXIT_CODE if the main thread has not raised it within GRACE_S: a
process that waits inside NCCL for a rank that is lost cannot raise.

A call that raises on one rank leaves the others waiting for it. `tells_peers` reports it to them.
They end with the report in `Agreement.gather`, in collectives on a GPU (comm/waits.py), and by
`look`: every second it asks for reports, and ends the process if there is one and this rank's
device is stuck. A wait of gloo cannot be interrupted; it ends when the process of the reporting
rank does, and its error names the report.

Only workspaces whose memory several processes share are watched here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import _StopRecomputationError

from megatron_fluid.comm.agreement import Agreement, agreement, live_agreements
from megatron_fluid.comm.watcher import (
    EXIT_CODE,
    WATCHER,
    allow_queries_during_capture,
    end_process,
    say,
)
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError

__all__ = [
    "GRACE_S",
    "ErrorWords",
    "check_after_backward",
    "check_for_failed_waits",
    "forget",
    "tells_peers",
    "watch",
]

GRACE_S = 30.0  # from the record of a failed wait until the process is ended
_INTERVAL_S = 0.5
_RECORD = 1 << 62
_PEERS_EVERY_S = 1.0  # between questions for a failure of another rank
_STUCK_S = 1.0  # a device whose work is not done by then waits for a peer that has failed


class ErrorWords:
    """The records of the kernels of one workspace that gave up a wait.

    words: int64 [W, 2], visible to the host. peers: the agreement of the workspace's ranks, None
    where one process holds them all. abort: int32 [1], on the device: not 0 once a wait has been
    given up.

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
        self.rank, self._operations = rank, operations
        self.device, self.timeout_s = device, timeout_s
        self.words = torch.zeros(
            world_size, 2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        # The same memory, read without an operation of torch.
        self._bytes = (ctypes.c_char * self.words.nbytes).from_address(self.words.data_ptr())
        self._none = bytes(self.words.nbytes)
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)
        self.peers: Agreement | None = None
        self.raised = False  # once it was raised, nothing else ends the process
        self.seen_at: float | None = None  # when the watching thread found a record

    def failed(self) -> bool:
        """Return whether a record is there. Reads host memory only, and may lag a kernel."""
        return self._bytes.raw != self._none

    def error(self) -> PeerTimeoutError | None:
        """Return the first record as an error, None if there is none."""
        for peer, (head, tail) in enumerate(self.words.tolist()):
            if head & _RECORD:
                return PeerTimeoutError(
                    rank=self.rank,
                    peer=peer,
                    operation=self._operations[(head & ~_RECORD) >> 32],
                    round_index=head & 0xFFFFFFFF,
                    timeout_s=self.timeout_s,
                    detail=f"expected generation {tail >> 32}, seen {tail & 0xFFFFFFFF}",
                )
        return None

    def check(self) -> None:
        """Raise the first record as PeerTimeoutError."""
        if self.failed() and (error := self.error()) is not None:
            self.raised = True
            raise error


# Replaced as a whole, so that no reader needs the lock.
_watched: tuple[ErrorWords, ...] = ()
_LONGEST_TEXT = 1000
_NOT_TOLD = PeerTimeoutError, _StopRecomputationError
_TOLD = "_megatron_fluid_told"  # on an error: it was reported by a call inside
_reported: list[Agreement] = []  # that hold a report of this process
_lock = threading.Lock()
_started = False
_last_backward = -1
_asked_at = 0.0


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
            WATCHER.add(lambda now: look(now))
    weakref.finalize(owner, lambda: None if errors.failed() else forget(errors))


def forget(errors: ErrorWords) -> None:
    """Look at `errors` no more."""
    global _watched
    with _lock:
        _watched = tuple(kept for kept in _watched if kept is not errors)


def check_for_failed_waits(synchronize: bool = True) -> None:
    """Raise PeerTimeoutError if a wait of this process for a peer has timed out.

    For training loops that use results without an optimizer of torch, or that write checkpoints
    themselves: call it before a result leaves the process.

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


def check_after_backward() -> None:
    """Called inside a backward: raise at the end of this backward if a wait is known to have failed
    by then."""
    global _last_backward
    if not _watched:
        return
    task = torch._C._current_graph_task_id()
    if task != _last_backward and task >= 0:
        _last_backward = task
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: check_for_failed_waits(synchronize=False))


def tells_peers[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a collective call: an exception of it is reported to the ranks of all live groups, but
    not that of a call known to be of one rank. The next such call of this process takes the report
    back. torch.compile breaks its graph there, and transforms of torch.func and torch.export are
    refused: their tensors have no memory that could be sent."""

    @functools.wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return outside_the_graph(*args, **kwargs)
        while _reported:
            _reported.pop().withdraw_refusal()
        try:
            if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting():
                found = "torch.func or torch.export"
                allowed = "none: call it as written, and use backward() or torch.autograd.grad"
                raise ConfigError.of(f"{call.__qualname__}: transform", found, allowed)
            return call(*args, **kwargs)
        except Exception as error:
            # A wait that failed has reported it; that a checkpoint has all it needs is no failure.
            if not isinstance(error, _NOT_TOLD) and not _of_one_rank(call, args, kwargs):
                _tell(error)
            raise

    # torch.compiler.disable, but for an import of a second that only torch.compile needs.
    outside_the_graph = torch._disable_dynamo(told)
    return told


def _of_one_rank(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call names one rank alone: by the groups and meshes among its arguments, or by
    `ranks_of_calls` of the layer that is called. One that is built without a group is alone.

    Makes the agreements of these groups: it may be their first call, which peers wait in."""
    channels: list[Agreement] = []
    for each in (*args, *kwargs.values()):
        with contextlib.suppress(Exception):  # destroyed, or without this rank: nobody waits in it
            if isinstance(each, dist.ProcessGroup | DeviceMesh):
                groups = each.get_all_groups() if isinstance(each, DeviceMesh) else [each]
                channels += map(agreement, groups)
    if channels:
        return all(channel.alone for channel in channels)
    layer = args[0] if args else None
    return call.__name__ == "__init__" or getattr(layer, "ranks_of_calls", None) == 1


def _tell(error: Exception) -> None:
    if getattr(error, _TOLD, False):
        return
    setattr(error, _TOLD, True)
    text = f"{type(error).__name__}: {str(error)[:_LONGEST_TEXT]}"
    for channel in live_agreements():
        channel.report_refusal(f"rank {channel.ranks[channel.rank]} raised {text}")
        _reported.append(channel)


def _before_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if not torch.compiler.is_compiling():
        check_for_failed_waits()


def look(
    now: float,
    end: Callable[[Exception], None] = end_process,
    stuck: Callable[[torch.device], bool] | None = None,
) -> float:
    """Look at all records once at time `now` (seconds, monotonic): print new ones, and `end` the
    process if it has not raised one in time, or if its device is `stuck` in a wait for a rank that
    has failed. Return after how many seconds to look again."""
    global _asked_at
    if asks := now - _asked_at >= _PEERS_EVERY_S:
        _asked_at = now
    for errors in _watched:
        if errors.raised:
            continue
        peers = errors.peers
        if asks and peers is not None and peers.failed() and (stuck or _is_stuck)(errors.device):
            text = peers.failed()  # a rank that goes on with another call has taken its report back
            if text:
                end(FluidError(f"rank {errors.rank}: another rank has failed: {text}"))
        if not errors.failed() or (error := errors.error()) is None:
            continue
        if errors.seen_at is None:
            errors.seen_at = now
            say(error)
        elif now - errors.seen_at > GRACE_S:
            end(error)
    return _INTERVAL_S


def _is_stuck(device: torch.device, limit_s: float = _STUCK_S, at_exit: bool = False) -> bool:
    """Return whether work enqueued on a GPU is not done within `limit_s`."""
    if device.type != "cuda":
        return False
    done = threading.Event()

    def wait(now: float = 0.0) -> float:
        _synchronize(device)
        done.set()
        return threading.TIMEOUT_MAX

    # In another thread: work that waits inside NCCL has no bound.
    if at_exit:  # Python starts no threads any more
        WATCHER.add(wait)
    else:
        threading.Thread(target=wait, daemon=True).start()
    return not done.wait(limit_s)


def _at_exit() -> None:
    """End the process with EXIT_CODE if it is about to end as if nothing had happened, or would
    wait in destructors for a device that is stuck."""
    if not _watched:
        return
    raised = any(errors.raised for errors in _watched)
    limit = _STUCK_S if raised else max(errors.timeout_s for errors in _watched) + GRACE_S
    devices = {errors.device.type: errors.device for errors in _watched}
    stuck = any(_is_stuck(device, limit, at_exit=True) for device in devices.values())
    for errors in _watched:
        if (stuck or not errors.raised) and (error := errors.error()) is not None:
            say(error)
            logging.shutdown()
            sys.stdout.flush()
            os._exit(EXIT_CODE)


def _synchronize(device: torch.device) -> None:
    allow_queries_during_capture(device)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
