"""Which rank is missing where collectives that are not ours wait: Megatron's, and torch's.

Waits of this package name their peer. A collective of gloo or NCCL does not: if a rank is killed,
the others get "Connection reset"; if it is frozen, they wait for the timeout of the process group.
So each rank's watcher (watcher.py) writes a beat to the job's store: a count, where the main thread
stands, and for how long it has stood there. It reads that off the main thread's stack, so a step
pays nothing. Two looks a few beats apart tell a rank that has stopped from one that is slow.

The looks happen in two cases only:

- The main thread has stood at one place for the bound. If a rank is missing, it is printed with
  the operation, and with `end` the process ends with EXIT_CODE. The same if no rank is missing but
  all stand in collectives. A rank that stands elsewhere, e.g. while a checkpoint is written, works.
- An error leaves `watched_peers`. It becomes a PeerTimeoutError if a rank is missing or has failed.

Every call on the store is bounded. A store that does not answer is itself named as missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megatron_fluid.comm.agreement import STORE_S, Agreement, agreement
from megatron_fluid.comm.groups import wait_timeout_s
from megatron_fluid.comm.watcher import WATCHER, end_process, say
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError, first_line, ranks_text

__all__ = ["Beat", "PeerWatch", "place_of", "watched_peers"]

_BEAT = "beat"
_LONGEST_INTERVAL_S = 5.0
_LOOKS = 4  # intervals between two looks: a rank that beats has beaten in between
_POLL_S = 0.2
# What gloo, NCCL and the store say of a peer that is gone.
_LOST = re.compile(r"gloo|nccl|connection|broken pipe|timed out|timeout|store|recvvalue", re.I)

_LIBRARY = (str(Path(os.__file__).parent), "<frozen")

type _Where = tuple[str, str, int]  # file, function, line


@dataclass(frozen=True)
class Beat:
    """What a rank last wrote.

    count: of its beats. stood_s: seconds for which its main thread has stood at `place`. waits:
    whether that is a function of torch.distributed. ended: ""
    while it runs, else "done", "lost: " and the error where it has lost a peer, or its own error.
    """

    count: int
    stood_s: float
    place: str
    waits: bool
    ended: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended by an error of its own."""
        return self.ended != "done" and bool(self.ended) and not self.ended.startswith("lost: ")


def _calls(frames: Iterable[tuple[FrameType, int]]) -> list[_Where]:
    return [(f.f_code.co_filename, f.f_code.co_name, line or 0) for f, line in frames]


def place_of(stack: Iterable[_Where]) -> tuple[str, bool]:
    """Name the operation that a stack, innermost call first, stands in: the function of
    torch.distributed, if there is one, and the line outside torch and Python's library that called
    it. And return whether there is one."""
    operation = ""
    for file, function, line in stack:
        if "/torch/" in file:
            if file.endswith("distributed_c10d.py") and not operation and function[0] != "_":
                operation = function
        elif "/patches/cpu/" in file:
            continue  # between Megatron and torch, where there is no GPU
        elif not file.startswith(_LIBRARY) or "/site-packages/" in file:
            short = "/".join(file.split("/")[-3:])
            return f"{operation or function} ({short}:{line})", bool(operation)
    return operation or "unknown", bool(operation)


class PeerWatch:
    """The beats of this rank, and looks at those of all others.

    Args:
        channel: of all ranks of the job, in a store whose host may die or freeze.
        bound_s: for how long the main thread may stand at one place before the others are looked
            at.
        end: whether the process then ends, where no rank works any more or one is missing.
        holds_store: whether the store ends with this process.
        on_timeout: receives the error where the process is to end.
        thread: identity of the thread that is watched; None: the main thread.
    """

    def __init__(
        self, channel: Agreement, bound_s: float, end: bool = False,
        holds_store: bool = False, on_timeout: Callable[[PeerTimeoutError], None] = end_process,
        thread: int | None = None,
    ) -> None:  # fmt: skip
        self._channel, self._rank, self._world_size = channel, channel.rank, channel.size
        self._bound_s, self._end, self._on_timeout = bound_s, end, on_timeout
        self._holds_store = holds_store
        self._watched = threading.main_thread().ident if thread is None else thread
        self.interval_s = min(_LONGEST_INTERVAL_S, bound_s / 10)
        self._count, self._ended = 0, ""
        self._at = -1  # instruction of the innermost frame
        self._place, self._waits, self._moved_at = "", False, time.monotonic()
        self._earlier: tuple[float, dict[int, Beat] | None] | None = None
        self._told = False

    def step(self, now: float) -> None:
        """Beat once at time `now` (seconds, monotonic), and look at the others if this rank's main
        thread has stood still for too long."""
        self._sample(now)
        self._beat(now)
        stood = now - self._moved_at
        if stood < self._bound_s - (_LOOKS + 1) * self.interval_s or self._told:
            self._earlier = None
        elif self._earlier is None:
            self._earlier = now, self._read()
        elif stood >= self._bound_s and now - self._earlier[0] >= _LOOKS * self.interval_s:
            self._judge(stood, self._earlier[1], self._read())
            self._earlier = None

    def _sample(self, now: float) -> None:
        frame: FrameType | None = sys._current_frames().get(self._watched or 0)
        if frame is None:
            return
        # Frames are made at the same addresses again and again, so a frame that was seen is marked.
        # The mark is an attribute that only debuggers read, and it goes with the frame.
        stands = not frame.f_trace_lines and frame.f_lasti == self._at
        frame.f_trace_lines, self._at = False, frame.f_lasti
        if stands:
            return
        self._moved_at, self._told = now, False
        self._place, self._waits = place_of(_calls(traceback.walk_stack(frame)))

    def _beat(self, now: float) -> None:
        self._count += 1
        stood = round(now - self._moved_at, 1)
        beat = Beat(self._count, stood, self._place, self._waits, self._ended)
        self._channel.publish(_BEAT, beat, 0.0)

    def _read(self) -> dict[int, Beat] | None:
        """The last beats of all ranks that have beaten; None if the store does not answer."""
        beats: dict[int, Beat] = self._channel.read(_BEAT, range(self._world_size))
        return beats if self._rank in beats else None

    def _lost(
        self, before: dict[int, Beat] | None, after: dict[int, Beat] | None
    ) -> tuple[int | None, str]:
        """The first rank that is missing between two looks, None for none, and what is known of
        the missing ranks ("" for none). An empty first look proves nobody missing."""
        if before is None or after is None:
            holder = 0 if not _launcher_holds_store() else None
            who = "rank 0" if holder == 0 else "the launcher of the first host"
            return holder, f"the store of the job does not answer: {who}, which holds it, is lost"
        others = {rank: beat for rank, beat in after.items() if rank != self._rank}
        failed = [rank for rank, beat in others.items() if beat.failed]
        absent = [r for r in range(self._world_size) if before and r not in after]
        running = [rank for rank, beat in others.items() if not beat.ended and rank in before]
        silent = [rank for rank in running if after[rank].count == before[rank].count]
        texts = []
        if silent:
            stopped = "stopped beating (killed, frozen or cut off), last seen in"
            texts.append(f"{ranks_text(silent)} {stopped} {after[silent[0]].place}")
        if absent:
            texts.append(f"{ranks_text(absent)} never came")
        if not silent + absent + failed:  # what is known is what others have found
            failed = [rank for rank, beat in others.items() if beat.ended]
        texts += [f"rank {rank} ended: {after[rank].ended}" for rank in failed]
        first = next(iter([*silent, *absent, *failed]), None)
        return first, "; ".join(texts)

    def _judge(
        self, stood: float, before: dict[int, Beat] | None, after: dict[int, Beat] | None
    ) -> None:
        """Print who is missing, and end the process if that is asked for and nobody works."""
        self._told = True
        peer, lost = self._lost(before, after)
        others = {r: beat for r, beat in (after or {}).items() if r != self._rank}
        alike = all(b.waits and b.stood_s >= self._bound_s / 2 for b in others.values())
        if not lost and not self._waits:
            return  # its own work, however long
        detail = lost or "no rank is missing; " + _places(others)
        error = PeerTimeoutError(self._rank, peer, self._place, None, round(stood, 1), detail)
        if self._end and (lost or alike):
            self.end(f"lost: {error}")
            self._on_timeout(error)
        else:
            say(error)
            self._told = bool(lost)  # those that work may be lost yet

    def explain(self, error: BaseException) -> PeerTimeoutError | None:
        """Return what a peer that is gone has to do with `error`, None if nothing. Takes a few
        intervals where the error may come from a lost connection.

        One of our own waits has named a peer, or its group: what is known here is added to it.
        """
        if isinstance(error, ConfigError):
            return None
        where = _calls(traceback.walk_tb(error.__traceback__))[::-1]
        may_be_of_a_peer = isinstance(error, PeerTimeoutError)
        if type(error).__name__ == "CheckpointException":  # torch's, of every rank's own error
            failures = getattr(error, "failures", {}).values()
            may_be_of_a_peer = any(_LOST.search(str(own)) for own, _ in failures)
        elif any("/torch/distributed/" in file for file, *_ in where) or _LOST.search(str(error)):
            may_be_of_a_peer = True
        if not may_be_of_a_peer:
            return None
        begin, enough = time.monotonic(), False
        self._beat(begin)  # the error may come before the first one, which `_read` looks for
        before = after = self._read()
        while not enough and not any(beat.failed for beat in (after or {}).values()):
            time.sleep(self.interval_s)
            after = self._read()
            if before is None and after is not None:  # rank 0 has let this rank in since
                before, begin = after, time.monotonic()
            enough = time.monotonic() - begin >= _LOOKS * self.interval_s
        # Too few beats tell nothing of the silent ones; an error that is there does.
        peer, lost = self._lost(before if enough or before is None else {}, after)
        if not lost:
            return None
        if isinstance(error, PeerTimeoutError):
            return error.with_detail(lost)
        detail = f"{lost}; found as: {first_line(error)}"
        return PeerTimeoutError(self._rank, peer, place_of(where)[0], detail=detail)

    def end(self, how: str) -> None:
        """Write the last beat: how this rank ended. One that holds the store lets the others read
        first, if it did not end well."""
        self._ended = how
        self._beat(time.monotonic())
        deadline = time.monotonic() + 2 * _LOOKS * self.interval_s
        while self._holds_store and how != "done" and time.monotonic() < deadline:
            before = self._read()
            time.sleep(_LOOKS * self.interval_s)
            after = self._read() or {}
            if all(
                beat.ended or beat.count == (before or {}).get(rank, beat).count
                for rank, beat in after.items()
            ):
                return


def _places(beats: dict[int, Beat]) -> str:
    """Where ranks stand: "rank 1 in all_reduce (...), for 12 s"."""
    by_place: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        by_place.setdefault(beat.place, []).append(rank)
    return "; ".join(
        f"{ranks_text(ranks)} in {place} for {min(beats[r].stood_s for r in ranks):g} s or more"
        for place, ranks in by_place.items()
    )


def _launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _watch_of_job() -> PeerWatch | None:
    """The watch of this rank; None in a job of one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1 or dist.get_backend() == "fake":
        return None
    channel = agreement(dist.group.WORLD)  # type: ignore[arg-type]
    holds = rank == 0 and not _launcher_holds_store()
    return PeerWatch(channel, wait_timeout_s(None), current_config().end_on_timeout, holds)


@contextlib.contextmanager
def watched_peers() -> Iterator[None]:
    """Inside, this rank beats and its main thread is watched, from the moment at which
    torch.distributed is initialised. Nothing happens in a job of one rank.

    Raises:
        PeerTimeoutError: in the place of an error that a missing or failed rank has caused.
    """
    watch: PeerWatch | None = None

    def look(now: float) -> float:
        nonlocal watch
        if not dist.is_initialized():
            return _POLL_S
        if watch is None and (watch := _watch_of_job()) is None:
            return _LONGEST_INTERVAL_S
        watch.step(now)
        return watch.interval_s

    WATCHER.add(look)
    how = "done"
    try:
        yield
    except SystemExit as leave:
        how = "done" if not leave.code else f"exit status {leave.code}"
        raise
    except BaseException as error:
        how = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if watch is None:  # it came before the watcher's first look
            with contextlib.suppress(RuntimeError):  # of a store that does not answer
                look(time.monotonic())
        named = None if watch is None else watch.explain(error)
        if named is not None or isinstance(error, PeerTimeoutError):
            how = f"lost: {named or error}"
        if named is not None:
            raise named from error
        raise
    finally:
        WATCHER.remove(look, STORE_S)
        if watch is not None:
            watch.end(how)
