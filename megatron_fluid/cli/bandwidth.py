"""The self-test of `megatron-fluid doctor --bandwidth`: measured copies between every pair of
ranks, and all-to-alls over all of them. It takes at most about two minutes.

Between two GPUs of one host that can reach each other's memory a copy is a direct one; elsewhere it
is a send and a receive over NCCL or gloo. The pairs of a round are measured side by side. What
arrives is compared with what was sent.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.cli.tables import paragraph, wrapped_table
from megatron_fluid.errors import ConfigError
from megatron_fluid.topology import round_robin

__all__ = ["BandwidthReport", "measure", "report_text", "run_rank", "start_ranks"]

_COPY_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
_ALL_TO_ALL_BYTES = {"cuda": (1 << 20, 16 << 20, 64 << 20), "cpu": (64 << 10, 1 << 20, 4 << 20)}
_TIMEOUT_S = 60.0  # of a collective; NCCL connects in the first
_MEASURE_S = 0.05  # of one measurement, as far as whole repetitions allow
_PAIRS_S = 80.0  # for all pairs
_MOST_SHOWN = 10  # ranks of which the matrix is shown
_SLOW = 0.5  # of the median: a pair below this is named


@dataclass(frozen=True)
class BandwidthReport:
    """What the ranks measured.

    Attributes:
        ranks, hosts: how many of each.
        device, backend: what every rank computes on, and torch.distributed's backend.
        copy_bytes: of one copy.
        copies: GB/s from rank i to rank j, None where the pair was not measured. [W][W]
        direct: whether copies inside a host went straight from memory to memory.
        all_to_all: (bytes that a rank sends, milliseconds, GB/s of a rank).
        wrong: what arrived other than it was sent.
    """

    ranks: int
    hosts: int
    device: str
    backend: str
    copy_bytes: int
    copies: list[list[float | None]]
    direct: bool
    all_to_all: list[tuple[int, float, float]]
    wrong: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# --------------------------------------------------------------------------------------------------
# start


def start_ranks(ranks: int | None, words: list[str]) -> int:
    """Start `megatron-fluid doctor` on ranks of this host; returns the exit status.

    Args:
        ranks: how many; by default one a GPU, or 2 on a CPU.
        words: its options: --bandwidth or --hosts, ...
    """
    count = ranks or torch.cuda.device_count() or 2
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node {count}"
    command = [sys.executable, *launcher.split(), "-m", "megatron_fluid.cli", "doctor"]
    return subprocess.run([*command, *words]).returncode


def run_rank[Report](
    measured: Callable[[dist.ProcessGroup, torch.device], Report],
) -> Report | None:
    """Join the job that the environment describes, and measure; the report on rank 0, else None.

    Raises:
        ConfigError: a host has more ranks than GPUs.
    """
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpus and local >= gpus:
        raise ConfigError.of("ranks of this host", f"{local + 1} or more", f"{gpus}, one a GPU")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        device_id=device if gpus else None,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        report = measured(world, device)
        return report if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------
# measurements


def measure(group: dist.ProcessGroup, device: torch.device) -> BandwidthReport:
    """Measure every pair and the all-to-alls. Collective; the same report on every rank."""
    rank, world, kind = group.rank(), group.size(), device.type
    places: list[Any] = [None] * world
    dist.all_gather_object(places, (socket.gethostname(), device.index or 0), group=group)
    copy_bytes = _COPY_BYTES[kind]
    mine: dict[tuple[int, int], float] = {}
    wrong: list[str] = []
    started, any_direct = time.monotonic(), False
    for pairs in round_robin(world):
        peer = next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)
        for forward in (True, False):
            sends = peer is not None and (rank < peer) == forward
            direct = peer is not None and _direct(device, places[rank], places[peer])
            any_direct |= direct
            dist.barrier(group)
            if peer is not None:
                seconds, text = _time_copy(group, device, peer, sends, direct, places, copy_bytes)
                if text:
                    wrong.append(text)
                if seconds is not None:
                    ends = (rank, peer) if sends else (peer, rank)
                    mine[ends] = copy_bytes / seconds / 1e9
        if _spent(group, device, started):
            break
    all_to_all = []
    for size in _ALL_TO_ALL_BYTES[kind] if world > 1 else ():
        moved, seconds, text = _time_all_to_all(group, device, size)
        all_to_all.append((moved, 1e3 * seconds, moved / seconds / 1e9))
        if text:
            wrong.append(text)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (mine, wrong, any_direct), group=group)
    copies: list[list[float | None]] = [[None] * world for _ in range(world)]
    for each, _, _ in found:
        for (source, target), rate in each.items():
            copies[source][target] = rate
    return BandwidthReport(
        ranks=world,
        hosts=len({host for host, _ in places}),
        device=torch.cuda.get_device_name(device) if kind == "cuda" else "CPU",
        backend=dist.get_backend(group),
        copy_bytes=copy_bytes,
        copies=copies,
        direct=any(each[2] for each in found),
        all_to_all=all_to_all,
        wrong=[text for each in found for text in each[1]],
    )


def _spent(group: dist.ProcessGroup, device: torch.device, started: float) -> bool:
    """Whether the time for pairs has run out on any rank: all stop together."""
    late = torch.tensor([time.monotonic() - started > _PAIRS_S], dtype=torch.int32, device=device)
    dist.all_reduce(late, op=dist.ReduceOp.MAX, group=group)
    return bool(late.item())


def _direct(device: torch.device, own: tuple[str, int], peer: tuple[str, int]) -> bool:
    """Whether one GPU can copy into the other's memory."""
    if device.type != "cuda" or own[0] != peer[0] or own[1] == peer[1]:
        return False
    return torch.cuda.can_device_access_peer(own[1], peer[1])


def _time_copy(
    group: dist.ProcessGroup,
    device: torch.device,
    peer: int,
    sends: bool,
    direct: bool,
    places: list[Any],
    size: int,
) -> tuple[float | None, str]:
    """Seconds of one copy, on the rank that knows them, and what is wrong with what arrived."""
    rank, value = group.rank(), 1 + group.rank() % 250
    if direct:
        if not sends:
            return None, ""
        source = torch.full((size,), value, dtype=torch.uint8, device=device)
        target = torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", places[peer][1]))
        seconds = _time(lambda: target.copy_(source, non_blocking=True), device)
        return seconds, _difference(target, value, f"a copy from rank {rank} to rank {peer}")
    buffer = torch.full((size,), value if sends else 0, dtype=torch.uint8, device=device)

    def move() -> None:
        if sends:
            dist.send(buffer, group=group, group_dst=peer)
        else:
            dist.recv(buffer, group=group, group_src=peer)

    # Both ends repeat alike: as often as the sender finds right, which it says in the buffer.
    move()
    count = _repetitions(move, device)
    said = torch.tensor([count], device=device)
    if sends:
        dist.send(said, group=group, group_dst=peer)
    else:
        dist.recv(said, group=group, group_src=peer)
    seconds = _seconds(move, device, int(said.item()))
    if sends:
        return None, ""
    return seconds, _difference(buffer, 1 + peer % 250, f"rank {rank}: what rank {peer} sent")


def _time_all_to_all(
    group: dist.ProcessGroup, device: torch.device, size: int
) -> tuple[int, float, str]:
    """Bytes that a rank sends to others, seconds on the slowest rank, and what is wrong."""
    world, rank = group.size(), group.rank()
    each = max(1, size // world)
    send = torch.full((world * each,), 1 + rank % 250, dtype=torch.uint8, device=device)
    received = torch.zeros_like(send)

    def move() -> None:
        dist.all_to_all_single(received, send, group=group)

    move()
    count = torch.tensor([_repetitions(move, device)], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN, group=group)
    slowest = torch.tensor([_seconds(move, device, int(count.item()))], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    wrong = ""
    for peer, rows in enumerate(received.view(world, each)):
        wrong = wrong or _difference(rows, 1 + peer % 250, f"rank {rank}: all-to-all from {peer}")
    return (world - 1) * each, slowest.item(), wrong


def _time(move: Callable[[], object], device: torch.device) -> float:
    move()
    return _seconds(move, device, _repetitions(move, device))


def _repetitions(move: Callable[[], object], device: torch.device) -> int:
    return max(1, min(20, int(_MEASURE_S / _seconds(move, device, 1))))


def _seconds(move: Callable[[], object], device: torch.device, count: int) -> float:
    """Of one call, the mean of `count`."""
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        move()
    _synchronize(device)
    return max(1e-9, time.perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _difference(arrived: Tensor, value: int, what: str) -> str:
    bad = int((arrived != value).sum())
    return f"{what}: {bad} of {arrived.numel()} bytes are wrong" if bad else ""


# --------------------------------------------------------------------------------------------------
# report


def report_text(report: BandwidthReport) -> str:
    """The report in at most 100 columns."""
    where = f"{report.ranks} x {report.device} on {report.hosts} host"
    where += "s" if report.hosts > 1 else ""
    lines = [f"bandwidth: {where}, {report.backend}"]
    if report.ranks == 1:
        return "\n".join([*lines, "one rank: there is no pair to measure"])
    how = "straight from GPU to GPU inside a host" if report.direct else "send and receive"
    rates = {
        (i, j): rate
        for i, row in enumerate(report.copies)
        for j, rate in enumerate(row)
        if rate is not None
    }
    lines += ["", f"copies of {_bytes(report.copy_bytes)}, {how}, GB/s"]
    if report.ranks <= _MOST_SHOWN:
        lines.append("from \\ to " + "".join(f"{rank:>8}" for rank in range(report.ranks)))
        for rank, row in enumerate(report.copies):
            cells = ("-" if rate is None else _rate(rate) for rate in row)
            lines.append(f"{rank:>9} " + "".join(f"{cell:>8}" for cell in cells))
    middle = statistics.median(rates.values())
    (low, slowest), (high, fastest) = (
        f(rates.items(), key=lambda item: item[1]) for f in (min, max)
    )
    lines.append(
        f"slowest {_rate(slowest)} ({low[0]} to {low[1]}), median {_rate(middle)}, "
        f"fastest {_rate(fastest)} ({high[0]} to {high[1]})"
    )
    if len(rates) < report.ranks * (report.ranks - 1):
        lines.append(f"measured: {len(rates)} of {report.ranks * (report.ranks - 1)} pairs")
    rows = ((_bytes(sent), f"{ms:.3f}", _rate(rate)) for sent, ms, rate in report.all_to_all)
    lines += ["", wrapped_table(("all-to-all: a rank sends", "ms", "GB/s of a rank"), rows), ""]
    slow = [f"{i} to {j}" for (i, j), rate in sorted(rates.items()) if rate < _SLOW * middle]
    if report.wrong:
        lines.append(paragraph("WRONG DATA: " + "; ".join(report.wrong)))
    if slow:
        text = f"slow pairs, below half of the median: {', '.join(slow)}. They hold up every "
        text += "exchange of all ranks; look at `nvidia-smi topo -m`, and at the network between "
        lines.append(paragraph(text + "hosts."))
    if not (slow or report.wrong):
        lines.append("all pairs agree within a factor of two, and what arrived is right")
    return "\n".join(lines)


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def _bytes(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 1 << 20 else f"{count / 2**10:g} KiB"
