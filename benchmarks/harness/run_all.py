"""Every suite, one after the other, each within a time limit: `make bench`.

    python -m benchmarks.harness.run_all [--only SUITE ...] [--factor 2.0] [--dry-run]

On all GPUs of this host. A suite that fails or runs out of its time is named at the end, and the
others are measured; suites write their files as they go, so that one that was cut short has told
what it measured. Then `make readme` writes the tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.results import RESULTS, result_path

__all__ = ["SUITES", "Job", "main", "run"]

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0  # between asking the ranks to end and making them


@dataclass(frozen=True)
class Job:
    """A suite's command after benchmarks/launch.sh, without --output; the seconds it may take;
    ranks, 0 for one a GPU."""

    suite: str
    seconds: float
    arguments: Sequence[str] = ()
    ranks: int = 0

    def output(self, gpus: int) -> Path:
        """The suite's result file on so many GPUs."""
        return result_path(self.suite, self.ranks or gpus)

    def command(self, gpus: int) -> list[str]:
        """What is run, from the project's folder."""
        return [
            str(ROOT / "benchmarks" / "launch.sh"),
            self.suite,
            *self.arguments,
            "--output",
            str(self.output(gpus)),
        ]


SUITES = (
    Job("moe_layer", 900),
    Job("dispatch_combine", 240),
    Job("grouped_gemm", 240, ranks=1),
    Job("all_to_all", 300),
    Job("attention", 400),
    Job("block", 300),
    Job("tp_overlap", 400, ["--sweep", "goals", "seeds"]),
    Job("tp_layer", 200),
    Job("transformer_speedup", 200),
    Job("memory", 300, ranks=1),
    Job("cold_start", 600, ranks=1),
    Job("losses", 1200),
    Job("pretrain", 5400),
    Job("recipes", 2100),
)


def run(job: Job, gpus: int, factor: float, command: Sequence[str] | None = None) -> str:
    """Run one suite and say what became of it: "measured", "failed" with its exit code, or "out of
    time"."""
    environment = {**os.environ, **({"NPROC": str(job.ranks)} if job.ranks else {})}
    process = subprocess.Popen(
        command or job.command(gpus), cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        code = process.wait(job.seconds * factor)
        return "measured" if code == 0 else f"failed, exit code {code}"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left: a rank that stays would take time from the next suite."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, what)
        except ProcessLookupError:
            return
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def main(arguments: Sequence[str] | None = None, jobs: Sequence[Job] = SUITES) -> int:
    """Measure; 1 if a suite was not measured whole."""
    names = [job.suite for job in jobs]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SUITE", help=", ".join(names)
    )
    parser.add_argument(
        "--factor", type=float, default=1.0, help="of every time limit, for slower machines"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    chosen = [job for job in jobs if job.suite in options.only]
    if options.dry_run:
        for job in chosen:
            print(f"{job.seconds * options.factor:5.0f} s  {shlex.join(job.command(gpus))}")
        return 0
    if not gpus:
        print(
            "benchmarks: found no GPU; each suite's --help says how it is tried without one",
            file=sys.stderr,
        )
        return 1
    RESULTS.mkdir(exist_ok=True)
    states = []
    for job in chosen:
        print(f"== {job.suite}: {shlex.join(job.command(gpus))}", flush=True)
        started = time.monotonic()
        states.append((job, run(job, gpus, options.factor), time.monotonic() - started))
    print(
        "\n".join(f"{job.suite:20} {seconds:6.0f} s  {state}" for job, state, seconds in states),
        flush=True,
    )
    return int(any(state != "measured" for _, state, _ in states))


if __name__ == "__main__":
    sys.exit(main())
