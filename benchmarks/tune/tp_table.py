"""Write the table by which tensor parallelism chooses its backend, from measured results.

    python -m benchmarks.tune.tp_table benchmarks/results/tp_overlap.json [more.json ...]

For each case the fastest of our forms; an overlapped one must win by two percent, else NCCL and the
GEMM stay. What the host takes longer for than the GPU counts by the host's time: in a model it
would be waited for. Entries of other GPUs and numbers of ranks are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import read_results
from megatron_fluid.tensor_parallel.choice import TABLE, Entry, read_table

__all__ = ["entries_of", "main", "render"]

FORMS = {f"fluid_{name}": name for name in ("collective", "copy_engine", "fused")}
_MARGIN = 0.98


def entries_of(document: Mapping[str, Any]) -> list[Entry]:
    """The entries that a result file of tp_overlap gives."""
    cases: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        if row["variant"] in FORMS and row["mode"] == "forward":
            host_ms = (row["config"].get("host_us") or 0.0) / 1e3
            cases.setdefault(row["case"], {})[FORMS[row["variant"]]] = max(
                row["median_ms"], host_ms
            )
    entries = []
    for case, times in cases.items():
        if len(times) < 2 or "collective" not in times:
            continue
        kind, m, n, k = case.split("-")
        best = min(times, key=lambda name: times[name])
        if times[best] > _MARGIN * times["collective"]:
            best = "collective"
        operation = "gather" if kind == "ag" else "scatter"
        entries.append((document["gpu"], document["gpus"], operation, int(m), int(n), int(k), best))
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
    found = [entry for path in options.results for entry in entries_of(read_results(path))]
    table.update({entry[:6]: entry for entry in found})
    options.output.write_text(render(table.values()))
    print(f"{len(found)} cases read, {len(table)} entries in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
