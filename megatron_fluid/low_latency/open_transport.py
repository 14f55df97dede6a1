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

__all__ = ["choose_transport", "find_domain_size", "open_transport"]


def find_domain_size(group: dist.ProcessGroup, domain_size: int | None) -> tuple[int | None, str]:
    """(`domain_size`, "") if it is given, (ranks of one host, "") if every host has the same number
    of consecutive ranks, else (None, reason)."""
    if domain_size is not None:
        return domain_size, ""
    hosts: list[str] = agreement(group).gather("hosts of an AllToAll", host_identity())
    size = hosts.count(hosts[0])
    for first in range(0, len(hosts), size):
        host = hosts[first]
        if hosts[first : first + size] != [host] * size or hosts.count(host) != size:
            reason = "hosts do not hold the same number of consecutive ranks"
            return None, f"{reason}: {', '.join(hosts)}"
    return size, ""


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
    inside, _, between = wanted.partition("+")
    for name in (inside, between):
        if name in ("nccl", "gloo") and backend != name:
            allowed = f"the backend of the group, {backend}, or nvlink"
            raise ConfigError.of("transport", wanted, allowed)
    if "nvshmem" in (inside, between):
        _require_nvshmem(group, wanted)
    if between and inside == "nvlink":
        # Asked of all ranks: a domain that can map its memory would wait for one that cannot.
        size, why_not = find_domain_size(group, domain_size)
        if size is not None:
            TwoLevelLayout(layout, size)
            why_not = symmetric_unsupported_reason(group, size) or ""
        if why_not:
            raise _unmet(wanted, why_not)
    if between or wanted in ("nccl", "gloo", "nvshmem"):
        return wanted, ""

    reason = symmetric_unsupported_reason(group)
    if reason is None:
        return "nvlink", ""
    if wanted == "nvlink":
        raise _unmet(wanted, reason)
    if internode and backend == "nccl" and not layout.batch_invariant:
        no_levels = two_level_unsupported_reason(group, layout, domain_size)
        if no_levels is None:
            return "nvlink+nccl", f"not nvlink alone: {reason}"
        reason = f"{reason}; nor nvlink+nccl: {no_levels}"
    return backend, f"not nvlink: {reason}"


def _require_nvshmem(group: dist.ProcessGroup, wanted: str) -> None:
    from megatron_fluid.low_latency.nvshmem import nvshmem_unsupported_reason

    mine = nvshmem_unsupported_reason(group)
    for rank, reason in enumerate(agreement(group).gather("reasons against nvshmem", mine)):
        if reason is not None:
            raise _unmet(wanted, f"rank {rank}: {reason}")


def _unmet(wanted: str, reason: str) -> ConfigError:
    return ConfigError(f"transport: found {wanted!r}, which cannot be met: {reason}")


def two_level_unsupported_reason(
    group: dist.ProcessGroup, layout: Layout, domain_size: int | None
) -> str | None:
    """Why NVLink inside domains of this size (None: the hosts) does not serve the group, or
    None."""
    size, reason = find_domain_size(group, domain_size)
    if size is None:
        return reason
    if size == 1:
        return "every host has one rank"
    if size == layout.world_size:
        return "the whole group is one domain"
    try:
        TwoLevelLayout(layout, size)
    except ConfigError as error:
        return str(error)
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
    size, reason = find_domain_size(group, domain_size)
    if size is None:
        raise _unmet(transport, reason)
    sizes = TwoLevelLayout(layout, size)
    rank, world = dist.get_rank(group), dist.get_process_group_ranks(group)
    domain, index = divmod(rank, size)
    # The ranks of this rank's domain and of its rail.
    members = world[domain * size : (domain + 1) * size], world[index::size]
    backend = collective_backend(group)
    with _new_group_names(group):
        groups = [
            dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            for ranks in members
        ]
    inside, _, between = transport.partition("+")
    # The rails first: with NVSHMEM they decide which symmetric memory the process has.
    rail, _ = open_transport(between, sizes.rail, groups[1], timeout_s)
    weights_rail, _ = open_transport(between, sizes.weights, groups[1], timeout_s)
    inner, device = open_transport(inside, sizes.domain, groups[0], timeout_s)
    return TwoLevel(sizes, rank, inner, rail, weights_rail, device, groups), device
