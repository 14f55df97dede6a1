"""Hosts joined by a slow link, played by this machine: what overlap hides where the wire is slow.
No GPU is needed; root and iproute2 are.

    make bench-hosts                                            every case, results and picture
    sudo .venv/bin/python -m benchmarks.suites.slow_wire --cases moe-2x1 --modes forward

Each host is a network namespace with one or two ranks, whose links to the other hosts are limited
(benchmarks/harness/emulated_hosts.py). A case named `moe-2x1` is an MoE layer over 2 hosts of 1
rank. Its plain form runs first on links without a limit: its time is the computation, and the bytes
that a host sends give the rates at which the wire takes 0.25 to 4 times as long. Variants:

    fluid              ours, as `auto` chooses
    fluid_no_overlap   the same, each exchange waited for where it starts
    plain              one all-to-all each way
    megatron_alltoall  Megatron's own layer, alltoall dispatcher, a2a for attention
    megatron_allgather Megatron's own layer, allgather dispatcher

`main-*` is a training through Megatron's loop, by Megatron's own paths and with ours by patch. Rows
of `fluid` hold `hidden_share`: of the time that the link costs the plain form, the share that ours
saves. Rows of an interrupted run stay in the file; --resume measures the cases that it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.pretrain import PretrainCase, Variant, common_flags, flags_of
from benchmarks.cases.slow_wire import (
    CASES,
    CHANNEL,
    MAIN_VARIANTS,
    VARIANTS,
    WireCase,
    label,
    link_row,
)
from benchmarks.harness.emulated_hosts import EmulatedHosts, launch_environment, missing
from benchmarks.harness.measured_code import fingerprint
from benchmarks.harness.options import MODES, chosen
from benchmarks.harness.results import RESULTS, Row, read_results, write_results
from benchmarks.report.slow_wire_picture import draw_slow_wire

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
RATIOS = "0.25,0.5,1,2,4"


def _serve(
    hosts: EmulatedHosts, command: Sequence[str], ranks: int, limit_s: float,
    environment: dict[str, str], log: Path,
) -> Iterator[list[Row]]:  # fmt: skip
    """Start a process for each rank, change rates as they ask, and give what they measure.

    Raises:
        RuntimeError: a rank failed, or they took longer than limit_s.
    """
    ours, theirs = multiprocessing.Pipe()
    processes = []
    try:
        for rank in range(len(hosts.names) * ranks):
            given = launch_environment(hosts, ranks, rank) | environment
            if rank == 0:
                given[CHANNEL] = str(theirs.fileno())
            passed = [theirs.fileno()] if rank == 0 else []
            output = str(log) if environment.get("WIRE_PLAN") else None
            started = hosts.start(rank // ranks, command, given, passed, output)
            processes.append(started)
        theirs.close()
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end within {limit_s:.0f} s")
            failed = [str(n) for n, p in enumerate(processes) if p.poll() not in (None, 0)]
            if failed:
                raise RuntimeError(f"rank {', '.join(failed)} failed")
            if ours.poll(0.2):
                with contextlib.suppress(EOFError, ConnectionResetError):
                    yield from _answer(ours, hosts)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while ours.poll(0):
                yield from _answer(ours, hosts)
        if failed := [str(n) for n, p in enumerate(processes) if p.returncode]:
            raise RuntimeError(f"rank {', '.join(failed)} failed")
    finally:
        ours.close()
        hosts.stop()


def _answer(
    ours: multiprocessing.connection.Connection, hosts: EmulatedHosts
) -> Iterator[list[Row]]:
    what, value = ours.recv()
    if what == "rate":
        hosts.set_rate(value)
        ours.send(True)
        return
    yield value


def _layers(
    name: str, options: argparse.Namespace, hosts: EmulatedHosts, log: Path
) -> Iterator[list[Row]]:
    # Imported, so that results know the code that the ranks run (harness/measured_code.py).
    from benchmarks.cases import slow_wire_rank

    command = [sys.executable, "-m", slow_wire_rank.__name__, "--case", name]
    command += ["--modes", ",".join(options.modes), "--ratios", options.ratios]
    command += ["--seconds", str(options.seconds), "--variants", ",".join(options.variants)]
    environment = {"PYTHONPATH": str(ROOT), "MEGATRON_FLUID_CPU": "1"}
    yield from _serve(hosts, command, CASES[name].ranks, options.limit, environment, log)


def _pretrain_case(case: WireCase) -> PretrainCase:
    moe = case.moe
    widths = {
        "--hidden-size": moe.hidden,
        "--num-attention-heads": case.heads,
        "--ffn-hidden-size": moe.ffn,
        "--moe-ffn-hidden-size": moe.ffn,
        "--moe-router-topk": moe.top_k,
    }
    flags = [str(word) for pair in widths.items() for word in pair]
    layers, experts = (case.layers,) * 2, (moe.experts,) * 2
    return PretrainCase(flags, layers, experts, case.tokens, microbatches=4, vocabulary=512)


def _main_job(
    name: str, options: argparse.Namespace, hosts: EmulatedHosts, log: Path
) -> Iterator[list[Row]]:
    """A process a variant, each at all rates; the first one's computation sets them."""
    from benchmarks.cases.slow_wire_main import steps_in_all

    case = CASES[name]
    ratios = [float(ratio) for ratio in options.ratios.split(",")]
    ranks = case.hosts * case.ranks
    found: dict[str, dict[float, float]] = {}
    rates: list[Any] = []
    for variant in MAIN_VARIANTS:
        if options.variants and variant not in options.variants:
            continue
        plan = {"case": name, "variant": variant, "ratios": ratios, "rates": rates}
        plan["steps"] = options.steps
        steps = steps_in_all(len(ratios), options.steps)
        flags = common_flags(_pretrain_case(case), ranks, steps, gpu=False)
        flags.append("--overlap-grad-reduce")
        flags += flags_of(Variant(fluid=variant == "fluid"), ranks, gpu=False)
        if variant == "megatron_allgather":
            flags += ["--moe-token-dispatcher-type", "allgather"]
        with tempfile.TemporaryDirectory() as scratch:
            result = str(Path(scratch, "result.json"))
            environment = {
                "PYTHONPATH": str(ROOT),
                "MEGATRON_FLUID_CPU": "1",
                "WIRE_PLAN": json.dumps(plan),
                "PRETRAIN_RESULT": result,
                "PRETRAIN_PLAIN": "0",
            }
            command = [sys.executable, "-m", "benchmarks.cases.slow_wire_main", *flags]
            command += ["--data-cache-path", scratch]
            for rows in _serve(hosts, command, case.ranks, options.limit, environment, log):
                found[variant] = {row.config["wire_over_compute"]: row.median_ms for row in rows}
                rates = [row.config["rate_bits_per_s"] for row in rows[1:]]
                yield [_with_share(case, row, found) for row in rows]


def _with_share(case: WireCase, row: Row, found: dict[str, dict[float, float]]) -> Row:
    ratio = row.config["wire_over_compute"]
    medians = {variant: by_ratio[ratio] for variant, by_ratio in found.items()}
    unlimited = {variant: by_ratio[0.0] for variant, by_ratio in found.items()}
    print(f"{row.case} {row.variant} {row.median_ms:.0f} ms", flush=True)
    return link_row(case, row, ratio, medians, unlimited)


def _kept(options: argparse.Namespace) -> list[Row]:
    """Rows of an earlier run of the same code."""
    if not (options.resume and options.output.is_file()):
        return []
    document = read_results(options.output)
    if document.get("code") != fingerprint("slow_wire"):
        print("--resume: the code has changed since; everything is measured", flush=True)
        return []
    return [Row(**row) for row in document["rows"]]


def _is_done(name: str, options: argparse.Namespace, rows: Sequence[Row]) -> bool:
    modes = ["train"] if CASES[name].kind == "main" else options.modes
    ratios = [0.0, *(float(ratio) for ratio in options.ratios.split(","))]
    wanted = {(label(name, ratio), mode, "fluid") for ratio in ratios for mode in modes}
    return wanted <= {(row.case, row.mode, row.variant) for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if a case failed, 2 if this machine cannot play hosts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for name in CASES if not name.endswith("-tiny")]
    parser.add_argument("--cases", default=",".join(every), help=", ".join(CASES))
    parser.add_argument("--modes", default=",".join(MODES), help=", ".join(MODES))
    parser.add_argument("--variants", default="", help=f"default: all of {', '.join(VARIANTS)}")
    parser.add_argument("--ratios", default=RATIOS, help="wire over compute (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for a rate (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of main, for a rate (%(default)s)")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds a case may take")
    parser.add_argument("--resume", action="store_true", help="measure what the file lacks")
    parser.add_argument("--output", type=Path, default=RESULTS / "slow_wire.json")
    options = parser.parse_args(arguments)
    names = chosen(parser, "--cases", options.cases, CASES)
    options.modes = chosen(parser, "--modes", options.modes, MODES)
    given = options.variants
    options.variants = chosen(parser, "--variants", given, VARIANTS) if given else []
    if (why := missing()) is not None:
        print(f"slow_wire: this machine cannot play hosts: {why}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows, failed = _kept(options), []
    for name in names:
        case = CASES[name]
        if _is_done(name, options, rows):
            continue
        rows = [row for row in rows if not row.case.startswith(f"{name}-wire-")]
        ranks = max(case.hosts * case.ranks, 2)
        measured = _main_job if case.kind == "main" else _layers
        with tempfile.TemporaryDirectory() as folder, EmulatedHosts(case.hosts) as hosts:
            log = Path(folder, "ranks.txt")
            try:
                for more in measured(name, options, hosts, log):
                    rows += more
                    write_results("slow_wire", rows, ranks, options.output)
            except RuntimeError as error:
                said = log.read_text(errors="replace")[-2000:] if log.is_file() else ""
                failed.append(f"{name}: {error}\n{said}".rstrip())
                print(failed[-1], file=sys.stderr, flush=True)
    if rows:
        try:
            print(f"picture: {draw_slow_wire(options.output)}")
        except ImportError as error:
            print(f"no picture ({error})")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
