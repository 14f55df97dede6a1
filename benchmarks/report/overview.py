"""The chart of README.md, from result files: `python -m benchmarks.report.overview` writes
docs/speedup.svg. Needs matplotlib."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.results import RESULTS, read_results

__all__ = ["CHART", "draw_overview"]

CHART = Path(__file__).resolve().parents[2] / "docs" / "speedup.svg"
_MEGATRON = ("megatron_te_alltoall", "megatron_te_allgather", "megatron_te_overlap_wgrad")


def draw_overview(results: Path | str = RESULTS / "moe_layer.json", chart: Path = CHART) -> Path:
    """Bars of one message: how long a training step of each model's MoE layer takes, Megatron's
    best and ours. Readable in grey: ours is dark, and every bar has its number."""
    import matplotlib
    from matplotlib.figure import Figure

    document = read_results(results)
    times: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        if row["mode"] == "train" and not row["case"].endswith("-zipf"):
            times.setdefault(row["case"], {})[row["variant"]] = row["median_ms"]
    cases = [case for case, found in times.items() if "fluid_megatron" in found]
    best = [min(times[case][name] for name in _MEGATRON if name in times[case]) for case in cases]
    ours = [times[case]["fluid_megatron"] for case in cases]
    matplotlib.rcParams["svg.hashsalt"] = "megatron_fluid"
    figure = Figure(figsize=(8, 0.6 + 0.72 * len(cases)), layout="constrained")
    axis = figure.subplots()
    places = range(len(cases))
    bars = axis.barh([p - 0.2 for p in places], best, 0.38, color="0.75", edgecolor="0.3")
    axis.bar_label(bars, [f" {ms:.1f} ms" for ms in best], fontsize=9)
    bars = axis.barh([p + 0.2 for p in places], ours, 0.38, color="tab:green", edgecolor="0.1")
    ratios = zip(ours, best, strict=True)
    axis.bar_label(
        bars, [f" {ms:.1f} ms, {b / ms:.1f} times as fast" for ms, b in ratios], fontsize=9
    )
    axis.set_yticks(list(places), cases)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * max(best))
    axis.spines[["top", "right"]].set_visible(False)
    device = document["gpu"].removeprefix("NVIDIA ")
    axis.set_xlabel(f"ms, forward and backward of an MoE layer, {document['gpus']} {device}")
    axis.legend(
        ["Megatron + Transformer Engine, its best", "with megatron_fluid"], loc="lower right"
    )
    figure.savefig(chart, metadata={"Date": None, "Creator": None})
    return chart


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(draw_overview())
