"""AllGather-GEMM and GEMM-ReduceScatter under every installed strategy: total, GEMM, exposed communication, share hidden.

    benchmarks/launch.sh test_ag_kernel 8192 28672 8192 --dtype=bfloat16 --iters=20
    benchmarks/launch.sh tp_overlap --sweep real --output benchmarks/results/tp_overlap.json

M, N, K on the command line are the whole problem's; each rank holds A ``[M/W, K]`` and B ``[N/W, K]`` (gather) or A ``[M, K/W]`` and
B ``[N, K/W]`` (scatter). Cases in result files, ``ag-M-N-K`` and ``rs-M-N-K``, name the GEMM that one rank runs.

exposed = total - gemm_only: what of the communication the GEMM did not hide. hidden = 1 - exposed / exposed of NCCL followed by the GEMM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results import Row, write_results
from benchmarks.timing import Timing, measure
from benchmarks.tp_backends import BACKENDS, Absent, Problem

__all__ = ["SWEEPS", "Options", "Report", "main", "run_case"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative Frobenius error against NCCL's own result: sums are taken in another order, and NCCL adds in the data's dtype.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}

# name -> the whole linear layer (column-parallel N, K; row-parallel N, K)
LAYERS = {
    "llama-3-8b": {"qkv": (6144, 4096), "up": (28672, 4096), "out": (4096, 4096), "down": (4096, 14336)},
    "llama-3-70b": {"qkv": (10240, 8192), "up": (57344, 8192), "out": (8192, 8192), "down": (8192, 28672)},
    "mixtral-8x7b": {"qkv": (6144, 4096), "out": (4096, 4096)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "out": (2048, 4096)},
    "gpt-175b": {"qkv": (36864, 12288), "up": (49152, 12288), "out": (12288, 12288), "down": (12288, 49152)},
}
ROWS = (1024, 2048, 4096, 8192, 16384)


def _layers() -> list[tuple[str, int, int, int]]:
    cases = []
    for layers in LAYERS.values():
        for layer, (n, k) in layers.items():
            cases += [("rs" if layer in ("out", "down") else "ag", m, n, k) for m in ROWS]
    return list(dict.fromkeys(cases))


# Whole problems (operation, M, N, K); "goals" for 4 ranks.
SWEEPS = {
    "goals": [("ag", 8192, 28672, 8192), ("rs", 8192, 8192, 28672)]
    + [("ag", m, 12288, 49152) for m in (1024, 2048, 4096, 8192)]
    + [("rs", m, 49152, 12288) for m in (1024, 2048, 4096, 8192)],
    "layers": _layers(),
}
SWEEPS["all"] = SWEEPS["goals"] + [case for case in SWEEPS["layers"] if case not in SWEEPS["goals"]]


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


@dataclass(frozen=True)
class Report:
    """One case: what was measured, what was absent and why, the largest error against NCCL by backend."""

    operation: str
    local: tuple[int, int, int]
    whole: tuple[int, int, int]
    timings: dict[str, Timing]
    absent: dict[str, str]
    errors: dict[str, float]

    @property
    def case(self) -> str:
        return "-".join((self.operation, *map(str, self.local)))

    def exposed(self, backend: str) -> float:
        """Milliseconds that the communication adds to the GEMM."""
        return self.timings[backend].median_ms - self.timings["gemm_only"].median_ms

    def hidden(self, backend: str) -> float:
        """Share of NCCL's exposed communication that this backend hides."""
        return 1 - self.exposed(backend) / max(self.exposed("torch"), 1e-9)

    def lines(self) -> Iterator[str]:
        """The table of this case."""
        m, n, k = self.local
        yield f"{self.case}  (whole problem {self.whole[0]} x {self.whole[1]} x {self.whole[2]})"
        yield f"  {'backend':<20} {'total ms':>9} {'gemm ms':>9} {'exposed ms':>11} {'TFLOP/s':>8} {'of gemm':>8} {'hidden':>7}  error"
        gemm = self.timings["gemm_only"].median_ms
        for name, timing in self.timings.items():
            flops = 2 * m * n * k / timing.median_ms / 1e9
            error = f"{self.errors[name]:.1e}" if name in self.errors else ""
            yield (
                f"  {name:<20} {timing.median_ms:9.3f} {gemm:9.3f} {self.exposed(name):11.3f} {flops:8.0f} "
                f"{timing.median_ms / gemm:8.3f} {self.hidden(name):7.1%}  {error}"
            )
        for name, reason in self.absent.items():
            yield f"  {name:<20} absent: {reason}"

    def rows(self) -> list[Row]:
        """Rows of a result file."""
        config: dict[str, Any] = {"whole": list(self.whole)}
        return [
            timing.row(
                self.case,
                "forward",
                name,
                {
                    **config,
                    "exposed_ms": self.exposed(name),
                    "hidden": self.hidden(name),
                    "error": self.errors.get(name),
                },
            )
            for name, timing in self.timings.items()
        ]


def run_case(operation: str, m: int, n: int, k: int, options: Options, device: torch.device) -> Report:
    """Measure one whole problem on all ranks.

    Raises:
        ValueError: sizes that the ranks do not divide, or a backend whose result is off by more than the tolerance.
    """
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    split = {"M": m, "N": n} if operation == "ag" else {"M": m, "K": k}
    for name, size in split.items():
        if size % ranks:
            raise ValueError(f"{name}: found {size}, allowed: multiples of the {ranks} ranks")
    local = (m, n // ranks, k) if operation == "ag" else (m, n, k // ranks)
    rows = m // ranks if operation == "ag" else m
    a = torch.randn(rows, local[2], device=device).to(options.dtype)
    b = torch.randn(local[1], local[2], device=device).to(options.dtype)
    # As in Flux: the weight is [N, K] unless --transpose_weight stores it as [K, N].
    b = b.t().contiguous() if options.transpose_weight else b
    bias = torch.randn(local[1], device=device).to(options.dtype) if options.has_bias else None
    if bias is not None and operation == "rs":
        dist.broadcast(bias, 0, group=group)
    problem = Problem(operation, group, a, b, not options.transpose_weight, bias)
    calls, absent = {}, {}
    for name in options.backends:
        try:
            calls[name] = BACKENDS[name](problem)
        except Absent as reason:
            absent[name] = str(reason)
    errors = {}
    if options.verify:
        wanted = BACKENDS["torch"](problem)().float()
        for name, call in calls.items():
            if name == "gemm_only":
                continue
            found = call().float()
            worst = torch.stack(
                [(found - wanted).norm() / wanted.norm(), torch.isfinite(found).all().logical_not().float() * 9]
            )
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
            errors[name] = float(worst.max())
            if not errors[name] <= TOLERANCE[options.dtype]:
                raise ValueError(
                    f"{operation}-{m}-{n}-{k}: {name} differs from NCCL's result by {errors[name]:.2e}, "
                    f"allowed: {TOLERANCE[options.dtype]:.0e}"
                )
    timings = measure(calls, device, warmup=options.warmup, iters=options.iters)
    return Report(operation, local, (m, n, k), timings, absent, errors)


def write_trace(operation: str, m: int, n: int, k: int, options: Options, device: torch.device, folder: Path) -> None:
    """One call of every backend under torch's profiler: a trace for Perfetto and a timeline picture, rank 0 only."""
    from benchmarks.timeline import draw_timeline

    group = dist.group.WORLD
    assert group is not None
    local_n, local_k = (n // group.size(), k) if operation == "ag" else (n, k // group.size())
    a = torch.randn(m // group.size() if operation == "ag" else m, local_k, device=device).to(options.dtype)
    b = torch.randn(local_n, local_k, device=device).to(options.dtype)
    problem = Problem(operation, group, a, b, True, None)
    calls = {}
    for name in options.backends:
        with contextlib.suppress(Absent):
            calls[name] = BACKENDS[name](problem)
    for call in calls.values():
        call()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for name, call in calls.items():
            dist.barrier()
            with torch.profiler.record_function(name):
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"{operation}-{m}-{n}-{k}.json"
        profiler.export_chrome_trace(str(trace))
        picture = draw_timeline(trace, list(calls))
        print(f"trace for Perfetto: {trace}\ntimeline: {picture}")


def _parser(operation: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if operation is not None:
        for name, text in (("M", "rows"), ("N", "columns"), ("K", "contracted dimension")):
            parser.add_argument(name, type=int, help=f"{text} of the whole problem")
    else:
        parser.add_argument("--sweep", choices=sorted(SWEEPS), default="goals", help="which problems (default: goals)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--transpose_weight", action="store_true", help="store the weight as [K, N] instead of [N, K]")
    parser.add_argument("--has_bias", action="store_true")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with NCCL's result"
    )
    parser.add_argument("--profile", action="store_true", help="also write a trace and a timeline picture")
    parser.add_argument("--backends", nargs="+", choices=sorted(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--output", type=Path, help="write the results there, and beside it a picture")
    return parser


def main(operation: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run on all ranks that torchrun started. `operation` is "ag", "rs" or None for a sweep."""
    options = _parser(operation).parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    # The floor and NCCL are always measured: exposed and hidden are relative to them.
    backends = tuple(dict.fromkeys(("gemm_only", "torch", *options.backends)))
    settings = Options(
        DTYPES[options.dtype],
        options.iters,
        options.warmup,
        options.transpose_weight,
        options.has_bias,
        options.verify,
        backends,
    )
    cases: list[tuple[str, int, int, int]] = (
        [(operation, options.M, options.N, options.K)] if operation else SWEEPS[options.sweep]
    )
    reports = []
    for case in cases:
        report = run_case(*case, settings, device)
        reports.append(report)
        if dist.get_rank() == 0:
            print("\n".join(report.lines()), flush=True)
    if options.profile:
        for case in cases:
            write_trace(*case, settings, device, (options.output or Path("profiles") / "x").parent)
    if dist.get_rank() == 0 and operation is None:
        print("\n".join(recommend(reports)))
    if dist.get_rank() == 0 and options.output is not None:
        from benchmarks.timeline import draw_exposed

        write_results(
            "tp_overlap", [row for report in reports for row in report.rows()], dist.get_world_size(), options.output
        )
        print(f"results: {options.output}, picture: {draw_exposed(options.output)}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def recommend(reports: Sequence[Report]) -> Iterator[str]:
    """The fastest backend of each case."""
    yield "recommended backend by case:"
    for report in reports:
        ranked = sorted((t.median_ms, name) for name, t in report.timings.items() if name != "gemm_only")
        yield f"  {report.case:<22} {ranked[0][1]:<20} {ranked[0][0] / report.timings['gemm_only'].median_ms:.3f} of the GEMM"


if __name__ == "__main__":
    sys.exit(main())
