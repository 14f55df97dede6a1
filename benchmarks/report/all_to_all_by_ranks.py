"""The decode-time all-to-all at several numbers of ranks, one table; tests/bench_all_to_all.py
prints it, and says how it is started."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.all_to_all import SHAPES, TOKENS
from benchmarks.harness.launchers import NodeLaunch, RankLaunch, detect_launch
from benchmarks.harness.results import read_results
from benchmarks.suites import all_to_all as suite

ROOT = Path(__file__).resolve().parents[2]
_RIVALS = {
    "torch_ata": "Torch AtA",
    "nvshmem_ata": "NVSHMEM AtA",
    "deepep": "DeepEP",
    "nccl_ep": "NCCL EP",
}

__all__ = ["main", "table"]

Rows = Sequence[Mapping[str, Any]]


def table(measured: Mapping[int, Rows], shape: str, tokens: int, eager: bool) -> list[str]:
    """Lines of the table of one model shape and number of tokens a rank. `measured` are rows of
    result files by number of ranks, in the columns' order. `eager` shows each call by itself, not
    calls in a CUDA graph."""
    case = f"{shape}-{tokens}"
    cells: dict[str, dict[int, str]] = {}
    for mode in ("dispatch", "combine"):
        timed = f"{mode}_eager" if eager else mode
        for ranks, rows in measured.items():
            for row in (r for r in rows if (r["case"], r["mode"]) == (case, timed)):
                config = row["config"]
                if row["variant"] == "fluid":
                    label = f"{config['transport'].upper()} {mode.capitalize()}"
                elif row["variant"] in _RIVALS:
                    label = f"{_RIVALS[row['variant']]} {mode.capitalize()}"
                else:
                    continue
                cell = f"{config['mean_us']:.1f}μs ± {config['deviation_us']:4.1f}μs"
                cells.setdefault(label, {})[ranks] = cell
    rivals = set(_RIVALS.values())  # they come last
    order = sorted(cells, key=lambda label: label.rpartition(" ")[0] in rivals)
    unit = f"{tokens} tok per GPU"
    lines = [[unit, *(f"EP{ranks}" for ranks in measured)]]
    lines += [[label, *(cells[label].get(ranks, "x") for ranks in measured)] for label in order]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, [f":{'-' * (width - 2)}:" for width in widths])
    text = [" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return [f"{tokens} token{'s' * (tokens > 1)} per GPU:", "", *(f"| {line} |" for line in text)]


def _parser(words: str) -> argparse.ArgumentParser:
    gpus = torch.cuda.device_count()
    ranks = [n for n in (8, 4, 2) if n <= (gpus or 2)] or [1]
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.bench_all_to_all",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=ranks,
        help="numbers of ranks, a column each (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, nargs="+", choices=TOKENS, default=[1, 128] if gpus else [1],
        help="tokens a rank, a table each (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="r1" if gpus else "v2-lite", help="the model"
    )
    parser.add_argument(
        "--transports", nargs="+", default=["nvlink", "nccl"] if gpus else ["gloo"],
        metavar="NAME",
        help="names that AllToAll's transport takes, such as nvlink, nccl, nvshmem, nvlink+nccl "
        "(default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--iters", type=int, default=20 if gpus else 3, help="samples of a cell")
    parser.add_argument(
        "--eager", action="store_true", help="each call by itself, where CUDA graphs are timed else"
    )
    return parser


def _suite_words(options: argparse.Namespace, transport: str, output: Path) -> list[str]:
    words = ["--cases", *(f"{options.shape}-{tokens}" for tokens in options.tokens)]
    words += ["--iters", str(options.iters), "--transport", transport, "--output", str(output)]
    if not torch.cuda.is_available():
        words += ["--gemm", "64", "64", "64"]
    if transport != options.transports[0]:
        words += ["--no-torch-ata", "--no-nvshmem-ata"]  # measured beside the first
    return words


def _start(words: Sequence[str], launch: NodeLaunch | None, ranks: int) -> str:
    """Run the suite on `ranks` ranks of this host, or on this node's part of the job. Returns what
    went wrong: the last line that is an error, or ""."""
    where = ["--standalone", "--nproc_per_node", str(ranks)]
    if launch is not None:
        where = ["--nnodes", str(launch.world_size // launch.local_size)]
        where += ["--nproc_per_node", str(launch.local_size), "--node_rank", str(launch.node_rank)]
        where += ["--master_addr", launch.address, "--master_port", str(launch.port)]
    command = [sys.executable, "-m", "torch.distributed.run", *where]
    command += ["-m", "benchmarks.suites.all_to_all", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if "Error: " in line]
    return said[0].partition("]: ")[2] or said[0] if said else f"exit status {done.returncode}"


def _measure(
    options: argparse.Namespace, launch: NodeLaunch | None, folder: Path
) -> tuple[dict[int, Rows], list[str]]:
    """Rows by number of ranks, and a line for each column and transport that could not be had."""
    measured: dict[int, Rows] = {}
    absent: list[str] = []
    for ranks in [launch.world_size] if launch is not None else options.ranks:
        rows: list[Mapping[str, Any]] = []
        for transport in options.transports:
            output = folder / f"{ranks}-{transport}.json"
            reason = _start(_suite_words(options, transport, output), launch, ranks)
            if reason:
                absent.append(f"EP{ranks} {transport}: {reason}")
            elif output.exists():  # rank 0 wrote it, on its own node
                rows += read_results(output)["rows"]
        measured[ranks] = rows
    return measured, absent


def main(words: str, arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Exit status 1 if no cell was measured where the table is printed.

    Args:
        words: what --help says.
    """
    options = _parser(words).parse_args(arguments)
    launch = detect_launch()
    with tempfile.TemporaryDirectory() as temporary:
        if isinstance(launch, RankLaunch):
            if len(options.transports) > 1 and torch.cuda.is_available():
                options.transports = ["auto"]  # one process, one process group
            output = Path(temporary) / "rows.json"
            status = suite.main(_suite_words(options, options.transports[0], output))
            if status or launch.rank:
                return status
            measured: dict[int, Rows] = {launch.world_size: read_results(output)["rows"]}
            absent: list[str] = []
        else:
            measured, absent = _measure(options, launch, Path(temporary))
            if launch is not None and launch.node_rank and not absent:
                return 0
        print(f"{options.shape}, mean and deviation of the slowest rank", flush=True)
        for tokens in options.tokens:
            print("\n".join(["", *table(measured, options.shape, tokens, options.eager)]))
        print("\n".join(["", *absent]), flush=True)
    return 0 if any(measured.values()) else 1
