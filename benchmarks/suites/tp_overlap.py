"""AllGather-GEMM and GEMM-ReduceScatter under every installed strategy: total, GEMM, exposed
communication, share hidden.

    benchmarks/launch.sh test_ag_kernel 8192 28672 8192 --dtype=bfloat16 --iters=20
    benchmarks/launch.sh tp_overlap --sweep goals seeds --output benchmarks/results/tp_overlap.json

M, N, K on the command line are the whole problem's; each rank holds A ``[M/W, K]`` and B ``[N/W,
K]`` (gather) or A ``[M, K/W]`` and B ``[N, K/W]`` (scatter). Cases in result files, ``ag-M-N-K``
and ``rs-M-N-K``, name the GEMM that one rank runs.

One sample is several calls one after the other between two events, divided by their number: a
training step does not wait between layers either, so a call's launches hide behind the one before;
those of the first hide behind a head start (benchmarks/harness/timing.py). ``host us`` is the time
that the host spends on one call. Samples of all backends are interleaved.

exposed = total - gemm_only: what of the communication the GEMM did not hide. hidden = 1 - exposed /
exposed of NCCL followed by the GEMM.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases.tensor_parallel import (
    ROWS,
    SWEEPS,
    Case,
    divided,
    divisible,
    layer_of,
    select,
    undivided,
)
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import (
    Timing,
    layer_head_start_ms,
    measure_by_rank,
    quantile,
    slowest_rank,
)
from benchmarks.report.pictures import draw_exposed, draw_later
from benchmarks.report.timeline import write_trace
from benchmarks.suites.tp_backends import BACKENDS, FAMILIES, Absent, Problem, is_rival
from megatron_fluid import close_group
from megatron_fluid.cli.terminal import positive

__all__ = ["Options", "Report", "main", "problem_of", "run_case"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative Frobenius error against NCCL's own result: sums are taken in another order, and NCCL adds
# in the data's dtype.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
_SAMPLE_SECONDS = 5e-3  # calls in one sample: about so much GEMM time, at least 3, at most 20 calls
_FLOPS = 650e12


@dataclass(frozen=True)
class Options:
    """How a case is measured."""

    dtype: torch.dtype = torch.bfloat16
    iters: int = 10
    warmup: int = 3
    transpose_weight: bool = False
    has_bias: bool = False
    verify: bool = True
    backends: tuple[str, ...] = tuple(BACKENDS)
    repeats: int | None = None  # calls in one sample; None: by the size of the GEMM


@dataclass(frozen=True)
class Report:
    """One case: what was measured, what was absent and why, the largest error against NCCL by
    backend."""

    operation: str
    local: tuple[int, int, int]
    whole: tuple[int, int, int]
    timings: dict[str, Timing]
    absent: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    by_rank: dict[str, list[float]] = field(default_factory=dict)  # median ms of each rank
    host_us: dict[str, float] = field(default_factory=dict)  # of one call, the slowest rank's
    head_start_ms: float = 0.0

    @property
    def case(self) -> str:
        return "-".join((self.operation, *map(str, self.local)))

    def exposed(self, backend: str) -> float:
        """Milliseconds that the communication adds to the GEMM."""
        return self.timings[backend].median_ms - self.timings["gemm_only"].median_ms

    def hidden(self, backend: str) -> float | None:
        """Share of NCCL's exposed communication that this backend hides; None where NCCL exposes
        none."""
        of_nccl = self.exposed("torch")
        return 1 - self.exposed(backend) / of_nccl if of_nccl > 0 else None

    def lines(self, each_rank: bool = False) -> Iterator[str]:
        """The table of this case: all ranks together (the slowest), and if asked for each rank's
        own."""
        m, n, k = self.local
        layer = layer_of((self.operation, *self.whole))
        of = f"; {layer}" if layer else ""
        yield f"{self.case}  (whole problem {' x '.join(map(str, self.whole))}{of})"
        yield (
            f"  {'backend':<24} {'total ms':>9} {'gemm ms':>9} {'exposed ms':>11} {'TFLOP/s':>8} "
            f"{'of gemm':>8} "
            f"{'hidden':>7} {'host us':>8}  error"
        )
        gemm = self.timings["gemm_only"].median_ms
        for name, timing in self.timings.items():
            error = f"{self.errors[name]:.1e}" if name in self.errors else ""
            hidden = self.hidden(name)
            yield (
                f"  {name:<24} {timing.median_ms:9.3f} {gemm:9.3f} {self.exposed(name):11.3f} "
                f"{2 * m * n * k / timing.median_ms / 1e9:8.0f} {timing.median_ms / gemm:8.3f} "
                f"{'' if hidden is None else f'{hidden:.1%}':>7} "
                f"{self.host_us.get(name, math.nan):8.0f}  {error}"
            )
        for name, reason in self.absent.items():
            yield f"  {name:<24} absent: {reason}"
        if each_rank:
            for rank in range(len(self.by_rank["gemm_only"])):
                for name, medians in self.by_rank.items():
                    own = self.by_rank["gemm_only"][rank]
                    of_nccl = self.by_rank["torch"][rank] - own
                    hidden_here = (
                        f"{1 - (medians[rank] - own) / of_nccl:.1%}" if of_nccl > 0 else ""
                    )
                    yield (
                        f"  rank {rank} {name:<24} total {medians[rank]:.3f} ms, gemm {own:.3f} "
                        f"ms, exposed {medians[rank] - own:.3f} ms, "
                        f"{2 * m * n * k / medians[rank] / 1e9:.0f} TFLOP/s, hidden {hidden_here}"
                    )

    def rows(self) -> list[Row]:
        """Rows of a result file; what was absent, and why, is on the row of gemm_only."""
        rows = []
        for name, timing in self.timings.items():
            config: dict[str, Any] = {
                "whole": list(self.whole),
                "exposed_ms": self.exposed(name),
                "hidden": self.hidden(name),
                "error": self.errors.get(name),
                "host_us": self.host_us.get(name),
                "head_start_ms": self.head_start_ms,
            }
            if name == "gemm_only" and self.absent:
                config["absent"] = self.absent
            rows.append(timing.row(self.case, "forward", name, config))
        return rows


def problem_of(case: Case, options: Options, device: torch.device) -> Problem:
    """This rank's part of a whole problem, random.

    Raises:
        ValueError: sizes that the ranks do not divide.
    """
    operation, m, n, k = case
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    for name, size in undivided(case, ranks).items():
        raise ValueError(f"{name}: found {size}, allowed: multiples of the {ranks} ranks")
    local_n, local_k = (n // ranks, k) if operation == "ag" else (n, k // ranks)
    rows = m // ranks if operation == "ag" else m
    a = torch.randn(rows, local_k, device=device, dtype=options.dtype)
    # As in Flux: the weight is [N, K] unless --transpose_weight stores it as [K, N].
    shape = (local_k, local_n) if options.transpose_weight else (local_n, local_k)
    b = torch.randn(*shape, device=device, dtype=options.dtype)
    bias = torch.randn(local_n, device=device, dtype=options.dtype) if options.has_bias else None
    if bias is not None and operation == "rs":
        dist.broadcast(bias, 0, group=group)
    return Problem(operation, group, a, b, not options.transpose_weight, bias)


def _agreed(reason: str | None) -> str | None:
    """The first rank's reason, known to all; None where no rank has one."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((f"rank {r}: {text}" for r, text in enumerate(reasons) if text), None)


def _build(problem: Problem, names: Sequence[str]) -> tuple[dict[str, Callable], dict[str, str]]:
    """The calls of the backends that work on every rank, each run once; the others with the
    reason."""
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    absent = {}
    for name in names:
        reason = None
        try:
            call = BACKENDS[name](problem)
            call()
        except Absent as error:
            reason = str(error)
        except Exception as error:
            if not is_rival(name):
                raise
            said = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {said[0]}"
        reason = _agreed(reason)
        if reason is None:
            calls[name] = call
        else:
            absent[name] = reason.removeprefix("rank 0: ")
    return calls, absent


def _verify(
    problem: Problem, calls: dict[str, Callable], options: Options, case: Case
) -> dict[str, float]:
    """The largest relative error of each backend against NCCL's result, over ranks.

    Raises:
        ValueError: one of ours is off by more than the tolerance.
    """
    wanted = calls["torch"]().float()
    errors = {}
    for name, call in calls.items():
        if name == "gemm_only":
            continue
        found = call().float()
        wrong = torch.isfinite(found).all().logical_not().float() * 9
        worst = torch.stack([(found - wanted).norm() / wanted.norm(), wrong]).nan_to_num(9.0)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=problem.group)
        errors[name] = float(worst.max())
        if errors[name] > TOLERANCE[options.dtype] and not is_rival(name):
            raise ValueError(
                f"{'-'.join(map(str, case))}: {name} differs from NCCL's result by "
                f"{errors[name]:.2e}, "
                f"allowed: {TOLERANCE[options.dtype]:.0e}"
            )
    return errors


def _host_us(call: Callable[[], object], device: torch.device, calls: int = 15) -> float:
    """Microseconds in which the host enqueues one call, the median of `calls`; where there is no
    device, in which it runs it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(calls):
        call()
        times.append(time.perf_counter())
    spent = statistics.median(after - before for before, after in itertools.pairwise(times))
    worst = torch.tensor(spent * 1e6, dtype=torch.float32).to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def run_case(case: Case, options: Options, device: torch.device) -> Report:
    """Measure one whole problem on all ranks.

    Raises:
        ValueError: sizes that the ranks do not divide, or one of our backends whose result is off
            by more than the tolerance.
    """
    problem = problem_of(case, options, device)
    operation, m, n, k = case
    ranks = problem.group.size()
    local = (m, n // ranks, k) if operation == "ag" else (m, n, k // ranks)
    calls, absent = _build(problem, options.backends)
    errors = _verify(problem, calls, options, case) if options.verify else {}
    for name in [n for n, error in errors.items() if error > TOLERANCE[options.dtype]]:
        del calls[name]
        absent[name] = f"its result differs from NCCL's by {errors.pop(name):.1e}"
    repeats = options.repeats
    if repeats is None:
        repeats = min(20, max(3, round(_SAMPLE_SECONDS * _FLOPS / (2 * math.prod(local)))))
    head_start = layer_head_start_ms(device)
    samples = measure_by_rank(
        calls,
        device,
        warmup=options.warmup,
        iters=options.iters,
        repeats=repeats,
        head_start_ms=head_start,
    )
    timings = slowest_rank(samples)
    by_rank = {name: [quantile(rank, 0.5) for rank in ranks_] for name, ranks_ in samples.items()}
    host = {name: _host_us(call, device) for name, call in calls.items()}
    return Report(operation, local, (m, n, k), timings, absent, errors, by_rank, host, head_start)


def _parser(operation: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if operation is not None:
        for name, text in (("M", "rows"), ("N", "columns"), ("K", "contracted dimension")):
            parser.add_argument(name, type=int, help=f"{text} of the whole problem")
    else:
        parser.add_argument(
            "--sweep",
            nargs="+",
            choices=sorted(SWEEPS),
            default=["goals", "seeds"],
            help="which problems",
        )
        parser.add_argument(
            "--rows", nargs="+", type=int, default=[], metavar="M", help=f"only these M, of {ROWS}"
        )
        parser.add_argument("--operation", choices=("ag", "rs"), help="only this operation")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument(
        "--iters", type=positive, default=10, help="samples of each backend, at least"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help="calls in one sample (default: by the size of the GEMM, 3 to 20)",
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--transpose_weight",
        action="store_true",
        help="store the weight as [K, N] instead of [N, K]",
    )
    parser.add_argument("--has_bias", action="store_true")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with NCCL's result",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write a trace and a timeline picture of each case",
    )
    parser.add_argument("--profile-folder", type=Path, default=Path("profiles"))
    parser.add_argument(
        "--backends", nargs="+", choices=sorted([*BACKENDS, *FAMILIES]), default=list(BACKENDS)
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="write the results there after every case, and a picture next to it",
    )
    return parser


def main(operation: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run on all ranks that torchrun started. `operation` is "ag", "rs" or None for a sweep."""
    parser = _parser(operation)
    options = parser.parse_args(arguments)
    try:
        cases = (
            [(operation, options.M, options.N, options.K)]
            if operation
            else select(options.sweep, options.rows, options.operation)
        )
    except ValueError as error:
        parser.error(str(error))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if operation is None:
        cases = [divisible(case, ranks) for case in cases]
    cases = divided(cases, ranks)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.manual_seed(1234 + dist.get_rank())
    # The floor and NCCL are always measured: exposed and hidden are relative to them.
    chosen = [backend for name in options.backends for backend in FAMILIES.get(name, (name,))]
    settings = Options(
        DTYPES[options.dtype],
        options.iters,
        options.warmup,
        options.transpose_weight,
        options.has_bias,
        options.verify,
        tuple(dict.fromkeys(("gemm_only", "torch", *chosen))),
        options.repeats,
    )
    first = dist.get_rank() == 0
    reports: list[Report] = []
    started = time.perf_counter()
    for case in cases:
        reports.append(run_case(case, settings, device))
        if first:
            print("\n".join(reports[-1].lines(each_rank=operation is not None)), flush=True)
            if (
                options.output is not None
            ):  # kept up to date, so that a run cut short has told what it measured
                rows = [row for report in reports for row in report.rows()]
                write_results("tp_overlap", rows, dist.get_world_size(), options.output)
    if options.profile:
        for case in cases:
            calls, _ = _build(problem_of(case, settings, device), settings.backends)
            write_trace(calls, device, options.profile_folder / f"{'-'.join(map(str, case))}.json")
    if first:
        if operation is None:
            print("\n".join(recommend(reports)))
        print(f"{len(cases)} cases in {time.perf_counter() - started:.0f} s")
        if options.output is not None:
            print(f"results: {options.output}")
            draw_later(lambda: draw_exposed(options.output), "python -m benchmarks.report.pictures")
    dist.barrier()
    if dist.group.WORLD is not None:
        close_group(dist.group.WORLD)
    dist.destroy_process_group()
    return 0


def recommend(reports: Sequence[Report]) -> Iterator[str]:
    """The fastest backend of each case, and what it is to NCCL and to the GEMM alone."""
    yield f"{'case':<24} {'fastest':<24} {'of gemm':>8} {'NCCL of gemm':>13}  layers"
    for report in reports:
        gemm = report.timings["gemm_only"].median_ms
        milliseconds, name = min(
            (t.median_ms, name) for name, t in report.timings.items() if name != "gemm_only"
        )
        layer = layer_of((report.operation, *report.whole))
        nccl = report.timings["torch"].median_ms / gemm
        yield f"{report.case:<24} {name:<24} {milliseconds / gemm:8.3f} {nccl:13.3f}  {layer}"


if __name__ == "__main__":
    sys.exit(main())
