"""Which ranks of a group share a host or an NVLink domain."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.topology import check_group, domain_name

__all__ = ["detect_domains", "detect_hosts"]


def detect_domains(group: dist.ProcessGroup | None, timeout_s: float | None = None) -> list[int]:
    """Return the domain id of every rank of a group, alike on all ranks. Collective.

    Ranks of one host form a domain (MEGATRON_FLUID_NVLINK_DOMAIN overrides it). Names go through
    the group's store and not through a collective of torch, so this works before the first use of
    the group's devices.

    Args:
        timeout_s: bound on the wait in seconds; None: that of the group's waits.

    Returns:
        W integers; domains are numbered by their first rank, from 0.

    Raises:
        ConfigError: no group.
        PeerTimeoutError: a rank did not come within timeout_s.
    """
    return detect_hosts(group, timeout_s)[0]


def detect_hosts(
    group: dist.ProcessGroup | None, timeout_s: float | None = None
) -> tuple[list[int], list[str]]:
    """As detect_domains, and the name of every rank's host, for people: its host name, with the
    NVLink domain where that is named. [W], [W]"""
    channel = agreement(check_group(group))
    named = os.environ.get("MEGATRON_FLUID_NVLINK_DOMAIN")
    host = f"{socket.gethostname()} ({named})" if named else socket.gethostname()
    found = channel.gather("hosts of the group", (domain_name(), host), timeout_s)
    ids: dict[str, int] = {}
    return [ids.setdefault(domain, len(ids)) for domain, _ in found], [name for _, name in found]
