"""The picture of the benchmark of slow links: time against wire over compute, a line a variant, a
panel a case and mode. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.results import read_results

__all__ = ["compute_ms", "draw_slow_wire"]

_STYLES = {
    "fluid": {"color": "tab:green", "marker": "o", "linewidth": 2.2},
    "fluid_no_overlap": {"color": "tab:green", "marker": "o", "linestyle": ":"},
    "plain": {"color": "0.35", "marker": "s"},
    "megatron_alltoall": {"color": "tab:blue", "marker": "^"},
    "megatron_allgather": {"color": "tab:orange", "marker": "v"},
}


def draw_slow_wire(results: Path | str) -> Path:
    """Times as multiples of the computation, so that cases compare; written beside the results as
    PNG."""
    from matplotlib.figure import Figure

    document = read_results(results)
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        name = row["case"].rpartition("-wire-")[0]
        panels.setdefault((name, row["mode"]), []).append(row)
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.7 * columns, 3.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, ((name, mode), rows) in zip(axes, panels.items(), strict=False):
        compute = compute_ms(rows)
        for variant, style in _STYLES.items():
            points = sorted(
                (_ratio(row), row["median_ms"] / compute.get(_ratio(row), 1.0))
                for row in rows
                if row["variant"] == variant
            )
            if points:
                axis.plot(*zip(*points, strict=True), label=variant, markersize=4, **style)
        axis.axline((0, 1), (1, 2), color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(f"{name}, {mode}", fontsize=9)
        axis.set_xlabel("wire / compute", fontsize=8)
        axis.set_ylabel("time / compute", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=7)
    figure.suptitle("Hosts joined by a slow link (emulated, CPU ranks)", fontsize=10)
    path = Path(results).with_suffix(".png")
    figure.savefig(path, dpi=130)
    return path


def compute_ms(rows: list[dict[str, Any]]) -> dict[float, float]:
    """By wire over compute: what the plain form, else Megatron's, took without a limit just before
    that link was measured; where the row does not say, at the beginning. Empty where neither was
    measured: times are milliseconds then."""
    found: dict[float, float] = {}
    for name in ("megatron_alltoall", "plain"):
        of_name = {_ratio(row): row for row in rows if row["variant"] == name}
        for ratio, row in of_name.items():
            first = of_name[0.0]["median_ms"] if 0.0 in of_name else None
            compute = row["config"].get("unlimited_ms", first)
            if compute is not None:
                found[ratio] = compute
    return found


def _ratio(row: dict[str, Any]) -> float:
    return float(row["config"]["wire_over_compute"])
