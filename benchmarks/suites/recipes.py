"""Training iterations of the recipes in examples/recipes/ by the unchanged pretrain_gpt.py of
Megatron-LM, on the GPUs of one machine: with the flags of each recipe but fewer layers, without
this package, with it, without it again, and with Megatron's best flags.

    MEGATRON_LM=Megatron-LM python -m benchmarks.suites.recipes --cases olmoe_1b_7b
    NPROC=2 MEGATRON_LM=Megatron-LM python -m benchmarks.suites.recipes --logs logs

`megatron-fluid compare` does the first three. Rows are of mode `train`: `megatron` is both runs
without this package, with the flags of the recipe; `fluid` the one with it; `megatron_best` has,
beside the recipe's flags, those that benchmarks/tune/megatron_best.py found (`options`) with this
cuBLAS for the case `searched`, and needs Apex where they do. In config: the flags in place of the
recipe's (`fewer`), the release of the checkout (`megatron_lm`), `losses` of every step, `peak_gib`
that rank 0 allocated, and, of the losses, the mean relative difference that the package makes
(`difference`) and that of the two runs without it (`noise`). The exit status is 1 if a run failed,
or if losses differ.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.cases.pretrain import BEST, OPTIONS, Variant
from benchmarks.harness.options import chosen
from benchmarks.harness.results import Row, result_path, write_results
from benchmarks.harness.timing import quantile
from benchmarks.suites.pretrain import of_this_cublas
from megatron_fluid.cli.compare import prepare, read_log
from megatron_fluid.profiling.compare_page import Comparison

__all__ = ["FEWER", "SEARCHED", "best_command", "command_of", "main", "rows_of"]

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES = 16
FEWER = {
    "mixtral_8x7b": ["--num-layers", "2"],
    "qwen3_30b_a3b": ["--num-layers", "4"],
    # An eighth of the experts: what two of sixteen GPUs hold.
    "deepseek_v3": [
        *("--num-layers", "2", "--moe-layer-freq", "([0]*1+[1]*1)"),
        *("--num-experts", "32", "--moe-router-num-groups", "8"),
    ],
    "gpt_oss_20b": ["--num-layers", "4"],
    "olmoe_1b_7b": ["--num-layers", "6"],
}
"""Flags by recipe, in place of its own: what one H200 trains in minutes."""
SEARCHED = {
    "mixtral_8x7b": "mixtral-8x7b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss_20b": "qwen3-30b-a3b",  # not searched itself
    "olmoe_1b_7b": "olmoe",
}
"""The case of the suite pretrain whose search gives a recipe its best flags."""
_RUNS = ("off", "on", "off_again")
_VARIANTS = {"megatron": ("off", "off_again"), "fluid": ("on",), "megatron_best": ("best",)}


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


def best_command(recipe: str, ranks: int, script: Path, steps: int) -> tuple[list[str], Variant]:
    """The same training with Megatron's best flags and without this package, and these flags."""
    variant = Variant()
    for name in _options(recipe, ranks):
        variant = variant.with_option(name)
    words = [word for word in command_of(recipe, ranks, script) if word not in variant.without]
    return prepare([*words, *variant.flags], steps, on=False), variant


def _options(recipe: str, ranks: int) -> list[str]:
    """The winner with this cuBLAS for as many GPUs, or for one."""
    found = json.loads(BEST.read_text())
    case = of_this_cublas(SEARCHED[recipe])
    names = found.get(f"{case}, {ranks} GPU") or found[f"{case}, 1 GPU"]
    return [name for name in OPTIONS if name in names["winner"]]


def rows_of(recipe: str, folder: Path, warm_up: int, ranks: int, release: str = "") -> list[Row]:
    """Rows of a recipe, from the logs of those of its runs that have steps behind the warm-up."""
    logs = {
        name: read_log(log.read_text(errors="replace"))
        for name in (*_RUNS, "best")
        if (log := folder / f"{name}.log").is_file()
    }
    logs = {name: log for name, log in logs.items() if len(log.steps) > warm_up}
    shared = {"fewer": " ".join(FEWER[recipe]), "microbatches": MICROBATCHES}
    shared |= {"expert_parallel": str(ranks), "routing": "real", "megatron_lm": release}
    rows = []
    for variant, names in _VARIANTS.items():
        if not logs.keys() >= set(names):
            continue
        times = [step.ms for name in names for step in logs[name].steps[warm_up:]]
        losses = [step.loss for step in logs[names[0]].steps]
        config: dict[str, Any] = {**shared, "losses": losses}
        config["peak_gib"] = (logs[names[0]].memory_mib or 0.0) / 1024
        if variant == "fluid" and logs.keys() >= set(_RUNS):
            off, on, again = (logs[name].steps for name in _RUNS)
            compared = Comparison(
                off=off, on=on, again=again, warm_up=warm_up, tolerance=0.0,
                memory_mib=(None, None), started=(), command=(),
            )  # fmt: skip
            config |= {"difference": compared.made, "noise": compared.noise}
        if variant == "megatron_best":
            config |= {"options": _options(recipe, ranks), "searched": SEARCHED[recipe]}
        spread = statistics.median(times), quantile(times, 0.1), quantile(times, 0.9)
        rows.append(Row(recipe, "train", variant, *spread, len(times), config))
    return rows


def _release_of(checkout: Path) -> str:
    """The release of Megatron-Core in a checkout of Megatron-LM, which its scripts import."""
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    parts = (re.search(rf"^{part} = (\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(found[1] if found else "?" for found in parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the recipes, and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(FEWER), help=", ".join(FEWER))
    parser.add_argument("--steps", type=int, default=14, help="of each run (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=7, help="of them left out (%(default)s)")
    parser.add_argument("--ranks", type=int, default=None, help="default: NPROC, or one a GPU")
    limit = "seconds that the first three runs of a recipe may take, and the last (%(default)s)"
    parser.add_argument("--limit", type=float, default=420.0, help=limit)
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
    target = options.output or result_path("recipes", ranks)
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for recipe in recipes:
            folder = (options.logs or Path(temporary)) / recipe
            folder.mkdir(parents=True, exist_ok=True)
            for log_of_before in folder.glob("*.log"):
                log_of_before.unlink()
            command = [sys.executable, "-m", "megatron_fluid.cli", "compare", "--output"]
            command += [str(folder), "--steps", str(options.steps)]
            command += ["--warm-up", str(options.warm_up), "--"]
            done = list(rows)

            def keep(done: list[Row] = done, recipe: str = recipe, folder: Path = folder) -> None:
                release = _release_of(script.parent)
                rows[:] = [*done, *rows_of(recipe, folder, options.warm_up, ranks, release)]
                write_results("recipes", rows, ranks, target)

            status = _run([*command, *command_of(recipe, ranks, script)], {}, options.limit)
            keep()
            if status:
                failed.append(f"{recipe}: compare ended with status {status}")
            best, variant = best_command(recipe, ranks, script, options.steps)
            if why := variant.missing():
                failed.append(f"{recipe}, Megatron's best flags: {why}")
                continue
            environment = {**variant.environment, "MEGATRON_FLUID": "off"}
            with (folder / "best.log").open("w") as log:
                status = _run(best, environment, options.limit, log)
            keep()
            if status:
                failed.append(f"{recipe}, Megatron's best flags: ended with status {status}")
    print("\n".join(failed), file=sys.stderr)
    return int(bool(failed))


def _run(
    command: Sequence[str], more: Mapping[str, str], limit_s: float, log: IO[str] | None = None
) -> int:
    """Run a command with `more` in its environment; its exit status, 124 after `limit_s`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}
    errors = None if log is None else subprocess.STDOUT
    with subprocess.Popen(command, env=environment, stdout=log, stderr=errors) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher that was killed would leave its ranks on the GPU
            return 124


if __name__ == "__main__":
    sys.exit(main())
