"""Training iterations of the recipes in examples/recipes/ by the unchanged pretrain_gpt.py of
Megatron-LM, on the GPUs of one machine: with the flags of each recipe but fewer layers, without
this package, with it, and without it again.

    MEGATRON_LM=Megatron-LM python -m benchmarks.suites.recipes --cases olmoe_1b_7b
    NPROC=2 MEGATRON_LM=Megatron-LM python -m benchmarks.suites.recipes --logs logs

`megatron-fluid compare` does it. Rows are of mode `train`: `megatron` is both runs without this
package, with the flags of the recipe, not the best ones; `fluid` the one with it. In config: the
flags in place of the recipe's (`fewer`), `losses` of every step, `peak_gib` that rank 0 allocated,
and, of the losses, the mean relative difference that the package makes (`difference`) and that of
the two runs without it (`noise`). The exit status is 1 if a recipe failed, or if its losses differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import chosen
from benchmarks.harness.results import Row, result_path, write_results
from benchmarks.harness.timing import quantile
from megatron_fluid.cli.compare import read_log
from megatron_fluid.profiling.compare_page import Comparison

__all__ = ["FEWER", "command_of", "main", "rows_of"]

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES = 16
FEWER = {
    "mixtral_8x7b": ["--num-layers", "4"],
    "qwen3_30b_a3b": ["--num-layers", "8"],
    # An eighth of the experts: what two of sixteen GPUs hold.
    "deepseek_v3": [
        *("--num-layers", "2", "--moe-layer-freq", "([0]*1+[1]*1)"),
        *("--num-experts", "32", "--moe-router-num-groups", "8"),
    ],
    "gpt_oss_20b": ["--num-layers", "4"],
    "olmoe_1b_7b": ["--num-layers", "12"],
}
"""Flags by recipe, in place of its own: what two GPUs hold."""
_RUNS = ("off", "on", "off_again")


def command_of(recipe: str, ranks: int, script: Path) -> list[str]:
    """The training that a recipe starts, with fewer layers, on GPUs of this host."""
    flags = [*FEWER[recipe], "--expert-model-parallel-size", str(ranks)]
    flags += ["--micro-batch-size", "1", "--global-batch-size", str(MICROBATCHES * ranks)]
    program = ROOT / "examples" / "recipes" / f"{recipe}.sh"
    printed = subprocess.run(
        ["bash", str(program), "--print", *flags], capture_output=True, text=True, check=True
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks)]
    return [*launcher, str(script), *printed.stdout.splitlines()]


def rows_of(recipe: str, folder: Path, warm_up: int, ranks: int) -> list[Row]:
    """Rows of a comparison, from the logs of its three runs."""
    logs = {name: read_log((folder / f"{name}.log").read_text(errors="replace")) for name in _RUNS}
    off, on, again = (logs[name].steps for name in _RUNS)
    compared = Comparison(
        off=off, on=on, again=again, warm_up=warm_up, tolerance=0.0,
        memory_mib=(None, None), started=(), command=(),
    )  # fmt: skip
    shared = {"fewer": " ".join(FEWER[recipe]), "microbatches": MICROBATCHES}
    shared |= {"expert_parallel": str(ranks), "routing": "real"}
    rows = []
    for variant, names in (("megatron", ("off", "off_again")), ("fluid", ("on",))):
        times = [step.ms for name in names for step in logs[name].steps[warm_up:]]
        losses = [step.loss for step in logs[names[0]].steps]
        config: dict[str, Any] = {**shared, "losses": losses}
        config["peak_gib"] = (logs[names[0]].memory_mib or 0.0) / 1024
        if variant == "fluid":
            config |= {"difference": compared.made, "noise": compared.noise}
        spread = statistics.median(times), quantile(times, 0.1), quantile(times, 0.9)
        rows.append(Row(recipe, "train", variant, *spread, len(times), config))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the recipes, and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(FEWER), help=", ".join(FEWER))
    parser.add_argument("--steps", type=int, default=14, help="of each run (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=7, help="of them left out (%(default)s)")
    parser.add_argument("--ranks", type=int, default=None, help="default: NPROC, or one a GPU")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds a recipe may take")
    parser.add_argument("--logs", type=Path, default=None, help="folder for pages and logs")
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    recipes = chosen(parser, "--cases", options.cases, FEWER)
    if not torch.cuda.is_available():
        parser.error("no GPU is visible to torch: the recipes train with Transformer Engine")
    script = Path(os.environ.get("MEGATRON_LM", ""), "pretrain_gpt.py")
    if not script.is_file():
        parser.error("MEGATRON_LM names no checkout of Megatron-LM, tag core_v0.19.x")
    ranks = options.ranks or int(os.environ.get("NPROC", "0")) or torch.cuda.device_count()
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in recipes:
            folder = (options.logs or Path(temporary)) / recipe
            command = [sys.executable, "-m", "megatron_fluid.cli", "compare", "--output"]
            command += [str(folder), "--steps", str(options.steps)]
            command += ["--warm-up", str(options.warm_up), "--"]
            status = _run([*command, *command_of(recipe, ranks, script)], options.limit)
            if status in (0, 1):
                rows += rows_of(recipe, folder, options.warm_up, ranks)
                write_results(
                    "recipes", rows, ranks, options.output or result_path("recipes", ranks)
                )
            if status:
                failed.append(f"{recipe}: compare ended with status {status}")
    print("\n".join(failed), file=sys.stderr)
    return int(bool(failed))


def _run(command: Sequence[str], limit_s: float) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )}  # fmt: skip
    try:
        return subprocess.run(command, env=environment, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return 124


if __name__ == "__main__":
    sys.exit(main())
