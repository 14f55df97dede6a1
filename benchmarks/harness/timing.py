"""Interleaved timing of variants on every rank, judged by the slowest one.

Each iteration runs every variant once, each time in another order, alike on all ranks, so that
clock drift and neighbours fall on all of them, and each follows each other one as often: after
GEMMs that draw all the power there is, the next variant's clocks are lower. A sample is the time on
the slowest rank; the figures are quantiles of those samples. On a GPU time is taken by CUDA events
on the current stream, after ranks were brought together by a one-element all-reduce on that stream;
on a CPU by ``time.perf_counter`` after a barrier. The data is the caller's: use random numbers,
zeros draw less power and flatter.

A head start: the GPU is idle when a sample begins, so what the host takes to start the first
kernels would be in the figure. Inside a model the host is ahead: it starts this layer's kernels
while the GPU still runs the layers before. With ``head_start_ms`` the current stream is given that
much waiting before the ranks meet, and the host goes on meanwhile. A call whose host falls behind
all the same, because it takes longer than the GPU or waits for it, shows that in its figure, where
a sample is several calls less the head start's share of one. Beside it stands the host's own time
for a call, from its start to its return: where it is longer than the GPU's, a model of nothing but
such layers waits for the host.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.results import Row

__all__ = [
    "Timing",
    "layer_head_start_ms",
    "measure",
    "measure_by_rank",
    "quantile",
    "rows_of",
    "slowest_rank",
    "whole_rounds",
]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call on the slowest rank; ``host_ms``: on a GPU, median of the time in which
    the slowest host has made the call."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    iters: int
    host_ms: float | None = None

    def row(
        self, case: str, mode: str, variant: str, config: Mapping[str, Any] | None = None
    ) -> Row:
        """This timing as a row of a result file."""
        found = dict(config or {})
        if self.host_ms is not None:
            found["host_ms"] = self.host_ms
        return Row(case, mode, variant, self.median_ms, self.p10_ms, self.p90_ms, self.iters, found)


def quantile(samples: list[float], q: float) -> float:
    """The q-quantile of ``samples``, interpolated between neighbours."""
    if not samples:
        raise ValueError("quantile of no samples")
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _together(device: torch.device) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1, device=device))


def layer_head_start_ms(device: torch.device) -> float:
    """The head start of suites that time layers or parts: 1 ms on a GPU, as layers of a model are
    launched in less; 0 on a CPU."""
    return 1.0 if device.type == "cuda" else 0.0


@functools.cache
def _cycles_per_ms(device: torch.device) -> int:
    """At the highest clock of its SMs, so that waiting takes longer at a lower one."""
    kilohertz = torch.cuda.get_device_properties(device).clock_rate
    if kilohertz <= 0:
        raise RuntimeError(
            f"{device} does not tell its clock rate, which a head start needs: found {kilohertz} "
            "kHz"
        )
    return kilohertz


def _sample_cuda(
    call: Callable[[], object], repeats: int, device: torch.device, head_start_ms: float
) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    if head_start_ms:
        torch.cuda._sleep(round(head_start_ms * _cycles_per_ms(device)))
    _together(device)
    start.record()
    called = time.perf_counter()
    for _ in range(repeats):
        call()
    returned = time.perf_counter()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats, (returned - called) * 1e3 / repeats


def _sample_cpu(
    call: Callable[[], object], repeats: int, device: torch.device, _: float
) -> tuple[float, float]:
    _together(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    took = (time.perf_counter() - start) * 1e3 / repeats
    return took, took


def measure(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device | str,
    *,
    warmup: int = 4,
    iters: int = 20,
    repeats: int = 1,
    head_start_ms: float = 0.0,
) -> dict[str, Timing]:
    """Time each variant; every rank calls this with the same names in the same order.

    Args:
        variants: name -> a call without arguments; the work it enqueues on the current stream is
            timed.
        device: where the work runs.
        warmup: rounds of all variants before measuring.
        iters: samples of each variant, at least; more where that makes the orders of `whole_rounds`
            even.
        repeats: calls in one sample, whose time is divided by it: more than 1 for calls of
            microseconds.
        head_start_ms: how far the host is ahead of the GPU when a sample begins, see the module;
            nothing on a CPU.

    Returns:
        name -> Timing, the same on every rank.
    """
    samples, host = _samples(variants, device, warmup, iters, repeats, head_start_ms)
    timings, of_host = slowest_rank(samples), slowest_rank(host)
    if torch.device(device).type == "cpu":
        return timings
    return {
        name: replace(timing, host_ms=of_host[name].median_ms) for name, timing in timings.items()
    }


def measure_by_rank(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device | str,
    *,
    warmup: int = 4,
    iters: int = 20,
    repeats: int = 1,
    head_start_ms: float = 0.0,
) -> dict[str, list[list[float]]]:
    """The samples behind `measure`: name -> milliseconds by rank and iteration, the same on every
    rank."""
    return _samples(variants, device, warmup, iters, repeats, head_start_ms)[0]


_ByRank = dict[str, list[list[float]]]


def whole_rounds(count: int, iters: int) -> int:
    """How many iterations of `count` variants are made of `iters`: at least so many, and whole
    Williams squares, in a part of which some variant would stand behind the hottest more often than
    another; `iters` itself where they are less than half a square.
    """
    square = 2 * count if count > 1 and count % 2 else max(count, 1)
    return iters if 2 * iters < square else -(-iters // square) * square


def _order(names: Sequence[str], iteration: int) -> list[str]:
    """A row of a Williams square: in so many iterations as there are names (twice as many where
    that is odd) each name stands in each place and directly behind each other one equally often.
    """
    count = len(names)
    steps = [0, *(d for low in range(1, count // 2 + 1) for d in dict.fromkeys((low, count - low)))]
    if count % 2 and iteration // count % 2:
        steps.reverse()
    return [names[(iteration + step) % count] for step in steps]


def _samples(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device | str,
    warmup: int,
    iters: int,
    repeats: int,
    head_start_ms: float,
) -> tuple[_ByRank, _ByRank]:
    """Milliseconds by rank and iteration, of the device and of the host."""
    device = torch.device(device)
    if iters < 1 or repeats < 1 or warmup < 0:
        raise ValueError(
            f"iters {iters} and repeats {repeats} must be at least 1, warmup {warmup} at least 0"
        )
    if not head_start_ms >= 0:
        raise ValueError(f"head_start_ms {head_start_ms} must be at least 0")
    sample = _sample_cuda if device.type == "cuda" else _sample_cpu
    names = list(variants)
    iters = whole_rounds(len(names), iters)
    for _ in range(warmup):
        for name in names:
            variants[name]()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for iteration in range(iters if names else 0):
        for name in _order(names, iteration):
            samples[name].append(sample(variants[name], repeats, device, head_start_ms))
    mine = torch.tensor([samples[name] for name in names], dtype=torch.float32, device=device).view(
        len(names), iters, 2
    )
    tables = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        tables = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(tables, mine)
    by_rank = (
        torch.stack(tables).permute(3, 1, 0, 2).tolist()
    )  # device or host, name, rank, iteration
    of_device, of_host = ({name: kind[i] for i, name in enumerate(names)} for kind in by_rank)
    return of_device, of_host


def slowest_rank(samples: Mapping[str, list[list[float]]]) -> dict[str, Timing]:
    """Quantiles of each iteration's slowest rank."""
    worst = {
        name: [max(each) for each in zip(*by_rank, strict=True)]
        for name, by_rank in samples.items()
    }
    return {
        n: Timing(quantile(v, 0.5), quantile(v, 0.1), quantile(v, 0.9), len(v))
        for n, v in worst.items()
    }


def rows_of(
    timings: Mapping[str, Timing], case: str, mode: str, config: Mapping[str, Any] | None = None
) -> list[Row]:
    """Rows of a result file for the timings of one case and mode."""
    return [timing.row(case, mode, variant, config) for variant, timing in timings.items()]
