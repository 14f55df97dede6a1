"""Symmetric memory with an owner: named buffers that every rank of an NVLink domain can address,
flags, and bounded waits.

A `SymmetricWorkspace` belongs to one process group. All its ranks ask for the same buffers and flag
regions in the same order with the same sizes (checked when memory is allocated). Kernels receive
raw addresses: `peer_pointers(name)` is an int64 [W] device tensor whose entry r is where rank r's
buffer begins. Multicast is never used.

Generations: a flag word only ever grows, so no barrier has to reset it
(megatron_fluid.kernels.flags). Waits give up after `timeout_s` and leave a record in the error
words, which live in pinned host memory: `check_errors()` reads them without touching the device and
raises PeerTimeoutError naming rank, peer, operation and round.

`SimulatedWorkspace` holds all ranks in one process, on a CPU (kernels under TRITON_INTERPRET=1) or
on one GPU.

Shapes: W ranks of the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.cuda.streams import synchronize
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError

__all__ = [
    "ErrorWords",
    "FlagRegion",
    "SimulatedWorkspace",
    "SymmetricWorkspace",
    "Workspace",
    "agreed_name",
    "symmetric_unsupported_reason",
    "why_not_symmetric",
]

_FLAG_WORDS = 1 << 16
_COUNTER_WORDS = 1 << 14
_LINE = 32  # words: regions never share a 128-byte line
_RECORD = 1 << 62
_ARENA = ("__flags__", torch.int32)
_ABANDONED: list[Workspace] = []
"""Closed workspaces whose memory stays until the process ends: a peer may still store there."""


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


class ErrorWords:
    """Where a kernel that stops waiting says so: words int64 [W, 2] visible to the host, abort
    int32 [1] on the device.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.words = torch.zeros(world_size, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same memory: a look at it costs less than an operation of torch.
        self.on_host = (ctypes.c_int64 * (2 * world_size)).from_address(self.words.data_ptr())
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)


@dataclass
class _Buffer:
    local: Tensor  # flat
    peers: list[Tensor]  # flat views of every rank's buffer, by rank
    pointers: Tensor  # int64 [W]
    handle: object | None


class Workspace:
    """Named symmetric buffers and flag regions of one rank. Subclasses say where the memory comes
    from.

    A buffer keeps its address until it must grow; growing is collective, synchronises, and is
    refused inside CUDA- graph capture, so ask for the largest size first (`reserve`). One workspace
    serves one stream order: two streams that communicate at the same time need different buffer
    names and flag regions.
    """

    _name = ""  # agreed among the processes that share the memory; "" where there is one

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s: found {timeout_s}, allowed: more than 0 seconds")
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._timeout_s = timeout_s
        self.errors = ErrorWords(world_size, device)
        self._buffers: dict[tuple[str, torch.dtype], _Buffer] = {}
        self._regions: dict[str, FlagRegion] = {}
        self._operations: list[str] = []
        self._flag_words = self._counter_words = 0  # of the arenas, that regions have
        self._closed = False
        self.growths = (
            0  # times that memory was taken: addresses of buffers hold as long as it stays
        )

    @torch.inference_mode(False)
    def _open_arenas(self) -> None:
        """What regions are cut from, finished now: a region may be asked for on any stream, and the
        kernel that uses it first may run on another one, which would not wait for a zero that is
        still enqueued. Subclasses call this last, before ranks meet.
        """
        arena = self._buffers[_ARENA] = self._allocate(_ARENA[0], _FLAG_WORDS, _ARENA[1])
        arena.local.zero_()
        self._counters = torch.zeros(_COUNTER_WORDS, dtype=torch.int32, device=self.device)
        # One line a row, each of which begins on a 16-byte boundary.
        lines = torch.arange(_FLAG_WORDS // _LINE, dtype=torch.int64, device=self.device) * (
            4 * _LINE
        )
        columns = torch.nn.functional.pad(arena.pointers, (0, self.world_size % 2))
        self._flag_addresses = lines[:, None] + columns
        synchronize(self.device)

    @property
    def timeout_s(self) -> float:
        """The bound on one wait, in seconds; kernels' arguments are prepared once, so it never
        changes."""
        return self._timeout_s

    @property
    def timeout_ns(self) -> int:
        """The bound on one wait, in nanoseconds, for kernels."""
        return int(self._timeout_s * 1e9)

    # ---- memory, by subclass
    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> _Buffer:
        raise NotImplementedError

    def _before_growth(self, name: str, nbytes: int) -> None:
        """Collective: all ranks are here with the same request, and none uses the old buffer any
        more."""

    def _after_growth(self) -> None:
        """Collective: every rank's new memory is as its allocation left it, so that peers may write
        into it."""

    # ---- buffers; never inference tensors, wherever they are first asked for: training may write
    # into them later
    def reserve(self, name: str, numel: int, dtype: torch.dtype, zeroed: bool = False) -> Tensor:
        """The flat buffer `name` of `dtype` with at least `numel` elements; allocates or grows it
        (collective) when
        needed. zeroed: new memory is zero on every rank before any rank returns.
        """
        self.check_open()
        found = self._buffers.get((name, dtype))
        if found is None or found.local.numel() < numel:
            del found  # the old memory goes before the new is taken
            self._grow(name, numel, dtype, zeroed)
        return self._buffers[name, dtype].local

    @torch.inference_mode(False)
    def _grow(self, name: str, numel: int, dtype: torch.dtype, zeroed: bool) -> None:
        key = (name, dtype)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise FluidError(
                f"symmetric buffer {name!r} must grow to {numel} {dtype} elements inside a "
                "CUDA-graph capture; "
                "call reserve() or run the operation once at this size before capturing"
            )
        self._before_growth(name, numel * dtype.itemsize)
        self._buffers.pop(key, None)
        self._buffers[key] = self._allocate(name, numel, dtype)
        if zeroed:
            self._buffers[key].local.zero_()
        self.growths += 1
        self._after_growth()

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's buffer `name` as a contiguous tensor of `shape`, grown if needed (collective
        when it grows). Not initialised.
        """
        numel = math.prod(shape)
        return self.reserve(name, numel, dtype)[:numel].view(tuple(shape))

    def peer_pointers(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """int64 [W] device tensor: the address of every rank's buffer `name`. `dtype` is needed
        only where two share the name.
        """
        return self._find(name, dtype).pointers

    def peer_view(self, name: str, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Rank `rank`'s buffer `name` as a tensor here (for copy engines); addresses its memory
        directly."""
        numel = math.prod(shape)
        flat = self._find(name, dtype).peers[rank]
        if numel > flat.numel():
            raise ConfigError.of(
                f"peer_view of {name!r}", tuple(shape), f"at most {flat.numel()} elements"
            )
        return flat[:numel].view(tuple(shape))

    def peer_addresses(self, name: str, dtype: torch.dtype) -> list[int]:
        """The address of every rank's buffer `name`, on the host (for copy engines), until it
        grows."""
        return [peer.data_ptr() for peer in self._find(name, dtype).peers]

    def _find(self, name: str, dtype: torch.dtype | None) -> _Buffer:
        self.check_open()
        if dtype is not None and (name, dtype) in self._buffers:
            return self._buffers[name, dtype]
        found = [b for (n, d), b in self._buffers.items() if n == name and dtype in (None, d)]
        if len(found) != 1:
            known = ", ".join(f"{n} ({d})" for n, d in self._buffers)
            raise ConfigError.of(
                "symmetric buffer",
                f"{name} with dtype {dtype}",
                f"exactly one of {known or 'none yet'}",
            )
        return found[0]

    def allocated_bytes(self) -> int:
        """Symmetric memory held by this rank, in bytes."""
        return sum(b.local.numel() * b.local.element_size() for b in self._buffers.values())

    # ---- flags
    @torch.inference_mode(False)
    def flags(
        self, operation: str, slots: int | None = None, counters: int = 1, stream: int = 0
    ) -> FlagRegion:
        """The flag region of (operation, stream) with `slots` words (default W), zero at birth.
        Same order of first calls on every rank. Enqueues nothing, so it may be asked for at any
        time, inside a CUDA-graph capture, too.

        Raises:
            FluidError: the workspace has no room for so many words or counters.
            ConfigError: the region is there, but smaller.
        """
        self.check_open()
        slots = self.world_size if slots is None else slots
        name = f"{operation}@{stream}"
        region = self._regions.get(name)
        if region is None:
            arena = self._buffers[_ARENA].local
            start, first = self._flag_words, self._counter_words
            for what, wanted, taken, most in (
                ("flags", slots, start, arena.numel()),
                ("counters", counters, first, self._counters.numel()),
            ):
                if taken + wanted > most:
                    raise FluidError(
                        f"no room for {wanted} {what} of {name!r}: {taken} of {most} words are "
                        "taken"
                    )
            self._flag_words += -(-slots // _LINE) * _LINE
            self._counter_words += -(-counters // _LINE) * _LINE
            region = FlagRegion(
                name=name,
                operation=len(self._operations),
                flags=arena[start : start + slots],
                addresses=self._flag_addresses[start // _LINE, : self.world_size],
                counter=self._counters[first : first + counters],
            )
            self._operations.append(name)
            self._regions[name] = region
        elif region.flags.numel() < slots or region.counter.numel() < counters:
            raise ConfigError.of(
                f"flags {name!r}",
                f"{slots} slots, {counters} counters",
                "at most the first request's",
            )
        return region

    # ---- errors
    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a kernel of this rank gave up waiting. Reads host memory only,
        so it is cheap and may lag a kernel.
        """
        if not any(self.errors.on_host):
            return
        for peer, (head, tail) in enumerate(self.errors.words.tolist()):
            if head & _RECORD:
                raise PeerTimeoutError(
                    rank=self.rank,
                    peer=peer,
                    operation=self._operations[(head & ~_RECORD) >> 32],
                    round_index=head & 0xFFFFFFFF,
                    timeout_s=self.timeout_s,
                    detail=f"expected generation {tail >> 32}, seen {tail & 0xFFFFFFFF}",
                )

    def check_open(self) -> None:
        """Raise FluidError once the workspace is closed."""
        if self._closed:
            raise FluidError("this symmetric workspace is closed")

    def close(self) -> None:
        """Give the memory back. Collective for a real workspace: no peer may still address it.
        Idempotent.

        Where a wait of any rank has given up, or a rank does not come within `timeout_s`, somebody
        may still store here: the memory then stays until the process ends. A rank whose own wait
        has given up waits for nobody.
        """
        if self._closed:
            return
        synchronize(self.device)  # only now the error words tell of every wait
        self._closed = True
        if not self._all_done(gave_up=any(self.errors.on_host)):
            _ABANDONED.append(self)
            return
        self._regions.clear()
        self._buffers.clear()

    def _all_done(self, gave_up: bool) -> bool:
        """Whether every rank is here, and none of them has given up.

        Asked over the job's store: a collective that a rank stays away from waits for the group's
        own timeout, or for ever on a GPU.
        """
        if not self._name:
            return not gave_up
        keys = [f"megatron_fluid/close/{self._name}/{rank}" for rank in range(self.world_size)]
        store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        done = False
        with contextlib.suppress(
            RuntimeError
        ):  # a rank did not come, or the store died with the rank that held it
            store = store.clone()  # others must not queue behind this wait
            if not gave_up:
                store.set(keys[self.rank], "done")
                store.wait(keys, timedelta(seconds=self.timeout_s))
                done = all(store.get(key) == b"done" for key in keys)
        if not done:
            with contextlib.suppress(RuntimeError):  # whoever comes later keeps the memory, too
                store.set(keys[self.rank], "gave up")
        return done


def agreed_name(group: dist.ProcessGroup) -> str:
    """A name that nothing else in the job has, the same on all ranks of `group`. Collective."""
    names = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, uuid.uuid4().hex, group=group)
    return names[0]


def symmetric_unsupported_reason(group: dist.ProcessGroup) -> str | None:
    """Return why symmetric memory is unavailable to `group`, or None if it is available.

    Collective the first time; then it is remembered.
    """
    return group_resource(group, "symmetric memory", lambda: why_not_symmetric(group))


def why_not_symmetric(group: dist.ProcessGroup, domain_size: int | None = None) -> str | None:
    """None when the ranks of `group` can map each other's memory over NVLink or PCIe peer access,
    else the reason, the same on all ranks. With `domain_size`, those of every domain of so many
    consecutive ranks can. Collective.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    facts: tuple[str, str | None] = (socket.gethostname(), None)
    if device is None:
        facts = (facts[0], "CUDA is not available")
    else:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            facts = (facts[0], f"Triton cannot be imported ({error})")
    world_size = dist.get_world_size(group)
    size = domain_size or world_size
    everyone: list[tuple[str, str | None, int | None]] = [("", None, None)] * world_size
    dist.all_gather_object(everyone, (*facts, device), group=group)
    for rank, (_, reason, _) in enumerate(everyone):
        if reason:
            return f"rank {rank}: {reason}"
    for first in range(0, world_size, size):
        hosts = sorted({host for host, _, _ in everyone[first : first + size]})
        if len(hosts) > 1:
            whose = (
                "the group"
                if size == world_size
                else f"the domain of ranks {first} to {first + size - 1}"
            )
            return f"{whose} spans several hosts: {', '.join(hosts)}"
    mine = None
    own_first = dist.get_rank(group) // size * size
    for rank, (_, _, peer) in list(enumerate(everyone))[own_first : own_first + size]:
        # A process that sees only its own GPU cannot ask; the rendezvous then decides.
        if device is None or peer is None or peer == device or peer >= torch.cuda.device_count():
            continue
        if not torch.cuda.can_device_access_peer(device, peer):
            mine = f"GPU {device} cannot access the memory of GPU {peer} (rank {rank})"
            break
    reasons: list[str | None] = [None] * world_size
    dist.all_gather_object(reasons, mine, group=group)
    return next((reason for reason in reasons if reason), None)


class SymmetricWorkspace(Workspace):
    """Symmetric memory of a CUDA process group inside one NVLink domain.

    Raises ConfigError naming the reason where the ranks cannot map each other's memory.
    Construction is collective.
    """

    @torch.inference_mode(False)
    def __init__(self, group: dist.ProcessGroup, timeout_s: float = 300.0) -> None:
        reason = why_not_symmetric(group)
        if reason is not None:
            raise ConfigError.of(
                "symmetric memory", reason, "one host whose GPUs can access each other"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device, timeout_s)
        self.group = group
        self._name = agreed_name(group)
        self._open_arenas()
        self._after_growth()

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> _Buffer:
        import torch.distributed._symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(numel, dtype=dtype, device=self.device)
        handle = symmetric_memory.rendezvous(local, self.group)
        peers = [
            local if r == self.rank else handle.get_buffer(r, (numel,), dtype)
            for r in range(self.world_size)
        ]
        pointers = torch.tensor(
            [p.data_ptr() for p in peers], dtype=torch.int64, device=self.device
        )
        return _Buffer(local, peers, pointers, handle)

    def _after_growth(self) -> None:
        # torch zeroes what it allocates, when the device gets to it: a peer that is done here
        # sooner would write before that.
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def _before_growth(self, name: str, nbytes: int) -> None:
        torch.cuda.synchronize(self.device)
        requests: list[tuple[str, int]] = [("", 0)] * self.world_size
        dist.all_gather_object(requests, (name, nbytes), group=self.group)
        if len(set(requests)) > 1:
            raise ConfigError.of(
                "symmetric buffer",
                f"requests by rank {requests}",
                "the same name and bytes everywhere",
            )


class SimulatedWorkspace:
    """All ranks of a group in one process: `rank(r)` is rank r's Workspace. Run each step of an
    operation for every rank in turn.

    Producers run before consumers, so no wait ever spins. Buffers come from ordinary memory of
    `device` and are filled with a poison value.
    """

    def __init__(
        self, world_size: int, device: torch.device | str = "cpu", timeout_s: float = 1.0
    ) -> None:
        self.world_size = world_size
        self.device = torch.device(device)
        self._memory: dict[tuple[str, torch.dtype, int], list[Tensor]] = {}
        self._ranks = [_SimulatedRank(self, r, timeout_s) for r in range(world_size)]

    def rank(self, rank: int) -> Workspace:
        """Rank `rank`'s side of the workspace."""
        return self._ranks[rank]

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's memory of one buffer; the first rank to ask allocates for all."""
        key = (name, dtype, numel)
        if key not in self._memory:
            poison = float("nan") if dtype.is_floating_point else -12345
            self._memory[key] = [
                torch.full((numel,), poison, dtype=dtype, device=self.device)
                for _ in range(self.world_size)
            ]
            synchronize(self.device)
        return self._memory[key]


class _SimulatedRank(Workspace):
    def __init__(self, owner: SimulatedWorkspace, rank: int, timeout_s: float) -> None:
        super().__init__(rank, owner.world_size, owner.device, timeout_s)
        self._owner = owner
        self._open_arenas()

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> _Buffer:
        peers = self._owner.shared(name, numel, dtype)
        pointers = torch.tensor(
            [p.data_ptr() for p in peers], dtype=torch.int64, device=self.device
        )
        return _Buffer(peers[self.rank], peers, pointers, None)
