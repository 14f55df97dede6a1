"""Hosts that the GPUs of one machine play: NCCL takes its ranks as such, and loopback is the wire
between them.

Ranks whose NCCL_HOSTID differs reach each other by NCCL's sockets alone, never by NVLink or shared
memory. Loopback carries both directions, so that of a rate each direction has half. Rates need root
and `tc` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["bytes_on_the_wire", "join_host", "limited_to", "missing"]

_WIRE = ("dev", "lo", "root")
_BURST_BYTES, _QUEUE_BYTES = 2**18, 2**26  # packets of loopback have up to 64 KiB


def missing() -> str | None:
    """What this machine lacks to limit a rate, or None."""
    if shutil.which("tc") is None:
        return "the program tc is missing (Debian, Ubuntu: apt-get install iproute2)"
    return None if os.geteuid() == 0 else "rates of links need root"


def join_host(hosts: int) -> None:
    """Make this rank one of its host, of which there are so many with as many ranks each. Called
    before the process group is made.

    Raises:
        ValueError: the ranks cannot be divided by `hosts`.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not 1 < hosts <= ranks or ranks % hosts:
        raise ValueError(f"--hosts: found {hosts}, allowed: 2 or more that divide {ranks} ranks")
    name = f"host-{rank * hosts // ranks}"
    os.environ |= {
        "NCCL_HOSTID": name,
        "MEGATRON_FLUID_NVLINK_DOMAIN": name,
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


@contextlib.contextmanager
def limited_to(gbit_per_s: float) -> Iterator[None]:
    """Within, loopback lets through so many Gbit/s, 0 for what it can. Collective."""
    _set_rate(gbit_per_s)
    try:
        yield
    finally:
        _set_rate(0.0)


def _set_rate(gbit_per_s: float) -> None:
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        # Loopback has no queue of its own to go back to: without a limit it gets a short one.
        rate = ["pfifo", "limit", "10000"]
        if gbit_per_s:
            bucket = ["burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
            rate = ["tbf", "rate", f"{gbit_per_s:g}gbit", *bucket]
        if gbit_per_s or missing() is None:
            subprocess.run(["tc", "qdisc", "replace", *_WIRE, *rate], check=True, timeout=30)
    dist.barrier()
    torch.cuda.synchronize()


def bytes_on_the_wire(call: Callable[[], object]) -> int:
    """What all hosts together send to others in one call, headers included. Collective."""
    counter = Path("/sys/class/net/lo/statistics/tx_bytes")
    dist.barrier()
    torch.cuda.synchronize()
    before = int(counter.read_text())
    call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    found = torch.tensor(int(counter.read_text()) - before, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
