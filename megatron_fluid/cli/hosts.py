"""`megatron-fluid doctor --hosts`: the hosts of a job, how their ranks reach each other, how fast,
and which settings of NCCL, NVSHMEM or gloo are missing or differ."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fluid.cli import bandwidth
from megatron_fluid.cli.tables import paragraph, wrapped_table
from megatron_fluid.topology import detect_hosts

__all__ = ["Facts", "HostsReport", "Link", "advice", "examine", "report_text"]

_PREFIXES = ("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "FI_")
_SLOW = 0.5  # of the median: a link below this is named


@dataclass(frozen=True)
class Facts:
    """Of one host.

    Attributes:
        name: its host name, with the NVLink domain where that is named.
        ranks: of the job. rdma: RDMA devices. interfaces: network interfaces but the loopback.
        settings: environment variables of NCCL, NVSHMEM, gloo, UCX and libfabric.
    """

    name: str
    ranks: Sequence[int]
    rdma: Sequence[str]
    interfaces: Sequence[str]
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Link:
    """From one host to another, or inside one: how, and GB/s of its pairs of ranks."""

    source: str
    target: str
    how: str
    median: float
    slowest: float
    pairs: int


@dataclass(frozen=True)
class HostsReport:
    """What `examine` found; `missing` says what to set, `wrong` what arrived other than it was
    sent."""

    backend: str
    device: str
    hosts: Sequence[Facts]
    links: Sequence[Link]
    missing: Sequence[str]
    wrong: Sequence[str]


def _listed(folder: str) -> list[str]:
    path = Path(folder)
    return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []


def examine(group: dist.ProcessGroup, device: torch.device) -> HostsReport:
    """Look at all hosts of a group and measure all pairs of ranks. Collective; the same report on
    every rank."""
    domains, names = detect_hosts(group)
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)}
    interfaces = [name for name in _listed("/sys/class/net") if name != "lo"]
    mine = (_listed("/sys/class/infiniband"), interfaces, settings)
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    measured = bandwidth.measure(group, device)
    hosts = []
    for domain in range(max(domains) + 1):
        ranks = [rank for rank, of in enumerate(domains) if of == domain]
        hosts.append(Facts(names[ranks[0]], ranks, *every[ranks[0]]))
    backend = str(measured.backend)
    links = _links(hosts, backend, measured.copies, measured.direct)
    missing = advice(backend, hosts, links)
    return HostsReport(backend, measured.device, hosts, links, missing, measured.wrong)


def _links(
    hosts: Sequence[Facts], backend: str, copies: Sequence[Sequence[float | None]], direct: bool
) -> list[Link]:
    links = []
    for source in hosts:
        for target in hosts:
            rates = [copies[a][b] for a in source.ranks for b in target.ranks if a != b]
            found = [rate for rate in rates if rate is not None]
            if not found:
                continue
            inside = "copies between GPUs" if direct else f"{backend} inside the host"
            how = inside if source is target else _way(backend, source)
            rate = statistics.median(found)
            links.append(Link(source.name, target.name, how, rate, min(found), len(found)))
    return links


def _uses_rdma(host: Facts) -> bool:
    off = host.settings.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    return bool(host.rdma) and not off and host.settings.get("NCCL_NET", "IB") != "Socket"


def _way(backend: str, host: Facts) -> str:
    """What a host's ranks send over, as its devices and settings say."""
    if backend == "nccl" and _uses_rdma(host):
        chosen = host.settings.get("NCCL_IB_HCA", ", ".join(host.rdma))
        return f"nccl over RDMA ({chosen})"
    name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    return f"{backend} over TCP ({host.settings.get(name, ', '.join(host.interfaces))})"


def advice(backend: str, hosts: Sequence[Facts], links: Sequence[Link]) -> list[str]:
    """What is missing or odd, each a sentence that names hosts and settings."""
    if len(hosts) == 1:
        return []
    said: list[str] = []
    name = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    unsure = [h.name for h in hosts if len(h.interfaces) > 1 and name not in h.settings]
    if unsure:
        said.append(
            f"{name} is not set on {', '.join(unsure)}, which have several interfaces: set it to "
            "the one that the other hosts reach"
        )
    if backend == "nccl":
        unused = [h.name for h in hosts if h.rdma and not _uses_rdma(h)]
        if unused:
            said.append(
                f"RDMA devices of {', '.join(unused)} are not used: NCCL_IB_DISABLE or NCCL_NET "
                "turns them off"
            )
        without = [h.name for h in hosts if not h.rdma]
        if without:
            said.append(
                f"no RDMA device on {', '.join(without)}: NCCL goes over TCP there; give the "
                "container /dev/infiniband, or load the driver"
            )
    for setting in sorted({key for host in hosts for key in host.settings}):
        values = {host.name: host.settings.get(setting) for host in hosts}
        if len(set(values.values())) > 1:
            words = ", ".join(f"{value or 'unset'} on {host}" for host, value in values.items())
            said.append(f"{setting} differs: {words}")
    between = [link for link in links if link.source != link.target]
    if between:
        middle = statistics.median(link.median for link in between)
        slow = [f"{k.source} to {k.target}" for k in between if k.slowest < _SLOW * middle]
        if slow:
            said.append(
                f"below half of the median of {middle:.2f} GB/s: {', '.join(slow)}; look at the "
                "cables, switch ports and the NUMA node of the network card"
            )
    return said


def report_text(report: HostsReport) -> str:
    """The report in at most 100 columns."""
    ranks = sum(len(host.ranks) for host in report.hosts)
    count = len(report.hosts)
    where = f"{ranks} x {report.device} on {count} host{'s' if count > 1 else ''}"
    lines = [f"hosts: {where}, {report.backend}", ""]
    rows = (
        (
            host.name,
            _span(host.ranks),
            f"RDMA: {', '.join(host.rdma) or 'none'}; interfaces: "
            f"{', '.join(host.interfaces) or 'none'}; "
            + (", ".join(f"{k}={v}" for k, v in host.settings.items()) or "no settings"),
        )
        for host in report.hosts
    )
    lines.append(wrapped_table(("host", "ranks", "devices and settings"), rows))
    links = (
        (k.source, k.target, f"{k.median:.2f}", f"{k.slowest:.2f}", str(k.pairs), k.how)
        for k in report.links
    )
    head = ("from", "to", "GB/s", "slowest", "pairs", "by")
    lines += ["", wrapped_table(head, links), ""]
    if report.wrong:
        lines.append(paragraph("WRONG DATA: " + "; ".join(report.wrong)))
    if count == 1:
        lines.append("one host: start this on all ranks of a job over several hosts")
    elif not report.missing:
        lines.append("no setting is missing or differs between hosts")
    lines += [paragraph(text, "  ", "- ") for text in report.missing]
    return "\n".join(lines)


def _span(ranks: Sequence[int]) -> str:
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
