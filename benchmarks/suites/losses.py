"""Losses of whole training runs on real text, in bf16 and in fp8, Megatron's and ours, of several
seeds: whether ours are within what a seed changes.

    benchmarks/launch.sh losses --output benchmarks/results/losses-1gpu.json
    python -m benchmarks.suites.losses --variants megatron_fp8,fluid_fp8 --seeds 3
    benchmarks/launch.sh losses --smoke                         # on a CPU, a few steps, no fp8

Each run is a process (one a rank) of examples/pretrain_gpt_moe.py on the sources of Python's
standard library, the same batches in every variant of a seed. Rows are of mode `train`, with the
median time of an iteration of all seeds. In config: `losses`, of each seed the loss of every
iteration; `final`, of each seed the mean of the last tenth; `held_out`, of each seed the loss on
held-out text after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import chosen
from benchmarks.harness.results import Row, result_path, write_results
from benchmarks.harness.timing import quantile
from benchmarks.report.pictures import draw_later, draw_losses
from megatron_fluid.cli.terminal import positive

__all__ = ["VARIANTS", "main"]

ROOT = Path(__file__).resolve().parents[2]
_MEGATRON = [
    *("--fluid-moe-backend", "megatron", "--fluid-tp-overlap", "off"),
    *("--fluid-cp-backend", "megatron"),
]
_FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
VARIANTS: dict[str, list[str]] = {
    "megatron": _MEGATRON,
    "fluid": [],
    "megatron_fp8": [*_MEGATRON, *_FP8],
    "fluid_fp8": _FP8,
}
_MODEL = {
    "small": [
        *("--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8"),
        *("--ffn-hidden-size", "512", "--num-experts", "16", "--moe-router-topk", "4"),
        *("--seq-length", "512", "--micro-batch-size", "8", "--global-batch-size", "16"),
        *("--bf16", "--lr", "6e-4"),
    ],
    "tiny": ["--seq-length", "32"],
}


def _run(model: str, variant: str, seed: int, ranks: int, iterations: int, limit_s: float) -> Any:
    """The losses of one run: {"train": {iteration: loss}, "held_out": likewise, "step_ms": of the
    median iteration}.

    Raises:
        RuntimeError: the run failed; the message holds its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        )
        if not torch.cuda.is_available():
            environment["MEGATRON_FLUID_CPU"] = "1"
        command = [
            *(sys.executable, "-m", "megatron_fluid.cli", "run", "--nproc-per-node", str(ranks)),
            *(str(ROOT / "examples" / "pretrain_gpt_moe.py"), *_MODEL[model], *VARIANTS[variant]),
            *("--train-iters", str(iterations), "--seed", str(seed), "--log-interval", "1"),
            *("--eval-iters", "20", "--no-defaults", "save"),
        ]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        found = Path(folder, "runs", "unsaved", "losses.json")
        if done.returncode or not found.is_file():
            lines = (done.stderr + done.stdout).strip().splitlines()
            named = [line.strip() for line in lines if "Error" in line or "error:" in line]
            raise RuntimeError((named or lines or ["nothing was said"])[-1][:300])
        said = re.search(r"\(([\d.,]+) ms an iteration", done.stdout + done.stderr)
        step_ms = float(said[1].replace(",", "")) if said else float("nan")
        return json.loads(found.read_text(encoding="utf-8")) | {"step_ms": step_ms}


def _row(model: str, variant: str, runs: Sequence[Any], shared: dict[str, Any]) -> Row:
    losses = [list(run["train"].values()) for run in runs]
    tenth = max(1, len(losses[0]) // 10)
    times = [run["step_ms"] for run in runs]
    config = {
        "losses": [[round(loss, 4) for loss in one] for one in losses],
        "final": [statistics.fmean(one[-tenth:]) for one in losses],
        "held_out": [list(run["held_out"].values())[-1] for run in runs],
        **shared,
    }
    spread = quantile(times, 0.1), quantile(times, 0.9)
    return Row(model, "train", variant, statistics.median(times), *spread, len(times), config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and write; 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=None, help=f"{', '.join(VARIANTS)}; default: all")
    parser.add_argument("--seeds", type=int, default=2, help="runs of a variant (%(default)s)")
    parser.add_argument("--iters", type=positive, default=500, help="iterations (%(default)s)")
    parser.add_argument("--ranks", type=int, default=None, help="default: NPROC, one a GPU, or 2")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a run may take")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, 6 iterations, no fp8")
    parser.add_argument("--output", default=None, help="result file")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.iters < 2:
        found = f"{options.seeds}, {options.iters}"
        parser.error(f"--seeds, --iters: found {found}, allowed: 1 or more, 2 or more")
    gpu = torch.cuda.is_available()
    if not gpu and not options.smoke:
        parser.error("needs a GPU; without one: --smoke")
    model, iterations = ("tiny", 6) if options.smoke else ("small", options.iters)
    every = [name for name in VARIANTS if gpu or not name.endswith("fp8")]
    names = chosen(parser, "--variants", options.variants or ",".join(every), every)
    ranks = options.ranks or int(os.environ.get("NPROC", "0")) or torch.cuda.device_count() or 2
    runs: dict[str, list[Any]] = {name: [] for name in names}
    failed: list[str] = []
    target = Path(options.output) if options.output else result_path("losses", ranks)
    for seed in range(1, options.seeds + 1):
        for name in names:
            begun = time.monotonic()
            try:
                run = _run(model, name, seed, ranks, iterations, options.limit)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}, seed {seed}: {error}")
                print(failed[-1], flush=True)
                continue
            runs[name].append(run)
            shared = {"iterations": iterations, "ranks": ranks, "seeds": options.seeds}
            rows = [_row(model, label, kept, shared) for label, kept in runs.items() if kept]
            write_results("losses", rows, ranks, target)
            last = next(row for row in rows if row.variant == name)
            print(
                f"{name:14} seed {seed}  final {last.config['final'][-1]:.4f}  held out "
                f"{last.config['held_out'][-1]:.4f}  {last.median_ms:.1f} ms an iteration, "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
    if any(runs.values()):
        draw_later(lambda: draw_losses(target), "python -m benchmarks.report.pictures")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
