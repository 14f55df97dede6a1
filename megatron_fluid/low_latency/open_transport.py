"""Choosing and building the transport of an AllToAll. Everything here is collective over the
group."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import uuid
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.symmetric import SymmetricWorkspace, symmetric_unsupported_reason
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.transport import Transport
from megatron_fluid.low_latency.two_level import TwoLevel, TwoLevelLayout
from megatron_fluid.topology import host_identity

__all__ = ["choose_transport", "domain_size_of", "open_transport"]


def domain_size_of(group: dist.ProcessGroup, domain_size: int | None) -> int:
    """`domain_size`, or the ranks of one host.

    Raises:
        ConfigError: the hosts do not hold the same number of consecutive ranks.
    """
    if domain_size is not None:
        return domain_size
    hosts: list[str] = agreement(group).gather("hosts of an AllToAll", host_identity())
    size = hosts.count(hosts[0])
    if hosts != [host for host in dict.fromkeys(hosts) for _ in range(size)]:
        allowed = "hosts that hold the same number of consecutive ranks"
        raise ConfigError.of("hosts", ", ".join(hosts), allowed)
    return size


def collective_backend(group: dist.ProcessGroup) -> str:
    """The backend of the group's collectives on this machine's devices: one group may have gloo for
    CPUs and NCCL for GPUs."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    device = "cuda" if torch.cuda.is_available() and "cuda" in backends else "cpu"
    return backends.get(device, dist.get_backend(group))


def choose_transport(
    wanted: str, group: dist.ProcessGroup, layout: Layout, domain_size: int | None, internode: bool
) -> tuple[str, str]:
    """(transport, why not a faster one). Raises ConfigError where `wanted` is a name that cannot be
    met."""
    backend = collective_backend(group)
    names = wanted.split("+")
    if (set(names) & {"nccl", "gloo"}) - {backend}:
        allowed = f"the backend of the group, {backend}, or nvlink"
        raise ConfigError.of("transport", wanted, allowed)
    reason = _nvshmem_reason(group) if "nvshmem" in names else None
    if reason is None and wanted.startswith("nvlink+"):
        reason = two_level_unsupported_reason(group, layout, domain_size)
    if reason is None and wanted in ("auto", "nvlink"):
        reason = symmetric_unsupported_reason(group)
        if reason is None:
            return "nvlink", ""
    if wanted != "auto":
        if reason is not None:
            raise ConfigError(f"transport: found {wanted!r}, which cannot be met: {reason}")
        return wanted, ""
    if internode and backend == "nccl" and not layout.batch_invariant:
        no_levels = two_level_unsupported_reason(group, layout, domain_size, auto=True)
        if no_levels is None:
            return "nvlink+nccl", f"not nvlink alone: {reason}"
        reason = f"{reason}; nor nvlink+nccl: {no_levels}"
    return backend, f"not nvlink: {reason}"


def _nvshmem_reason(group: dist.ProcessGroup) -> str | None:
    """Why some rank cannot use NVSHMEM, the same on all ranks, or None."""
    from megatron_fluid.low_latency.nvshmem import nvshmem_unsupported_reason

    reasons = agreement(group).gather("reasons against nvshmem", nvshmem_unsupported_reason(group))
    return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), None)


def two_level_unsupported_reason(
    group: dist.ProcessGroup, layout: Layout, domain_size: int | None, auto: bool = False
) -> str | None:
    """Why NVLink inside domains of this size (None: the hosts) does not serve the group, or
    None. With `auto` there must be several domains of several ranks."""
    try:
        size = domain_size_of(group, domain_size)
        TwoLevelLayout(layout, size)
    except ConfigError as error:
        return str(error)
    if auto and size in (1, layout.world_size):
        return "every host has one rank" if size == 1 else "the whole group is one domain"
    # Asked of all ranks: a domain that can map its memory would wait for one that cannot.
    return symmetric_unsupported_reason(group, size)


# A buffer made in inference mode could not be written outside it.
@torch.inference_mode(False)
def open_transport(
    transport: str,
    layout: Layout,
    group: dist.ProcessGroup,
    timeout_s: float,
    domain_size: int | None = None,
) -> tuple[Transport, torch.device]:
    """The transport of this rank, and the device of its tensors."""
    if "+" in transport:
        return _open_two_level(transport, layout, group, timeout_s, domain_size)
    if transport == "nvlink":
        from megatron_fluid.low_latency.peer_memory import PeerMemory, flag_words

        words = flag_words(layout, PeerMemory.flag_stride)
        workspace = SymmetricWorkspace(group, timeout_s, words)
        return PeerMemory(layout, workspace), workspace.device
    if transport == "nvshmem":
        from megatron_fluid.low_latency.nvshmem import Nvshmem, NvshmemWorkspace
        from megatron_fluid.low_latency.peer_memory import flag_words

        heap = NvshmemWorkspace(group, timeout_s, flag_words(layout, Nvshmem.flag_stride))
        elements = dist.get_process_group_ranks(group)
        return Nvshmem(layout, heap, elements=elements), heap.device
    from megatron_fluid.low_latency.collective import Collective

    on_gpu = transport == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Collective(layout, group, device, timeout_s), device


@contextlib.contextmanager
def _new_group_names(group: dist.ProcessGroup) -> Iterator[None]:
    """Give the groups that are made inside new names, the same on all ranks of `group`. Collective.

    With local synchronisation torch names a group by its ranks and by the number of groups that
    this process is in. So a destroyed group's name comes back, and the new group finds the old
    one's keys in the store; and ranks that are in different numbers of groups wait for different
    names. new_group takes no name, and without local synchronisation it needs every rank of the
    job.
    """
    module = dist.distributed_c10d
    name = agreement(group).first("name of groups of two levels", uuid.uuid4().hex)
    numbers = itertools.count()
    before = module._hash_ranks_to_str
    module._hash_ranks_to_str = lambda ranks: hashlib.sha1(
        f"{name} {next(numbers)} {ranks}".encode()
    ).hexdigest()
    try:
        yield
    finally:
        module._hash_ranks_to_str = before


def _open_two_level(
    transport: str,
    layout: Layout,
    group: dist.ProcessGroup,
    timeout_s: float,
    domain_size: int | None,
) -> tuple[Transport, torch.device]:
    sizes = TwoLevelLayout(layout, domain_size_of(group, domain_size))
    size, rank = sizes.domain_size, dist.get_rank(group)
    world, backend = dist.get_process_group_ranks(group), collective_backend(group)
    domain, index = divmod(rank, size)
    inside, _, between = transport.partition("+")
    # The ranks of this rank's domain and of its rail, over which weights are gathered on GPUs.
    members = (
        (world[domain * size : (domain + 1) * size], backend),
        (world[index::size], "nccl" if between == "nvshmem" else backend),
    )
    with _new_group_names(group):
        groups = [
            dist.new_group(ranks, backend=name, use_local_synchronization=True)
            for ranks, name in members
        ]
    # The rail first: with NVSHMEM it decides which symmetric memory the process has.
    rail, _ = open_transport(between, sizes.rail, groups[1], timeout_s)
    inner, device = open_transport(inside, sizes.domain, groups[0], timeout_s)
    return TwoLevel(sizes, rank, inner, rail, device, groups, timeout_s), device
