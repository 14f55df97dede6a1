"""Find the flags with which Megatron alone trains a case of the suite pretrain fastest.

    python -m benchmarks.tune.megatron_best --cases qwen3-30b-a3b --options graph,apex,cutlass
    NPROC=2 python -m benchmarks.tune.megatron_best --cases qwen3-30b-a3b,mixtral-8x7b

A greedy search: each set of flags (OPTIONS in benchmarks/cases/pretrain.py) is tried beside those
that are kept, and kept where it makes an iteration at least 1% faster and the first losses are
those of Megatron without it. One that was no faster is tried again beside later winners. One
process at a time, alone on its host. What was tried, what would not start and why, and the winner
stand in benchmarks/tune/megatron_best.json after every trial; the suite's variant `megatron_best`
takes it from there. `--options fp8,...` begins with fp8, for a winner of its own
(`megatron_best_fp8`), and so do `capacity_graph` and `capacity_whole_graph`, whose experts drop
tokens; none of these is searched by default. `--micro-batch-size N` searches for a winner of its
own, too, which no suite takes. `--begin cutlass,apex` takes these from a search before and goes on
from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.model_flags import MODEL_FLAGS
from benchmarks.cases.parallel_layouts import LAYOUTS
from benchmarks.cases.pretrain import BEST, CASES, OPTIONS, ROUTINGS, Variant
from benchmarks.harness.options import chosen
from benchmarks.harness.results import commit_id, cublas_version
from benchmarks.suites.pretrain import measure_once, of_this_cublas
from megatron_fluid.cli.terminal import positive

__all__ = ["main", "search", "table"]

_FASTER = 0.99
# Of the first losses. One rounding more moves Mixtral's third by 0.7%; fp8 begins with its own.
_LOSSES, _APART = 3, 1e-2
# All of an iteration can be captured where experts drop tokens. Here, for no suite takes it.
OPTIONS["capacity_whole_graph"] = Variant(
    flags=[
        *("--moe-expert-capacity-factor", "1.25", "--moe-pad-expert-input-to-capacity"),
        *("--cuda-graph-impl", "full_iteration", *OPTIONS["unchecked"].flags),
    ],
    without=OPTIONS["late_reductions"].without,
)
# Experts as one operation of Transformer Engine's, whose grouped GEMMs are one launch each from
# cuBLAS 13.4 on. Megatron refuses it for gated experts without the variable.
OPTIONS["op_fuser"] = Variant(
    flags=["--use-transformer-engine-op-fuser"],
    environment={"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"},
    needs=["transformer_engine"],
)
# What trains otherwise, and so is compared with itself alone; the end of such a search's label.
_OF_ITS_OWN = {
    "fp8": ", fp8",
    "capacity_graph": ", tokens dropped",
    "capacity_whole_graph": ", tokens dropped, one graph",
}
_OVER_SEVERAL = ("allgather", "wgrad_overlap", "expert_overlap", "deepep", "nccl_ep", "stash_graph")

Measure = Callable[[Variant], dict[str, Any]]


def search(
    options: Sequence[str],
    measure: Measure,
    warm_up: int,
    keep: Callable[[dict[str, Any]], None],
    begin: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the winner and every trial; `keep` is called with the same after each
    and after each new winner.

    Args:
        options: names of OPTIONS, tried in this order; those of _OF_ITS_OWN are kept whatever they
            cost.
        measure: trains with a variant; the report of benchmarks/cases/pretrain_rank.py.
        begin: names of OPTIONS, tried and kept together before the others are tried one by one.

    Raises:
        RuntimeError: Megatron does not start with no option at all.
    """
    winner = [name for name in _OF_ITS_OWN if name in options]
    found: dict[str, Any] = {"winner": winner, "ms": None, "tried": []}
    losses: list[float] = []

    def attempt(names: Sequence[str]) -> float | None:
        variant = Variant()
        for name in names:
            variant = variant.with_option(name)
        trial: dict[str, Any] = {"options": list(names)}
        found["tried"].append(trial)
        try:
            if (why := variant.missing()) is not None:
                raise RuntimeError(why)
            report = measure(variant)
            ms = 1e3 * statistics.median(report["seconds"][warm_up:])
            trial |= {"ms": ms, "peak_gib": report["peak_bytes"] / 2**30}
            first = report["losses"][:_LOSSES]
            losses[:] = losses or first
            if any(abs(a - b) > _APART * abs(b) for a, b in zip(first, losses, strict=True)):
                raise RuntimeError(f"its losses {first} are not {losses}")
        except RuntimeError as error:
            trial["why_not"] = str(error)
            return None
        finally:
            keep(found)
        return ms

    best = attempt(winner)
    if best is None:
        raise RuntimeError(found["tried"][0]["why_not"])
    found["ms"] = found["base_ms"] = best
    if begin:
        together = attempt([*winner, *begin])
        if together is not None and together < _FASTER * best:
            winner += begin
            found["ms"] = best = together
            keep(found)
    # Winners beside which an option was found to be no faster: with one more it is tried again.
    beside = {name: -1 for name in options if name not in winner}
    while again := [name for name, count in beside.items() if count < len(winner)]:
        for name in again:
            ms = attempt([*winner, name])
            if ms is not None and ms >= _FASTER * best:
                beside[name] = len(winner)
                continue
            del beside[name]
            if ms is not None:
                winner.append(name)
                found["ms"] = best = ms
                keep(found)
    return found


def table(path: Path = BEST) -> str:
    """Every search as Markdown: the winner first, then what was tried."""
    searches = json.loads(path.read_text()) if path.is_file() else {}
    parts = []
    for label, found in searches.items():
        how = f" (set by hand: {found['by_hand']})" if "by_hand" in found else ""
        base = f" (without options {found['base_ms']:.1f})" if "base_ms" in found else ""
        lines = [
            f"**{label}:** {' + '.join(found['winner']) or 'no option'}{how}, {found['ms']:.1f} ms"
            f"{base} on {found['gpu']}, commit {found['commit'][:7]}.",
            "",
            "| tried | ms | why not |",
            "| --- | --- | --- |",
        ]
        for trial in found["tried"]:
            ms = f"{trial['ms']:.1f}" if "ms" in trial else ""
            why = trial.get("why_not", "").replace("|", "/")
            other = f" ({trial['commit'][:7]})" if "commit" in trial else ""  # of a search before
            lines.append(f"| {' + '.join(trial['options']) or 'no option'}{other} | {ms} | {why} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "Not searched yet."


def main(arguments: Sequence[str] | None = None) -> int:
    """Search each case; 1 if one would not start at all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="qwen3-30b-a3b", help=", ".join(CASES))
    parser.add_argument("--options", default=None, help=f"{', '.join(OPTIONS)}; default: all")
    parser.add_argument("--begin", default=None, help="options that are tried together first")
    parser.add_argument("--routing", choices=ROUTINGS, default="real", help="(%(default)s)")
    parser.add_argument("--iters", type=positive, default=12, help="steps a trial (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=6, help="of them left out (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=None, help="default: the case's")
    parser.add_argument(
        "--micro-batch-size", type=positive, default=1, help="sequences a microbatch (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a trial may take")
    parser.add_argument("--output", type=Path, default=BEST, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if not 0 <= options.warm_up < options.iters:
        parser.error(f"--warm-up: found {options.warm_up}, allowed: 0 to --iters - 1")
    cases = chosen(parser, "--cases", options.cases, CASES)
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("found no GPU, on which Megatron's flags could be compared")
    ranks = int(os.environ.get("NPROC", "0")) or gpus
    left_out = {*_OF_ITS_OWN, *(_OVER_SEVERAL if ranks == 1 else ())}
    names = [name for name in OPTIONS if name not in left_out]
    if options.options:
        names = chosen(parser, "--options", options.options, OPTIONS)
    begin = chosen(parser, "--begin", options.begin, OPTIONS) if options.begin else []
    failed = 0
    for name in cases:
        case, label = CASES[name], f"{of_this_cublas(name)}, {ranks} GPU"
        label += "".join(end for option, end in _OF_ITS_OWN.items() if option in names)
        if options.microbatches is not None:
            case = dataclasses.replace(case, microbatches=options.microbatches)
        sequences = options.micro_batch_size
        if case.microbatches % sequences:
            parser.error(
                f"--micro-batch-size: found {sequences}, allowed: a divisor of {case.microbatches}"
            )
        label += f", {sequences} sequences a microbatch" if sequences > 1 else ""
        head = {
            "gpu": torch.cuda.get_device_name(),
            "commit": commit_id() or "unknown",
            "cublas": cublas_version(),
            "microbatches": case.microbatches // sequences,
            "routing": options.routing,
        }

        def keep(found: dict[str, Any], label: str = label, head: dict[str, Any] = head) -> None:
            last = found["tried"][-1]
            print(f"{label}: {last}; winner {found['winner']} {found['ms']}", flush=True)
            if found["ms"] is not None:
                known = json.loads(options.output.read_text()) if options.output.is_file() else {}
                text = json.dumps({**known, label: {**head, **found}}, indent=1)
                options.output.write_text(text + "\n")

        with tempfile.TemporaryDirectory() as logs:

            def measure(
                variant: Variant, logs: str = logs, case: Any = case, name: str = name
            ) -> dict[str, Any]:
                log, layout = Path(logs, "log.txt"), LAYOUTS["ep"]
                steps, limit = options.iters, options.limit
                more = [*MODEL_FLAGS[name], "--micro-batch-size", str(options.micro_batch_size)]
                given: dict[str, Any] = {"routing": options.routing, "more": more}
                return measure_once(case, variant, layout, ranks, steps, limit, log, **given)

            try:
                search(names, measure, options.warm_up, keep, begin)
            except RuntimeError as error:
                print(f"failed: {label}: {error}", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
