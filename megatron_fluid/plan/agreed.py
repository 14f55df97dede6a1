"""The figures that the ranks of a group predict with: alike on all of them, so that all choose
alike without another word.

The group's first rank looks for them in the user's cache folder, in a file for this GPU, host
processor, versions and size of group. What is missing is measured, once: the device by that rank,
the links by all ranks, of which the slowest counts. The first rank sends what is found to the
others through the group's store. The setting `machine` (`--fluid-machine`) pins them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.config import current_config
from megatron_fluid.cuda.kernel_cache import KernelCache, say
from megatron_fluid.errors import ConfigError
from megatron_fluid.plan.machine import Link, Machine, reference_machine
from megatron_fluid.plan.measure import measure_device, measure_links
from megatron_fluid.topology import host_identity

__all__ = ["agreed_machine", "cached_machine", "machine_key", "machine_of_device"]

_FORMAT = 2  # of the files, and how they are measured: another number is another key


@functools.cache
def _cache() -> KernelCache:
    return KernelCache(suffix=".machine", what="figures of this machine")


def agreed_machine(
    group: dist.ProcessGroup, device_type: str, setting: str | None = None
) -> Machine | None:
    """The figures by which `auto` chooses for a group, or None where it does not choose by figures:
    with "auto" on CPUs. Collective the first time; then they are remembered.

    Args:
        device_type: "cuda" or "cpu", where the layers compute.
        setting: in the place of the configuration's `machine`.

    Raises:
        ConfigError: on every rank: the setting's file holds no figures.
        PeerTimeoutError: a rank has not come within the timeout.
    """
    asked = current_config().machine if setting is None else setting
    if asked == "auto":
        if device_type == "cpu":
            return None
        asked = "measure"
    if asked == "reference":
        return reference_machine(device_type, group.size())
    return group_resource(
        group, ("plan", device_type, asked), lambda: _agree(group, device_type, asked)
    )


def machine_of_device(device_type: str) -> Machine:
    """The figures of this process's device without links: as they are kept, or measured now."""
    device = _device(device_type)
    key = machine_key(device_type)
    code = _cache().obtain(key, lambda: measure_device(device).dumps().encode())
    try:
        return Machine.loads(code, key)
    except ConfigError:  # a whole file of other contents
        machine = measure_device(device)
        _cache().write(key, machine.dumps().encode())
        return machine


def cached_machine(key: str) -> Machine | None:
    """The figures that are kept under a key; None where there are none that can be read."""
    code = _cache().read(key)
    if code is None:
        return None
    try:
        return Machine.loads(code, key)
    except ConfigError:
        return None


def machine_key(device_type: str, *links: object) -> str:
    """What figures are kept under: a hash of device, processor, versions, and `links`."""
    facts: list[object] = [_FORMAT, torch.__version__, _processor()]
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(_device(device_type))
        facts += [properties.name, properties.multi_processor_count, torch.version.cuda]
    else:
        facts += ["CPU", torch.get_num_threads()]
    return hashlib.sha256(repr((facts, links)).encode()).hexdigest()


def _device(device_type: str) -> torch.device:
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@functools.cache
def _processor() -> str:
    """The host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


# ---- between ranks


def _agree(group: dist.ProcessGroup, device_type: str, asked: str) -> Machine:
    if group.size() == 1 or dist.get_backend(group) == "fake":
        if asked != "measure":
            return _of_ranks(Machine.read(asked), group.size())
        return machine_of_device(device_type)
    words = agreement(group)
    hosts = words.gather("hosts of the machine figures", host_identity())
    opening: Any = None
    if group.rank() == 0:
        opening = _opening(group, device_type, asked, len(set(hosts)))
    machine, key, failure = words.first("kept figures of the machine", opening)
    if failure is not None:
        raise ConfigError(failure)
    if key is None:
        found: Machine = machine
        return found
    links = measure_links(group, _device(device_type), machine)
    every = words.gather("measured links", links)
    final: Any = None
    if group.rank() == 0:
        collective = _slowest([link for link, _ in every])
        copies = None if any(link is None for _, link in every) else _slowest([b for _, b in every])
        final = dataclasses.replace(machine, collective=collective, copies=copies)
        _cache().write(key, final.dumps().encode())
    found = words.first("figures of the machine", final)
    return found


def _opening(
    group: dist.ProcessGroup, device_type: str, asked: str, hosts: int
) -> tuple[Machine | None, str | None, str | None]:
    """What the first rank knows: the figures; the key under which links are to be kept, where they
    are missing; and why there is nothing."""
    try:
        if asked != "measure":
            return _of_ranks(Machine.read(asked), group.size()), None, None
        key = machine_key(device_type, dist.get_backend(group), group.size(), hosts)
        kept = cached_machine(key)
        if kept is not None and kept.collective is not None:
            return kept, None, None
        return machine_of_device(device_type), key, None
    except ConfigError as error:
        return None, None, str(error)
    except (RuntimeError, OSError) as error:  # out of memory: training goes on
        say(f"this machine could not be measured ({error}): reference figures in place of it")
        return reference_machine(device_type, group.size()), None, None


def _of_ranks(machine: Machine, ranks: int) -> Machine:
    """Figures of a file, for a group of so many ranks."""
    if ranks > 1 and machine.collective is None:
        allowed = "figures of a group's links, which `megatron-fluid plan --write` has on ranks"
        raise ConfigError.of("machine", f"{machine.source} without `collective`", allowed)

    def of(link: Link | None) -> Link | None:
        return None if link is None or ranks < 2 else dataclasses.replace(link, ranks=ranks)

    return dataclasses.replace(
        machine, copies=of(machine.copies), collective=of(machine.collective)
    )


def _slowest(links: Sequence[Link]) -> Link:
    """Each figure as the rank has it that is worst off."""
    return Link(
        links[0].ranks,
        max(link.latency_s for link in links),
        min(link.bytes_per_s for link in links),
        max(link.start_s for link in links),
        min(link.hidden for link in links),
    )
