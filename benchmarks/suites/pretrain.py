"""End to end: whole training iterations through Megatron's own loop, with and without
megatron_fluid.

    make bench ARGS="--only pretrain"
    python -m benchmarks.suites.pretrain --cases qwen3-30b-a3b --variants megatron,fluid --rounds 3
    NPROC=4 benchmarks/launch.sh pretrain --layouts ep,cp2,tp2-ep2 --variants megatron_graph,fluid
    python -m benchmarks.suites.pretrain --cases tiny --variants megatron,fluid       # on a CPU

One process a variant a round, the variants in turn (A B C, A B C), on mock data and with forced
load balancing (cases `qwen3-30b-a3b-forced`), or as a router chooses that an auxiliary loss
balances. `megatron_best` has the flags that benchmarks/tune/megatron_best.py found to be fastest
(`flags`). All variants have the model's own attention and router (benchmarks/cases/model_flags.py).
With `--micro-batch-size N` a microbatch has N sequences and an iteration as many as before (cases
`qwen3-30b-a3b-mbs2`). Rows name the cuBLAS that both sides called (`cublas`).
`graph_overflows`: how many iterations of each process ran twice, since the graph had no room for an
expert's rows.
An iteration is forward, backward and optimizer of all microbatches, timed on the slowest rank; the
first ones of each process are left out. A variant that fails is named, and the others are measured;
one that cannot be run here is named with the reason, in the rows' `absent`, too. Rows hold the
losses of each step: variants do the same work where these agree. On several ranks `--layouts`
divides the model in other ways, too (benchmarks/cases/parallel_layouts.py), in cases named
`qwen3-30b-a3b-cp2`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.model_flags import MODEL_FLAGS
from benchmarks.cases.parallel_layouts import LAYOUTS, Layout
from benchmarks.cases.pretrain import (
    CASES,
    ROUTINGS,
    VARIANTS,
    PretrainCase,
    Variant,
    best_variant,
    common_flags,
    flags_of,
)
from benchmarks.harness.options import chosen
from benchmarks.harness.results import (
    Row,
    cublas_version,
    default_command,
    result_path,
    rows_before,
    write_results,
)
from benchmarks.harness.timing import quantile
from benchmarks.report.pictures import draw_later, draw_pretrain
from megatron_fluid.cli.terminal import positive

__all__ = ["ROOT", "Measured", "main", "measure_once", "of_this_cublas", "peak_flops"]

ROOT = Path(__file__).resolve().parents[2]
_DENSE_BF16 = {"H100": 989.4e12, "H200": 989.4e12, "H800": 989.4e12, "A100": 312e12}
# What patches/iteration_graph.py says of an iteration that runs again.
_NO_ROOM = "more expert rows than the CUDA graph has room for"


def _cublas() -> str | None:
    return cublas_version() or "0.0" if torch.cuda.is_available() else None


def of_this_cublas(case: str) -> str:
    """What the winner of a case is kept as: the fastest flags differ by cuBLAS. From 13.4 on all
    GEMMs of a layer's experts can be one launch in Megatron."""
    newer = [int(number) for number in (_cublas() or "0").split(".")] >= [13, 4]
    return f"{case} with cuBLAS 13.4 or newer" if newer else case


def peak_flops(device: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name, as its maker says; None for others. PCIe and NVL
    models of the H100 are slower and not known here."""
    if "PCIe" in device or "NVL" in device:
        return None
    return next((flops for name, flops in _DENSE_BF16.items() if name in device), None)


@dataclass
class Measured:
    """What the processes of one variant have given: ``rounds`` the reports of pretrain_rank.py,
    ``flags`` what it has beside those that all variants share."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    flags: str = ""

    def row(self, case: str, variant: str, warm_up: int, ranks: int, **config: Any) -> Row:
        """All iterations after each process's warm-up as one row."""
        kept = [1e3 * s for one in self.rounds for s in one["seconds"][warm_up:]]
        median, first = statistics.median(kept), self.rounds[0]
        flops_rate = first["flops"] / (median / 1e3) / ranks
        peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        by_round = [1e3 * statistics.median(one["seconds"][warm_up:]) for one in self.rounds]
        figures = {
            "tokens_per_s": first["tokens"] / (median / 1e3),
            "tflops_per_gpu": flops_rate / 1e12,
            "mfu": None if peak is None else flops_rate / peak,
            "peak_gib": max(one["peak_bytes"] for one in self.rounds) / 2**30,
            "reserved_gib": max(one.get("reserved_bytes", 0) for one in self.rounds) / 2**30,
            "losses": first["losses"],
            "first_iteration_s": [one["seconds"][0] for one in self.rounds],
            "median_ms_by_round": by_round,
            "overlap": first["overlap"],
            "flags": self.flags,
            "graph_overflows": [one["overflows"] for one in self.rounds],
        }
        if traces := [one["kernels"] for one in self.rounds if one.get("kernels")]:
            figures["kernels"] = traces[-1]
        return Row(
            case,
            "train",
            variant,
            median,
            quantile(kept, 0.1),
            quantile(kept, 0.9),
            len(kept),
            {**figures, **config},
        )


def measure_once(
    case: PretrainCase, variant: Variant, layout: Layout, ranks: int, iterations: int,
    limit_s: float, log: Path, kernels: bool = False, routing: str = "forced",
    more: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """One process a rank, from start to end; the report of rank 0. more: flags after all others.

    Raises:
        RuntimeError: the processes failed or took longer than ``limit_s``; the message holds the
            last lines of what they said.
    """
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        environment = {
            **os.environ,
            **variant.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PRETRAIN_RESULT": str(result),
            "PRETRAIN_KERNELS": str(int(kernels)),
            "PRETRAIN_PLAIN": str(int(gpu and not variant.fluid)),
        }
        if not gpu:
            environment["MEGATRON_FLUID_CPU"] = "1"
        command = [
            *_started(ranks, environment),
            *("-m", "benchmarks.cases.pretrain_rank"),
            *(
                flag
                for flag in common_flags(case, ranks, iterations, gpu, routing)
                if flag not in variant.without
            ),
            *flags_of(variant, ranks, gpu),
            *layout.flags,
            *more,
            *("--data-cache-path", scratch),
        ]
        with open(log, "w", encoding="utf-8") as words:
            process = subprocess.Popen(
                command,
                cwd=scratch,
                env=environment,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"no end within {limit_s:.0f} s: {_why(log)}") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if code or not result.is_file():
            raise RuntimeError(f"exit code {code}: {_why(log)}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        found["overflows"] = log.read_text(errors="replace").count(_NO_ROOM)
        return found


def _started(ranks: int, environment: dict[str, str]) -> list[str]:
    """The start of a command, by torchrun; one rank needs none, which takes seconds."""
    if ranks > 1:
        launcher = [*("-m", "torch.distributed.run", "--standalone"), "--nproc-per-node"]
        return [sys.executable, *launcher, str(ranks)]
    for name in [name for name in environment if name.startswith("TORCHELASTIC_")]:
        del environment[name]  # of a launcher around the suite, whose store is another
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # a free one
    return [sys.executable]


def _why(log: Path) -> str:
    """The line of a log that names the error, as well as it can be found."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [
        line.strip()
        for line in lines
        if re.search(r"Error(: |$)", line) and "ChildFailedError" not in line
    ]
    return (named or lines or ["nothing was said"])[0 if named else -1][:300]


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that the processes of a variant end, too: they are a session of
    their own, and one that is left keeps the GPU's memory."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if a variant failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    real = [name for name in CASES if name != "tiny"]
    parser.add_argument(
        "--cases", default=",".join(real if gpu else ["tiny"]), help=", ".join(CASES)
    )
    parser.add_argument("--variants", default=None, help=f"{', '.join(VARIANTS)}; default: all")
    parser.add_argument(
        "--rounds", type=int, default=2, help="processes of a variant (%(default)s)"
    )
    parser.add_argument("--iters", type=positive, default=16, help="steps a process (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=6, help="of them left out (%(default)s)")
    parser.add_argument(
        "--kernels", action="store_true", help="trace one more step: where the GPU's time goes"
    )
    parser.add_argument("--layouts", default="ep", help=f"{', '.join(LAYOUTS)} (%(default)s)")
    parser.add_argument("--routing", choices=ROUTINGS, default="real", help="(%(default)s)")
    parser.add_argument(
        "--microbatches", type=positive, default=None, help="of one sequence (default: the case's)"
    )
    parser.add_argument(
        "--micro-batch-size", type=positive, default=1, help="sequences a microbatch (%(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=None, help="default: NPROC, one a GPU, or 2")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds a process may take")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the processes' logs")
    parser.add_argument("--output", default=None, help="result file")
    parser.add_argument(
        "--append",
        action="store_true",
        help="to the rows in the file, of this commit and of such a machine",
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.warm_up < options.iters:
        parser.error(f"--warm-up: found {options.warm_up}, allowed: 0 to --iters - 1")
    if options.rounds < 1:
        parser.error(f"--rounds: found {options.rounds}, allowed: 1 or more")
    cases = chosen(parser, "--cases", options.cases, CASES)
    if not gpu and cases != ["tiny"]:
        parser.error(f"--cases: found {options.cases} without a GPU, allowed: tiny")
    every = list(VARIANTS) if gpu else ["megatron", "fluid"]
    names = chosen(parser, "--variants", options.variants or ",".join(every), VARIANTS)
    ranks = options.ranks or int(os.environ.get("NPROC", "0")) or torch.cuda.device_count() or 2
    layouts = chosen(parser, "--layouts", options.layouts, LAYOUTS)
    for layout in layouts:
        if (why := LAYOUTS[layout].unsupported_reason(ranks)) is not None:
            parser.error(f"--layouts: found {layout}, but {why}")
    problems = [(case, layout) for case in cases for layout in layouts]
    variants, absent = {}, {}
    for name in names:
        if why := VARIANTS[name].missing():
            print(f"{name} is absent: {why}", flush=True)
            absent[name] = why
        else:
            variants[name] = VARIANTS[name]
    if not variants:
        parser.error(f"--variants: none of {', '.join(names)} can be run here")
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_ending_on_sigterm())
        return _run(options, problems, variants, absent, ranks, logs)


def _run(
    options: argparse.Namespace,
    problems: Sequence[tuple[str, str]],
    variants: dict[str, Variant],
    absent: dict[str, str],
    ranks: int,
    logs: Path,
) -> int:
    """All cases, each with its layout; results are written after each process. absent: why variants
    are not run."""
    target = Path(options.output) if options.output else result_path("pretrain", ranks)
    rows: list[Row] = []
    command = default_command(ranks)
    if options.append and target.is_file():
        try:
            rows, earlier = rows_before("pretrain", ranks, target)
        except ValueError as error:
            print(f"failed: --append: {error}", file=sys.stderr)
            return 1
        command = f"{earlier} && {command}"
    cublas, why_absent = _cublas(), absent
    failed: list[str] = []
    for model, layout in problems:
        case = model if layout == "ep" else f"{model}-{layout}"
        sequences = options.micro_batch_size
        case += f"-mbs{sequences}" if sequences > 1 else ""
        case += "-forced" if options.routing == "forced" else ""
        shape = CASES[model]
        if options.microbatches is not None:
            shape = dataclasses.replace(shape, microbatches=options.microbatches)
        if shape.microbatches % sequences:
            failed.append(f"{case}: {shape.microbatches} sequences a GPU are no whole microbatches")
            continue
        measured = {name: Measured() for name in variants}
        absent = dict(why_absent)
        # A row stays until it is measured anew, but for one with another cuBLAS.
        done = [row for row in rows if row.case != case or row.config.get("cublas") == cublas]
        for turn in range(options.rounds):
            for name, variant in variants.items():
                one = measured[name]
                if one.failure is not None:
                    continue
                begun = time.monotonic()
                if name.startswith("megatron_best"):
                    best = best_variant(of_this_cublas(model), ranks, fp8=name.endswith("fp8"))
                    if best is None:
                        absent[name] = "no winner is kept: python -m benchmarks.tune.megatron_best"
                        one.failure = absent[name]
                        print(f"{case} {name} is absent: {absent[name]}", flush=True)
                        continue
                    variant = best
                one.flags = _beside(variant, ranks)
                try:
                    one.rounds.append(
                        measure_once(
                            shape,
                            variant,
                            LAYOUTS[layout],
                            ranks,
                            options.iters + options.kernels,
                            options.limit,
                            logs / f"{case}-{name}-{turn}.txt",
                            options.kernels,
                            options.routing,
                            [*MODEL_FLAGS[model], "--micro-batch-size", str(sequences)],
                        )
                    )
                except RuntimeError as error:
                    one.failure = str(error)
                    failed.append(f"{case} {name}: {error}")
                    print(f"{failed[-1]}", flush=True)
                    continue
                took = time.monotonic() - begun
                new = [
                    kept.row(
                        *(case, label, options.warm_up, ranks),
                        **_config(shape, ranks, layout, sequences),
                        routing=options.routing,
                        model_flags=" ".join(MODEL_FLAGS[model]),
                        cublas=cublas,
                        host_cpus=os.cpu_count(),
                        absent=absent,
                    )
                    for label, kept in measured.items()
                    if kept.rounds
                ]
                known = {(row.case, row.variant) for row in new}
                rows = [row for row in done if (row.case, row.variant) not in known] + new
                write_results("pretrain", rows, ranks, target, command)
                print(f"{_line(rows, case, name)}  round {turn + 1}, {took:.0f} s", flush=True)
    if rows:
        draw_later(lambda: draw_pretrain(target), "python -m benchmarks.report.pictures")
    for words in failed:
        print(f"failed: {words}", file=sys.stderr)
    return int(bool(failed))


def _beside(variant: Variant, ranks: int) -> str:
    """A variant's environment and flags, and the shared flags that it leaves out, as words."""
    environment = [f"{name}={value}" for name, value in variant.environment.items()]
    flags = flags_of(variant, ranks, torch.cuda.is_available())
    return " ".join([*environment, *flags, *(f"(without {flag})" for flag in variant.without)])


def _config(case: PretrainCase, ranks: int, layout: str, sequences: int) -> dict[str, Any]:
    several = int(ranks > 1)
    return {
        "layers": case.layers[several],
        "experts": case.experts[several],
        "sequence": case.sequence,
        "microbatches": case.microbatches // sequences,
        "micro_batch_size": sequences,
        "layout": layout,
        "expert_parallel": LAYOUTS[layout].expert_parallel or ranks,
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }


def _line(rows: Sequence[Row], case: str, variant: str) -> str:
    row = next(row for row in rows if (row.case, row.variant) == (case, variant))
    losses = row.config["losses"]
    return (
        f"{case:22} {variant:20} {row.median_ms:9.1f} ms "
        f"[{row.p10_ms:.1f}, {row.p90_ms:.1f}]  {row.config['tokens_per_s']:10,.0f} tokens/s  "
        f"{row.config['tflops_per_gpu']:6.1f} TFLOP/s  {row.config['peak_gib']:5.1f} GiB  "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
