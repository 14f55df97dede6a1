"""The picture of the end-to-end benchmark: tokens/s of every variant, a panel a model. Needs
matplotlib."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.results import read_results

__all__ = ["draw_pretrain"]


def draw_pretrain(results: Path | str) -> Path:
    """Horizontal bars of tokens/s with the spread of iterations; written beside the results as
    PNG."""
    from matplotlib.figure import Figure

    document = read_results(results)
    cases = list(dict.fromkeys(row["case"] for row in document["rows"]))
    most = max(sum(row["case"] == case for row in document["rows"]) for case in cases)
    figure = Figure(figsize=(4.6 * len(cases), 0.8 + 0.42 * most), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axis, case in zip(panels, cases, strict=True):
        rows = [row for row in document["rows"] if row["case"] == case][::-1]
        rates = [row["config"]["tokens_per_s"] / 1e3 for row in rows]
        # tokens/s of the slow and of the fast iterations: the tokens are the same
        low = [
            r * (1 - row["median_ms"] / row["p90_ms"]) for r, row in zip(rates, rows, strict=True)
        ]
        high = [
            r * (row["median_ms"] / row["p10_ms"] - 1) for r, row in zip(rates, rows, strict=True)
        ]
        ours = ["tab:green" if row["variant"].startswith("fluid") else "tab:gray" for row in rows]
        names = [row["variant"] for row in rows]
        bars = axis.barh(names, rates, xerr=[low, high], color=ours, error_kw={"linewidth": 1})
        labels = [f" {rate:,.1f}" for rate in rates]
        axis.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
        config = rows[0]["config"]
        axis.set_title(f"{case}, {config['layers']} layers", fontsize=9)
        axis.set_xlabel("thousand tokens/s (bar: 10th to 90th percentile)", fontsize=8)
        axis.tick_params(labelsize=8)
    device = document["gpu"].removeprefix("NVIDIA ")
    figure.suptitle(
        f"Pretraining through Megatron's loop, {document['gpus']} x {device}: "
        "megatron_fluid green, Megatron grey",
        fontsize=10,
    )
    path = Path(results).with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path
