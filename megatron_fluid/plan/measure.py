"""The figures of this machine, measured: about a second for the device, and one for the links of a
group.

Nothing here touches a random number generator, and the memory that it takes goes back to torch's
allocator. Operands are no zeros, which draw less power than numbers do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
from megatron_fluid.cuda.streams import synchronize
from megatron_fluid.plan.machine import Link, Machine
from megatron_fluid.plan.model import gemm_s

__all__ = ["measure_device", "measure_links"]

_EDGE = {"cuda": 4096, "cpu": 512}  # of the square GEMM that gives the rate
_SMALL = 64
_COPIED = {"cuda": 128 << 20, "cpu": 16 << 20}  # bytes of the copy that gives the memory's rate
_SENT = {"cuda": (1 << 20, 32 << 20), "cpu": (64 << 10, 2 << 20)}  # bytes of a rank
_SAMPLES = 5
_SAMPLE_S = 0.03
_QUEUED, _SLEEP_CYCLES = (
    100,
    20_000_000,
)  # about 10 ms, longer than the host takes for as many calls
_OPERATIONS = 200


def measure_device(device: torch.device) -> Machine:
    """The figures of one device and its host, without links."""
    kind = device.type
    dtype, edge = torch.bfloat16 if kind == "cuda" else torch.float32, _EDGE[kind]
    with torch.no_grad(), torch.inference_mode(False):
        a, b, c = (_numbers(edge * edge, dtype, device).view(edge, edge) for _ in range(3))
        small = a[:_SMALL, :_SMALL].contiguous()
        result = torch.empty_like(small)
        source = _numbers(_COPIED[kind] // dtype.itemsize, dtype, device)
        target = torch.empty_like(source)
        for _ in range(2):  # the second time at the clock that a GPU keeps under load
            whole = _seconds(lambda: torch.mm(a, b, out=c), device)
        least = _least_seconds(lambda: torch.mm(small, small, out=result), device)
        copied = _seconds(lambda: target.copy_(source), device)
        operation = _host_seconds(lambda: torch.mm(small, small, out=result), device)
    if kind == "cpu":  # where the host is the device
        operation = _host_seconds(lambda: torch.add(small[0], 1.0, out=result[0]), device)
    units = torch.cuda.get_device_properties(device).multi_processor_count if kind != "cpu" else 0
    name = torch.cuda.get_device_name(device) if kind != "cpu" else "CPU"
    flops = 2.0 * edge**3
    if units:  # of whole waves
        unit = Machine(name, units, 1.0, 0.0, float("inf"), 0.0)
        flops = gemm_s(unit, edge, edge, edge)
    return Machine(
        device=name,
        units=units,
        flops_per_s=flops / max(whole - least, whole / 2),
        gemm_s=least,
        bytes_per_s=2 * source.nbytes / copied,
        operation_s=operation,
    )


def measure_links(
    group: dist.ProcessGroup, device: torch.device, machine: Machine
) -> tuple[Link, Link | None]:
    """This rank's figures of the group's all-to-all, and of copies into peers' memory (None without
    symmetric memory). Collective."""
    backend = dist.get_backend(group)
    # gloo sends from host memory.
    on = torch.device("cpu") if backend == "gloo" else device
    with torch.no_grad(), torch.inference_mode(False):
        collective = _collective(group, on, device)
        copies = None
        if device.type == "cuda" and symmetric_unsupported_reason(group) is None:
            copies = _copies(group, device)
    return collective, copies


def _collective(group: dist.ProcessGroup, on: torch.device, device: torch.device) -> Link:
    ranks, host = group.size(), 0.0
    found = []
    for nbytes in _SENT[on.type]:
        each = max(1, nbytes // ranks)
        send = torch.zeros(each * ranks, dtype=torch.uint8, device=on)
        received = torch.empty_like(send)

        def move() -> Any:
            return dist.all_to_all_single(received, send, group=group, async_op=True)  # noqa: B023

        took = _together_s(group, on, lambda: move().wait())
        began = time.perf_counter()
        started = move()
        host = time.perf_counter() - began
        started.wait()
        found.append((each * (ranks - 1), took))
    synchronize(on)
    hidden = _hidden(group, device, move, lambda work: work.wait(), found[-1][1])
    return _link(ranks, found, host, hidden)


def _copies(group: dist.ProcessGroup, device: torch.device) -> Link:
    import torch.distributed._symmetric_memory as symmetric_memory

    ranks, rank, host = group.size(), group.rank(), 0.0
    largest = _SENT["cuda"][-1]
    memory = symmetric_memory.empty(largest, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    peer = handle.get_buffer((rank + 1) % ranks, (largest,), torch.uint8)
    source = torch.zeros(largest, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)
    found = []
    for nbytes in _SENT["cuda"]:

        def move() -> None:
            with torch.cuda.stream(stream):
                peer[:nbytes].copy_(source[:nbytes], non_blocking=True)  # noqa: B023

        def moved() -> None:
            move()
            stream.synchronize()

        took = _together_s(group, device, moved)
        began = time.perf_counter()
        move()
        host = time.perf_counter() - began
        found.append((nbytes, took))
    stream.synchronize()
    hidden = _hidden(group, device, move, lambda _: stream.synchronize(), found[-1][1])
    # All ranks have written: only now may the memory go.
    agreement(group).barrier("links are measured")
    return _link(ranks, found, host, hidden)


def _link(ranks: int, found: Sequence[tuple[int, float]], start_s: float, hidden: float) -> Link:
    """The line through two measurements (bytes, seconds)."""
    (few, short), (many, long) = found
    rate = (many - few) / max(long - short, 1e-9)
    latency = max(0.0, short - few / rate)
    return Link(ranks, latency, max(1.0, rate), start_s, hidden)


def _hidden(
    group: dist.ProcessGroup,
    device: torch.device,
    move: Callable[[], Any],
    wait: Callable[[Any], object],
    moved_s: float,
) -> float:
    """Share of an exchange that passes behind GEMMs that take about as long."""
    edge = _EDGE[device.type] // 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b, c = (_numbers(edge * edge, dtype, device).view(edge, edge) for _ in range(3))
    one = _seconds(lambda: torch.mm(a, b, out=c), device)
    count = torch.tensor([moved_s / one])  # alike on all ranks is not needed: GEMMs are local
    repeats = int(count.clamp(1, 64).ceil().item())

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=c)

    def both() -> None:
        work = move()
        multiply()
        wait(work)

    alone = _together_s(group, device, multiply)
    moving = _together_s(group, device, lambda: wait(move()))
    together = _together_s(group, device, both)
    least = max(min(alone, moving), 1e-9)
    return min(1.0, max(0.0, (alone + moving - together) / least))


def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers between -1 and 1 that look random."""
    index = torch.arange(count, device=device, dtype=torch.int64)
    return (index.mul_(2654435761).bitwise_and_(0xFFFF).to(torch.float32) / 32768 - 1).to(dtype)


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call on the device that takes less than the host takes to enqueue it."""
    if device.type == "cpu":
        return _seconds(call, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_SLEEP_CYCLES)  # meanwhile the host enqueues all of them
        start.record()
        for _ in range(_QUEUED):
            call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / _QUEUED)
    return statistics.median(samples)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call on the device: the median of a few samples, each of about `_SAMPLE_S`."""
    call()
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    once = max(time.perf_counter() - began, 1e-7)
    count = max(1, min(200, int(_SAMPLE_S / once)))
    samples = []
    for _ in range(_SAMPLES):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        samples.append((time.perf_counter() - began) / count)
    return statistics.median(samples)


def _together_s(
    group: dist.ProcessGroup, device: torch.device, call: Callable[[], object]
) -> float:
    """Of one call that all ranks make at once, from their meeting until it is done here; the median
    of a few. Collective."""
    samples = []
    for _ in range(1 + _SAMPLES):
        synchronize(device)
        agreement(group).barrier("measuring of links")
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[1:])


def _host_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of the host, to enqueue one call."""
    samples = []
    for _ in range(_SAMPLES):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(_OPERATIONS):
            call()
        samples.append((time.perf_counter() - began) / _OPERATIONS)
    synchronize(device)
    return statistics.median(samples)
