"""Symmetric memory of a CUDA process group: which groups can have it, and the workspace on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.groups import group_resource
from megatron_fluid.comm.waits import WaitName, group_waits
from megatron_fluid.comm.workspace import Buffer, Workspace
from megatron_fluid.errors import ConfigError
from megatron_fluid.topology import host_identity

__all__ = ["SymmetricWorkspace", "symmetric_unsupported_reason", "watched_mapping"]


def symmetric_unsupported_reason(
    group: dist.ProcessGroup, domain_size: int | None = None
) -> str | None:
    """Return why symmetric memory is unavailable to `group`, or None if it is available.

    It is available if the ranks of every domain of `domain_size` consecutive ranks (None: of the
    group) can map each other's memory over NVLink or PCIe peer access. The answer is the same on
    all ranks. Collective the first time; then it is remembered.
    """
    name = "symmetric memory" if domain_size is None else f"symmetric memory by {domain_size}"
    return group_resource(group, name, lambda: _ask_every_rank(group, domain_size))


def _ask_every_rank(group: dist.ProcessGroup, domain_size: int | None) -> str | None:
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    missing = "CUDA is not available" if device is None else ""
    if not missing:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            missing = f"Triton cannot be imported ({error})"
    world_size = dist.get_world_size(group)
    size = domain_size or world_size
    everyone: list[tuple[str, str, int | None]] = agreement(group).gather(
        "look for symmetric memory", (host_identity(), missing, device)
    )
    for rank, (_, missing, _) in enumerate(everyone):
        if missing:
            return f"rank {rank}: {missing}"
    for first in range(0, world_size, size):
        hosts = sorted({host for host, _, _ in everyone[first : first + size]})
        if len(hosts) > 1:
            whole = size == world_size
            whose = "the group" if whole else f"the domain of ranks {first} to {first + size - 1}"
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
    reason = _first_reason(group, mine)
    if reason is None and 1 < size == world_size:
        reason = _rendezvous_reason(group)
    return reason


@contextlib.contextmanager
def watched_mapping(group: dist.ProcessGroup) -> Iterator[None]:
    """Watch the host while torch maps the ranks' memory, which waits for all of them without a
    bound of this package."""
    waits = group_waits(group)
    with waits.inside_library(WaitName("mapping of symmetric memory"), waits.timeout_s):
        yield


def _first_reason(group: dist.ProcessGroup, mine: str | None) -> str | None:
    """The reason of the first rank that has one. Collective."""
    reasons = agreement(group).gather("reasons against symmetric memory", mine)
    return next((reason for reason in reasons if reason), None)


def _rendezvous_reason(group: dist.ProcessGroup) -> str | None:
    """Share a little memory, and return why some rank could not, or None. Collective.

    Peer access says what the GPUs can do. Whether the processes may is known only from trying: a
    container may forbid pidfd_getfd, and a process that sees its own GPU alone cannot ask.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    reason, held = None, []
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric_memory.empty(256, dtype=torch.uint8, device=device)
        with watched_mapping(group):
            held.append((memory, symmetric_memory.rendezvous(memory, group)))
    except RuntimeError as error:
        told = str(error).strip().splitlines()[0]
        reason = f"rank {dist.get_rank(group)} cannot share symmetric memory ({told})"
    first_reason = _first_reason(group, reason)
    held.clear()  # only now: all ranks have mapped it
    return first_reason


class SymmetricWorkspace(Workspace):
    """Symmetric memory of a CUDA process group, by default inside one NVLink domain.

    Construction is collective.

    Raises:
        ConfigError: the ranks cannot map each other's memory, with the reason.
    """

    @torch.inference_mode(False)
    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float = 300.0, flag_words: int = 0
    ) -> None:
        self._require(group)
        device = torch.device("cuda", torch.cuda.current_device())
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(rank, size, device, timeout_s, flag_words=flag_words)
        self.group = group
        channel = self.errors.peers = agreement(group)
        self._number = channel.ticket()
        self._open_arenas()
        self._after_growth()

    def _require(self, group: dist.ProcessGroup) -> None:
        """Raise ConfigError where the group cannot have this memory."""
        reason = symmetric_unsupported_reason(group)
        if reason is not None:
            allowed = "one host whose GPUs can access each other"
            raise ConfigError.of("symmetric memory", reason, allowed)

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        import torch.distributed._symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(numel, dtype=dtype, device=self.device)
        with watched_mapping(self.group):
            handle = symmetric_memory.rendezvous(local, self.group)
        peers = [
            local if r == self.rank else handle.get_buffer(r, (numel,), dtype)
            for r in range(self.world_size)
        ]
        addresses = [p.data_ptr() for p in peers]
        pointers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return Buffer(local, peers, pointers, handle)

    def _after_growth(self) -> None:
        # torch zeroes what it allocates in stream order: without this, a peer that has passed the
        # barrier could write before the zeros.
        torch.cuda.synchronize(self.device)
        agreement(self.group).barrier("symmetric memory is zeroed", self.timeout_s)

    def _before_growth(self, name: str, nbytes: int) -> None:
        torch.cuda.synchronize(self.device)
        requests = agreement(self.group).gather(
            "growth of symmetric memory", (name, nbytes), self.timeout_s
        )
        if len(set(requests)) > 1:
            found = f"requests by rank {requests}"
            raise ConfigError.of("symmetric buffer", found, "the same name and bytes everywhere")
