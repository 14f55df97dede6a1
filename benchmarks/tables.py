"""Result files as Markdown: the summary that the README shows, and benchmarks/results/README.md with everything.

`make readme` writes both, so that no figure in them is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, read_results

__all__ = ["FLOORS", "HIGHLIGHTS", "all_results", "summary", "summary_table"]

FLOORS = ("floor", "gemm_only")
"""Variants that do the computation alone."""

NOTHING = "Nothing yet: the kernels have changed since the last measurement, and its figures are not theirs."

HIGHLIGHTS = {
    "all_to_all": r"(r1|v2-?lite)-(1|32|128) (dispatch|combine)",
    "tp_overlap": r"(ag-8192-7168-8192|rs-8192-8192-7168) .*",
}
"""Suite -> "case mode" pattern of what the README shows; a suite without a pattern is shown whole."""


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.2f} ms" if milliseconds >= 1 else f"{1e3 * milliseconds:.1f} us"


def _by_case(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """(case, mode) -> variant -> row."""
    cases: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["mode"]), {})[row["variant"]] = row
    return cases


def summary_table(document: Mapping[str, Any], pattern: str = ".*") -> str:
    """One line for each case and mode that `fluid` was measured in: its median, over the floor's, and the best rival's over it.

    Args:
        document: as benchmarks.results.read_results gives it.
        pattern: which "case mode" lines to show, as a regular expression that matches them whole.
    """
    lines = []
    for (case, mode), variants in _by_case(document["rows"]).items():
        if "fluid" not in variants or not re.fullmatch(pattern, f"{case} {mode}"):
            continue
        ours = variants["fluid"]["median_ms"]
        floor = next((variants[name]["median_ms"] for name in FLOORS if name in variants), None)
        rivals = {
            name: row["median_ms"] for name, row in variants.items() if name[:5] != "fluid" and name not in FLOORS
        }
        best = min(rivals, key=lambda name: rivals[name], default=None)
        over_floor = "" if floor is None else f"{ours / floor:.2f}"
        cells = ["", ""] if best is None else [f"{best}: {_time(rivals[best])}", f"{rivals[best] / ours:.2f}"]
        lines.append([case, mode, _time(ours), over_floor, *cells])
    head = ["case", "mode", "fluid", "over the floor", "best other", "times faster"]
    return _markdown(head, lines) if lines else ""


def _markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _origin(document: Mapping[str, Any]) -> str:
    versions = f"torch {document['torch']}, Megatron-Core {document['megatron_core']}"
    versions += f", Transformer Engine {document['transformer_engine']}"
    return (
        f"`{document['command']}` on {document['gpus']} {document['gpu']}, {document['date'][:10]}, "
        f"commit {document['commit']}, {versions}."
    )


def _documents(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: read_results(path) for path in sorted(folder.glob("*.json"))}


def summary(folder: Path = RESULTS) -> str:
    """The README's part: for each result file where it comes from, and its summary."""
    parts = []
    for name, document in _documents(folder).items():
        table = summary_table(document, HIGHLIGHTS.get(document["suite"], ".*"))
        if table:
            parts.append(f"**{name}**: {_origin(document)}\n\n{table}")
    return "\n\n".join(parts) or NOTHING


def all_results(folder: Path = RESULTS) -> str:
    """Every row of every result file, as a page."""
    parts = [
        "# Results\n\nMedian of the slowest rank, with the tenth and ninetieth percentile; written by `make readme`."
    ]
    for name, document in _documents(folder).items():
        lines = []
        for row in document["rows"]:
            spread = f"{_time(row['p10_ms'])} to {_time(row['p90_ms'])}"
            lines.append([row["case"], row["mode"], row["variant"], _time(row["median_ms"]), spread, str(row["iters"])])
        head = ["case", "mode", "variant", "median", "p10 to p90", "samples"]
        parts.append(f"## {name}\n\n{_origin(document)}\n\n{_markdown(head, lines)}")
    if len(parts) == 1:
        parts.append(NOTHING)
    return "\n\n".join(parts) + "\n"
