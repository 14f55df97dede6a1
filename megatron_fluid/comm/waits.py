"""The waits of a process group: each is bounded, and its error names rank, peer, operation and
round.

On a CPU a wait has a timeout and raises. On a GPU the host enqueues a collective and goes on, so
the watcher (watcher.py) looks at the CUDA events around it. It watches the host itself, too, while
that is inside a library that may wait for a peer (NCCL connects, symmetric memory is mapped).

A rank whose wait has failed reports it to the ranks of all its groups
(megatron_fluid.comm.agreement). They follow such reports from rank to rank and name the root cause.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import Agreement, agreement, live_agreements
from megatron_fluid.comm.groups import group_resource, group_timeout_s
from megatron_fluid.comm.watcher import WATCHER, say
from megatron_fluid.config import current_config
from megatron_fluid.errors import PeerTimeoutError, first_line, ranks_text

__all__ = [
    "SLOW_START",
    "GroupWaits",
    "WaitName",
    "explain",
    "group_waits",
    "record_event",
    "required",
]

_GRACE_S = 2.0  # for the reports of other ranks, whose waits end at about the same time
# The first use of a connection may take this many times the timeout: NCCL connects, loads kernels.
SLOW_START = 2.0


class WaitName(NamedTuple):
    """What errors say of a wait: the operation, the round in it and the partner as rank of the
    group. A collective has neither round nor partner."""

    operation: str
    round_index: int | None = None
    peer: int | None = None


def record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return a new event, recorded on `stream` now."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


# ---- the waits of one group


def explain(error: PeerTimeoutError, channel: Agreement, grace_s: float = _GRACE_S) -> str:
    """Report a failed wait to the ranks of all groups, and return what their reports add to it.

    That is the failure at the end of the chain of ranks that waited for each other; for a wait for
    a whole group the ranks that have reported nothing, and the others' operations. Bounded by a few
    times grace_s.

    Args:
        error: of a wait in the group of `channel`; `peer` is a rank of that group.
        channel: the group's.
        grace_s: how long the reports of others are waited for.
    """
    own = str(error)
    peer = None if error.peer is None else channel.ranks[error.peer]
    for known in {id(channel): channel, **{id(kept): kept for kept in live_agreements()}}.values():
        known.report_failure(peer, own)
    if channel.alone:
        return ""
    deadline = time.monotonic() + grace_s
    while True:
        reports = channel.failures()
        if channel.rank not in reports:
            return "the store of the job does not answer: the process that holds it is lost, too"
        silent, root = _follow(channel, error.peer, reports)
        if not silent or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    if error.peer is not None:
        return f"root cause: {root}" if root and root != own else ""
    others = [f"rank {channel.ranks[r]}: {t}" for r, (_, t) in reports.items() if r != channel.rank]
    if silent:
        who = ranks_text(channel.ranks[rank] for rank in silent)
        others.insert(0, f"{who} reported no wait: lost, frozen, or in other work")
    return "; ".join(others)


def _follow(
    channel: Agreement, peer: int | None, reports: dict[int, tuple[int | None, str]]
) -> tuple[list[int], str]:
    """Return the ranks that have not reported a failure yet, of those that matter, and the text of
    the failure at the end of the chain from `peer`, "" as long as that is not known."""
    if peer is None:
        return [
            rank for rank in range(channel.size) if rank not in reports and rank != channel.rank
        ], ""
    seen, text = {channel.rank}, ""
    while peer is not None and peer not in seen:
        if peer not in reports:
            return [peer], text
        seen.add(peer)
        waited_for, text = reports[peer]
        peer = channel.ranks.index(waited_for) if waited_for in channel.ranks else None
    return [], text


class GroupWaits:
    """Bounded waits of one process group.

    Args:
        group: process group with NCCL (CUDA tensors) or gloo (CPU tensors), or both.
        place: what errors add about a wait for a peer (None: for the group); "" for nothing.

    Attributes:
        device: the current CUDA device if the group has NCCL, else the CPU.
        channel: what the group's ranks tell each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, place: Callable[[int | None], str] = lambda peer: ""
    ) -> None:
        self.group, self.rank, self._place = group, group.rank(), place
        self.channel = agreement(group)
        self.device = torch.device("cpu")
        if torch.cuda.is_available() and torch.device("cuda") in group._device_types:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._group_timeout_s = group_timeout_s(group)  # torch takes 90 us to tell
        self._last_work: dist.Work | None = None
        self._used = False

    @property
    def timeout_s(self) -> float:
        """Bound on a wait in seconds, as the configuration has it now."""
        asked = current_config().timeout_s
        return self._group_timeout_s if asked is None else asked

    def collective(
        self, operation: str, launch: Callable[[], dist.Work | None],
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """Run a collective: on a CPU the caller waits, on a GPU the current stream does.

        Args:
            operation: names the collective in errors.
            launch: starts it with async_op=True.

        Raises:
            PeerTimeoutError: on a CPU, it did not finish within the timeout. On a GPU the watcher
                reports it.
        """
        self.start(operation, launch, timeout_s)()

    def start(
        self, operation: str, launch: Callable[[], dist.Work | None],
        timeout_s: float | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        """Start a collective and return its wait; arguments and errors are those of
        `collective`."""
        name = WaitName(operation)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        first, self._used = not self._used, True
        if first:  # a rank that does not come at all is named, and failures can be told later
            self.channel.barrier(operation, limit_s)
        if self.device.type != "cuda":
            work = required(launch())
            return lambda: self.wait(work, name, limit_s)
        limit_s *= SLOW_START if first else 1.0
        stream = torch.cuda.current_stream(self.device)
        watched = not self.channel.alone and not torch.cuda.is_current_stream_capturing()
        started = record_event(stream) if watched else None
        with self.inside_library(name, limit_s) if first else contextlib.nullcontext():
            work = required(launch())

        def wait() -> None:
            work.wait()  # the current stream waits; the host does not
            if started is not None:
                now = torch.cuda.current_stream(self.device)
                self.watch(name, started.query, record_event(now).query, limit_s, now)

        return wait

    def wait(self, work: dist.Work, name: WaitName, timeout_s: float) -> None:
        """Wait for a work of gloo, at most timeout_s seconds.

        Raises:
            PeerTimeoutError: it did not finish in time, or the connection broke.
        """
        # gloo's thread releases a work after it has reported it done. If that were the last
        # reference, freeing the tensors inside would need Python's lock, which a process that is
        # ending never gives: it would abort.
        self._last_work = work
        started = time.monotonic()
        try:
            finished = work.wait(timedelta(seconds=timeout_s))
            reason = "the wait ended without a result"
        except RuntimeError as error:
            finished, reason = False, first_line(error)
        if not finished:
            raise self.failure(name, round(time.monotonic() - started, 2), reason)

    @contextlib.contextmanager
    def inside_library(self, name: WaitName, timeout_s: float) -> Iterator[None]:
        """Watch the host while it is inside a library that may wait for a peer: with the first
        message to a peer NCCL connects, and symmetric memory is mapped by all ranks."""
        # A list, since to make an event takes longer than all else here.
        left, lane = list[bool](), ("library", threading.get_ident())
        reason = "the library did not return"
        self.watch(name, lambda: True, lambda: bool(left), timeout_s, lane, reason)
        try:
            yield
        finally:
            left.append(True)

    def watch(
        self, name: WaitName, started: Callable[[], bool], finished: Callable[[], bool],
        timeout_s: float, lane: object, reason: str = "",
    ) -> None:  # fmt: skip
        """Let the watcher end the process unless `finished` follows `started` within `timeout_s`
        seconds."""

        def error() -> PeerTimeoutError:
            return self.failure(name, timeout_s, reason)

        WATCHER.watch(
            lane, started, finished, timeout_s, error, lambda: bool(self.channel.failed())
        )

    def failure(self, name: WaitName, waited_s: float, reason: str = "") -> PeerTimeoutError:
        """Print and report that a peer did not answer; return the error, with the root cause if
        another rank failed first.

        Ranks are the group's; the global ones are added if they differ.
        """
        operation, round_index, peer = name
        own = self.channel.ranks[self.rank]
        theirs = None if peer is None else self.channel.ranks[peer]
        if (own, theirs) != (self.rank, peer):
            here = f"global rank {own}" if theirs is None else f"global ranks {own} and {theirs}"
            reason = "; ".join(filter(None, (here, reason)))
        reason = "; ".join(filter(None, (self._place(peer), reason)))
        error = PeerTimeoutError(self.rank, peer, operation, round_index, waited_s, reason)
        say(error)
        # A short timeout ends in less than twice its time; a broken connection is found at once.
        grace_s = min(_GRACE_S, waited_s / 2) if waited_s > 1.0 else _GRACE_S
        more = explain(error, self.channel, grace_s)
        return error.with_detail(more) if more else error


def required(work: dist.Work | None) -> dist.Work:
    """Return `work`, which is None only for a rank outside the group."""
    assert work is not None, "this rank is in the group"
    return work


def group_waits(group: dist.ProcessGroup) -> GroupWaits:
    """Return the waits of a group, one object for each life of it. Not collective."""
    return group_resource(group, "waits", lambda: GroupWaits(group))
