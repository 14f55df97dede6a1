"""Shapes of the benchmark of slow links, and what its processes tell each other.

The parent holds the links. Rank 0 of the ranks asks it for a rate, measures, and sends rows.

    rank 0 -> parent: ("rate", bits a second or None), answered by True once it is in force
    rank 0 -> parent: ("rows", [Row, ...])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.cases.moe import MoECase
from benchmarks.harness.emulated_hosts import DEVICE
from benchmarks.harness.results import Row

__all__ = [
    "CASES",
    "CHANNEL",
    "MAIN_VARIANTS",
    "VARIANTS",
    "Parent",
    "WireCase",
    "label",
    "link_row",
    "pin",
    "rate_for",
    "sent_bytes",
]

CHANNEL = "FLUID_WIRE_CHANNEL"
"""Environment variable: the file descriptor of rank 0's connection to the parent."""
VARIANTS = ("fluid", "fluid_no_overlap", "plain", "megatron_alltoall", "megatron_allgather")
MAIN_VARIANTS = ("megatron_alltoall", "megatron_allgather", "fluid")
"""Of the main job; the first measures the computation."""


@dataclass(frozen=True)
class WireCase:
    """One problem. `kind`: "moe", "attention", "layer" or "main", which its name begins with.

    Attributes:
        hosts, ranks: hosts, and ranks on each.
        moe: widths of the MoE layer; its hidden size is the attention's, too.
        tokens: of a rank; of "main" the length of a sequence.
        heads: attention heads, of 64.
        layers: of "main".
    """

    kind: str
    hosts: int
    ranks: int
    moe: MoECase
    tokens: int
    heads: int = 8
    layers: int = 2


_NARROW = MoECase(512, 1024, 8, 2)
_TOP_8 = MoECase(512, 256, 32, 8)
CASES = {
    "moe-2x1": WireCase("moe", 2, 1, _NARROW, 1024),
    "moe-4x1": WireCase("moe", 4, 1, _NARROW, 1024),
    "moe-4x1-top8": WireCase("moe", 4, 1, _TOP_8, 1024),
    "moe-2x2": WireCase("moe", 2, 2, _TOP_8, 512),
    "attention-2x1": WireCase("attention", 2, 1, _NARROW, 1024),
    "layer-2x1": WireCase("layer", 2, 1, _NARROW, 512),
    "main-2x1": WireCase("main", 2, 1, MoECase(256, 512, 8, 2), 512),
    "moe-2x1-tiny": WireCase("moe", 2, 1, MoECase(32, 48, 4, 2), 32),
}
"""Those named `-tiny` are for tests."""


class Parent:
    """Rank 0's connection to the process that holds the links; other ranks have none."""

    def __init__(self) -> None:
        number = os.environ.get(CHANNEL)
        self._connection = Connection(int(number)) if number else None

    def set_rate(self, bits_per_s: float | None) -> None:
        """Change the rate of all links, before any rank goes on. Collective."""
        dist.barrier()
        if self._connection is not None:
            self._connection.send(("rate", bits_per_s))
            assert self._connection.recv() is True
        dist.barrier()

    def rows(self, rows: list[Row]) -> None:
        """Hand over measurements."""
        if self._connection is not None and rows:
            self._connection.send(("rows", rows))


def pin() -> None:
    """Keep this thread, which computes, on one core; threads that transfer stay free. Call it after
    they were made."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})


def sent_bytes() -> int:
    """Bytes that this rank's host has sent to others since it was made, all headers included."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def label(name: str, ratio: float) -> str:
    """A case at one rate, as rows name it; 0 for links without a limit."""
    return f"{name}-wire-{ratio:g}"


def rate_for(ratio: float, compute_ms: float, wire_bytes: float) -> float | None:
    """Bits a second at which a link needs `ratio` times `compute_ms` for `wire_bytes`."""
    return wire_bytes * 8 / (ratio * compute_ms / 1e3) if ratio else None


def link_row(
    case: WireCase, row: Row, ratio: float, medians: Mapping[str, float],
    unlimited: Mapping[str, float], **more: Any,
) -> Row:  # fmt: skip
    """A measured row with what its config says of the link.

    Args:
        medians: ms of each variant over this link. unlimited: over links without a limit.
    """
    config: dict[str, Any] = {
        "hosts": case.hosts,
        "ranks_per_host": case.ranks,
        "tokens": case.tokens,
        "wire_over_compute": ratio,
        **more,
    }
    plain = next((name for name in ("plain", "megatron_alltoall") if name in medians), None)
    if ratio and row.variant == "fluid" and plain in unlimited:
        assert plain is not None
        cost = medians[plain] - unlimited[plain]
        if cost > 0:  # of the time that the link costs it, the share that ours saves
            config["hidden_share"] = (medians[plain] - medians["fluid"]) / cost
    return replace(row, config={**row.config, **config})
