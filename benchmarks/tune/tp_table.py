"""Write the table by which tensor parallelism chooses its backend, from measured results.

    python -m benchmarks.tune.tp_table benchmarks/results/tp_overlap-2gpu.json [more.json ...]

For each case the fastest overlapped form, if it takes two percent less than NCCL and the GEMM one
after the other as Megatron runs them, else these. What the host takes longer for than the GPU
counts by the host's time: in a model it would be waited for. Several files of the same GPUs count
by their mean. Entries of other GPUs and numbers of ranks are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import read_results
from megatron_fluid.tensor_parallel.choice import TABLE, Entry, read_table

__all__ = ["entries_of", "main", "render"]

FORMS = {f"fluid_{name}": name for name in ("copy_engine", "fused")}
_MARGIN = 0.98
_RIVAL = "torch"


def entries_of(documents: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The entries that result files of tp_overlap give.

    Raises:
        ValueError: no case has a time of NCCL and the GEMM beside one of every overlapped form.
    """
    cases: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for document in documents:
        for row in document["rows"]:
            if row["variant"] in (_RIVAL, *FORMS) and row["mode"] == "forward":
                ms = max(row["median_ms"], (row["config"].get("host_us") or 0.0) / 1e3)
                case = cases.setdefault((document["gpu"], document["gpus"], row["case"]), {})
                case.setdefault(row["variant"], []).append(ms)
    entries = []
    for (gpu, gpus, case_name), taken in cases.items():
        if not taken.keys() >= {_RIVAL, *FORMS}:
            continue
        means = {name: statistics.fmean(times) for name, times in taken.items()}
        best = min(FORMS, key=lambda name: means[name])
        wins = means[best] <= _MARGIN * means[_RIVAL]
        kind, *shape = case_name.split("-")
        m, n, k = map(int, shape)
        operation = "gather" if kind == "ag" else "scatter"
        entries.append((gpu, gpus, operation, m, n, k, FORMS[best] if wins else "collective"))
    if not entries:
        wanted = ", ".join((_RIVAL, *FORMS))
        raise ValueError(f"found no case, needed: one with forward rows of {wanted} (tp_overlap's)")
    return entries


def render(entries: Iterable[Entry]) -> str:
    """The table as JSON, one entry a line."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in sorted(entries))
    return f"[\n{lines}\n]\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the files' entries into the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="result files of tp_overlap")
    parser.add_argument("--output", type=Path, default=TABLE, help="default: the package's table")
    options = parser.parse_args(arguments)
    table = {entry[:6]: entry for entry in read_table()}
    try:
        found = entries_of([read_results(path) for path in options.results])
    except (OSError, ValueError) as error:
        parser.error(f"results: {error}")
    table.update({entry[:6]: entry for entry in found})
    options.output.write_text(render(table.values()))
    print(f"{len(found)} cases read, {len(table)} entries in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
