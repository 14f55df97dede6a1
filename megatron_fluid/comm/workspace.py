"""Named buffers that every rank of an NVLink domain can address, flags, and bounded waits.

All ranks of a `Workspace` ask for the same buffers and flag regions in the same order with the same
sizes (checked when memory is allocated). Kernels receive raw addresses: `peer_pointers(name)` is an
int64 [W] device tensor whose entry r is where rank r's buffer begins. Multicast is never used.

Generations: a flag word only ever grows, so no barrier has to reset it
(megatron_fluid.kernels.flags). A wait gives up after `timeout_s` and leaves a record in the error
words, which live in pinned host memory: `check_errors()` reads them without touching the device and
raises PeerTimeoutError naming rank, peer, operation and round.

Shapes: W ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.comm import failed_waits
from megatron_fluid.comm.failed_waits import ErrorWords
from megatron_fluid.cuda.devices import synchronize
from megatron_fluid.errors import ConfigError, FluidError

__all__ = ["Buffer", "FlagRegion", "Workspace"]

_FLAG_WORDS = 1 << 16
_COUNTER_WORDS = 1 << 14
_LONGEST_S = 1e9  # of a wait, in 64 bits of nanoseconds
_LINE = 32  # words: regions never share a 128-byte line
_ARENA = ("__flags__", torch.int32)
# Closed workspaces whose memory stays until the process ends: a peer may still store there.
_ABANDONED: list[Workspace] = []


@dataclass(frozen=True)
class FlagRegion:
    """Flag words of one operation on one stream.

    flags: int32 [slots], this rank's words, written by peers. addresses: int64 [W], where each
    rank's region begins. counter: int32 [counters], generations kept by this rank alone (not
    symmetric): the producer advances, the consumer reads. operation: number under which a timed-out
    wait names this region.
    """

    name: str
    operation: int
    flags: Tensor
    addresses: Tensor
    counter: Tensor


@dataclass
class Buffer:
    """One named buffer of every rank."""

    local: Tensor  # flat
    peers: list[Tensor]  # flat views of every rank's buffer, by rank
    pointers: Tensor  # int64 [W]
    handle: object | None


class Workspace:
    """Named symmetric buffers and flag regions of one rank; subclasses allocate the memory.

    A buffer keeps its address until it must grow. Growing is collective, synchronises, and is
    refused inside CUDA graph capture, so ask for the largest size first (`reserve`). One workspace
    serves one stream order: two streams that communicate at the same time need different buffer
    names and flag regions.

    Args:
        rank, world_size: of the group.
        device: whose memory it is.
        timeout_s: the bound on one wait.
        watched: whether a wait that failed is looked for where results are used
            (megatron_fluid.comm.failed_waits), and not in `check_errors` alone.
        flag_words: at least as many 32-bit words has the arena of flags, the same on all ranks.
    """

    _number = 0  # of the workspace among those of the group

    def __init__(
        self, rank: int, world_size: int, device: torch.device, timeout_s: float,
        watched: bool = True, flag_words: int = 0,
    ) -> None:  # fmt: skip
        if not 0 < timeout_s < _LONGEST_S:  # not for NaN either
            allowed = f"more than 0 and less than {_LONGEST_S:g} seconds"
            raise ConfigError.of("timeout_s", timeout_s, allowed)
        self.rank, self.world_size, self.device = rank, world_size, device
        self._operations: list[str] = []
        self.errors = ErrorWords(rank, world_size, device, timeout_s, self._operations)
        if watched:
            failed_waits.watch(self.errors, self)
        self._buffers: dict[tuple[str, torch.dtype], Buffer] = {}
        self._regions: dict[str, FlagRegion] = {}
        self._flag_words = self._counter_words = 0  # words of the arenas that regions have
        self._flag_lines = -(-max(flag_words, _FLAG_WORDS) // _LINE)
        self._closed = False
        self.last_move = ""  # of operations that take turns, which look after it
        # Counts allocations: while it stays the same, addresses of buffers hold.
        self.growths = 0

    @torch.inference_mode(False)
    def _open_arenas(self) -> None:
        """Allocate the arenas that regions are cut from, and wait until they are zero.

        A region may be asked for on any stream, and the kernel that uses it first may run on
        another one, which would not wait for a fill that is still enqueued. Subclasses call this
        last, before the barrier of all ranks.
        """
        arena = self._buffers[_ARENA] = self._allocate(
            _ARENA[0], self._flag_lines * _LINE, _ARENA[1]
        )
        arena.local.zero_()
        self._counters = torch.zeros(_COUNTER_WORDS, dtype=torch.int32, device=self.device)
        # One line a row, each of which begins on a 16-byte boundary.
        lines = torch.arange(self._flag_lines, dtype=torch.int64, device=self.device)
        lines *= 4 * _LINE
        columns = torch.nn.functional.pad(arena.pointers, (0, self.world_size % 2))
        self._flag_addresses = lines[:, None] + columns
        synchronize(self.device)

    @property
    def timeout_s(self) -> float:
        """The bound on one wait, in seconds. Kernels' arguments are prepared once: it is fixed."""
        return self.errors.timeout_s

    @property
    def timeout_ns(self) -> int:
        """The bound on one wait, in nanoseconds, for kernels."""
        return int(self.timeout_s * 1e9)

    # ---- memory, by subclass
    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        raise NotImplementedError

    def _before_growth(self, name: str, nbytes: int) -> None:
        """Barrier of all ranks, with the same request: none uses the old buffer any more."""

    def _after_growth(self) -> None:
        """Barrier of all ranks: their new memory is filled, so that peers may write into it."""

    # ---- buffers; never inference tensors, since training may write into them later
    def reserve(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the flat buffer `name` of `dtype` with at least `numel` elements.

        Collective where it must be allocated or grow.
        """
        self.check_open()
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.local.numel() < numel:
            del buffer  # the old memory goes before the new is taken
            self._grow(name, numel, dtype)
        return self._buffers[name, dtype].local

    @torch.inference_mode(False)
    def _grow(self, name: str, numel: int, dtype: torch.dtype) -> None:
        key = (name, dtype)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise FluidError(
                f"symmetric buffer {name!r} must grow to {numel} {dtype} elements inside a "
                "CUDA-graph capture; call reserve() or run the operation once at this size before "
                "capturing"
            )
        self._before_growth(name, numel * dtype.itemsize)
        self._buffers.pop(key, None)
        self._buffers[key] = self._allocate(name, numel, dtype)
        self.growths += 1
        self._after_growth()

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return this rank's buffer `name` as a contiguous tensor of `shape`; see `reserve`."""
        numel = math.prod(shape)
        return self.reserve(name, numel, dtype)[:numel].view(tuple(shape))

    def peer_pointers(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the addresses of every rank's buffer `name`, int64 [W] on the device.

        `dtype` is needed only where two buffers share the name.
        """
        return self._find(name, dtype).pointers

    def peer_buffers(self, name: str, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's buffer `name`, flat, as tensors that address its memory directly;
        valid until it grows."""
        return self._find(name, dtype).peers

    def _find(self, name: str, dtype: torch.dtype | None) -> Buffer:
        self.check_open()
        if dtype is not None and (name, dtype) in self._buffers:
            return self._buffers[name, dtype]
        matches = [b for (n, d), b in self._buffers.items() if n == name and dtype in (None, d)]
        if len(matches) != 1:
            known = ", ".join(f"{n} ({d})" for n, d in self._buffers)
            wanted, allowed = f"{name} with dtype {dtype}", f"exactly one of {known or 'none yet'}"
            raise ConfigError.of("symmetric buffer", wanted, allowed)
        return matches[0]

    def allocated_bytes(self) -> int:
        """Return the bytes of symmetric memory that this rank holds."""
        return sum(b.local.numel() * b.local.element_size() for b in self._buffers.values())

    # ---- flags
    @torch.inference_mode(False)
    def flags(self, operation: str, slots: int | None = None, counters: int = 1) -> FlagRegion:
        """Return the flag region of `operation` with `slots` words (default W), zero at first.

        Every rank makes its first calls in the same order. Enqueues nothing, so it may be called
        inside a CUDA graph capture.

        Raises:
            FluidError: the workspace has too few words or counters left.
            ConfigError: the region exists, but is smaller.
        """
        self.check_open()
        slots = self.world_size if slots is None else slots
        region = self._regions.get(operation)
        if region is None:
            arena = self._buffers[_ARENA].local
            start, first = self._flag_words, self._counter_words
            for what, wanted, taken, most in (
                ("flags", slots, start, arena.numel()),
                ("counters", counters, first, self._counters.numel()),
            ):
                if taken + wanted > most:
                    used = f"{taken} of {most} words are taken"
                    raise FluidError(f"no space for {wanted} {what} of {operation!r}: {used}")
            self._flag_words += -(-slots // _LINE) * _LINE
            self._counter_words += -(-counters // _LINE) * _LINE
            region = FlagRegion(
                name=operation,
                operation=len(self._operations),
                flags=arena[start : start + slots],
                addresses=self._flag_addresses[start // _LINE, : self.world_size],
                counter=self._counters[first : first + counters],
            )
            self._operations.append(operation)
            self._regions[operation] = region
        elif region.flags.numel() < slots or region.counter.numel() < counters:
            request = f"{slots} slots, {counters} counters"
            raise ConfigError.of(f"flags {operation!r}", request, "at most the first request's")
        return region

    # ---- errors
    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a kernel of this rank gave up waiting.

        Reads host memory only, so it is cheap and may lag a kernel.
        """
        self.errors.check()

    def check_open(self) -> None:
        """Raise FluidError once the workspace is closed."""
        if self._closed:
            raise FluidError("this symmetric workspace is closed")

    def close(self) -> None:
        """Free the memory. Collective for a real workspace, and idempotent.

        If a wait of any rank has given up, or a rank does not come within `timeout_s`, a peer may
        still store here: the memory then stays until the process ends. A rank whose own wait has
        given up waits for nobody.
        """
        if self._closed:
            return
        synchronize(self.device)  # the error words now record every wait that gave up
        self._closed = True
        if not self._all_done(gave_up=self.errors.failed()):
            _ABANDONED.append(self)
            return
        if self.errors.raised or not self.errors.failed():  # else it is yet to be told
            failed_waits.forget(self.errors)
        self._regions.clear()
        self._buffers.clear()

    def _all_done(self, gave_up: bool) -> bool:
        """Return whether every rank is here and none has given up.

        Asked over the job's store: a collective that a rank stays away from waits for the group's
        timeout, or for ever on a GPU.
        """
        channel = self.errors.peers
        if channel is None or channel.alone:
            return not gave_up
        key = f"close workspace {self._number}"
        channel.publish(key, not gave_up)
        if gave_up:
            return False
        answers = channel.read(
            key, range(channel.size), self.timeout_s, lambda known: not all(known.values())
        )
        done = len(answers) == channel.size and all(answers.values())
        if not done:  # ranks that come later keep the memory, too
            channel.publish(key, False)
        return done
