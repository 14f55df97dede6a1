"""Every picture of the results, from their files: `python -m benchmarks.report.pictures` draws all
of them anew. Needs matplotlib.

One picture has one message. Ours is dark and the others are light or dashed, so that they differ
in grey, and every bar or line stands in a legend.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.results import RESULTS, read_results
from benchmarks.report.descriptions import SUITES
from benchmarks.report.headline import compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CHART",
    "draw_all",
    "draw_exposed",
    "draw_later",
    "draw_losses",
    "draw_overview",
    "draw_pretrain",
]

CHART = Path(__file__).resolve().parents[2] / "docs" / "speedup.svg"
_OURS, _OTHERS = "#14532d", "0.78"  # dark green, light grey
_DASHES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("s", "^", "v", "D", "x")


def _device(document: Mapping[str, Any]) -> str:
    return f"{document['gpus']} {document['gpu'].removeprefix('NVIDIA ')}"


def _save(figure: Figure, path: Path) -> Path:
    if path.suffix == ".svg":
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    else:
        figure.savefig(path, dpi=150)
    return path


def _label(axis: Axes, x: str, y: str = "", size: int = 9) -> None:
    """Name an axis's directions, and leave out the frame above and beside it."""
    axis.set_xlabel(x, fontsize=size)
    axis.set_ylabel(y, fontsize=size)
    axis.tick_params(labelsize=size)
    axis.spines[["top", "right"]].set_visible(False)


def draw_overview(folder: Path = RESULTS, chart: Path = CHART) -> Path:
    """Bars of one message: how long a training iteration of each model takes, Megatron's best and
    with megatron_fluid."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = list(compared(folder))
    best = [line.megatron["median_ms"] for line in lines]
    ours = [line.fluid["median_ms"] for line in lines]
    words = [
        f"{n.case}, {n.where},\n{n.held}" + f", cuBLAS {n.cublas(n.pairs()[0])}" for n in lines
    ]
    matplotlib.rcParams["svg.hashsalt"] = "megatron_fluid"
    figure = Figure(figsize=(8, 0.8 + 0.66 * len(lines)), layout="constrained")
    axis = figure.subplots()
    places = range(len(lines))
    bars = axis.barh([p - 0.2 for p in places], best, 0.38, color=_OTHERS, edgecolor="0.3")
    axis.bar_label(bars, [f" {ms:.0f} ms" for ms in best], fontsize=9)
    bars = axis.barh([p + 0.2 for p in places], ours, 0.38, color=_OURS, edgecolor="0.1")
    words_of = [f" {ms:.0f} ms, {n.gain} times as fast" for ms, n in zip(ours, lines, strict=True)]
    axis.bar_label(bars, words_of, fontsize=9)
    axis.set_yticks(list(places), words)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * max(best))
    axis.spines[["top", "right"]].set_visible(False)
    dates = sorted({line.date for line in lines})
    axis.set_xlabel(
        f"ms, a training iteration in bf16, one sequence a microbatch, {' to '.join(dates)}"
    )
    names = ["Megatron + Transformer Engine, the fastest flags tried", "with megatron_fluid"]
    figure.legend(axis.containers, names, loc="outside upper center", ncols=2, frameon=False)
    return _save(figure, chart)


def draw_pretrain(results: Path | str, picture: Path | None = None) -> Path:
    """Draw tokens/s of whole training iterations, with Megatron and with megatron_fluid, and the
    spread of iterations; a row per model of which both were measured, else per model, of one
    sequence a microbatch where there are such. Beside them
    the losses of each variant's steps, which coincide. Written next to the results unless `picture`
    is given."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    document, suite = read_results(results), SUITES["pretrain"]
    plain = dict.fromkeys(("megatron", "fluid"), "without CUDA graphs")
    words = {**suite.others, **suite.ours, **plain}
    megatrons = {r["case"] for r in document["rows"] if r["variant"].startswith("megatron")}
    shown = [r for r in document["rows"] if r["config"].get("micro_batch_size", 1) == 1]
    cases = list(dict.fromkeys(row["case"] for row in shown or document["rows"]))
    cases = [case for case in cases if case in megatrons] or cases
    numbers = [sum(row["case"] == case for row in document["rows"]) for case in cases]
    heights = [1.0 + 0.62 * number for number in numbers]
    figure = Figure(figsize=(9.5, 0.8 + sum(heights)), layout="constrained")
    ratios_of = {"height_ratios": heights, "width_ratios": [2, 1]}
    panels = figure.subplots(len(cases), 2, squeeze=False, gridspec_kw=ratios_of)
    for (axis, losses), case in zip(panels, cases, strict=True):
        rows = [row for row in document["rows"] if row["case"] == case][::-1]
        rates = [row["config"]["tokens_per_s"] / 1e3 for row in rows]
        # tokens/s of the slow and of the fast iterations: the tokens are the same
        ratios = [(r["median_ms"] / r["p90_ms"], r["median_ms"] / r["p10_ms"]) for r in rows]
        low = [rate * (1 - slow) for rate, (slow, _) in zip(rates, ratios, strict=True)]
        high = [rate * (fast - 1) for rate, (_, fast) in zip(rates, ratios, strict=True)]
        colours = [_OURS if row["variant"].startswith("fluid") else _OTHERS for row in rows]
        names = [words.get(row["variant"], row["variant"].replace("_", " ")) for row in rows]
        names = [
            re.sub(r"^megatron(_fluid)? |,? without the checks .*", "", name) for name in names
        ]
        axis.barh(
            range(len(rows)),
            rates,
            xerr=[low, high],
            color=colours,
            edgecolor="0.1",
            error_kw={"linewidth": 1, "ecolor": "0.4"},
        )
        for place, (rate, more) in enumerate(zip(rates, high, strict=True)):
            axis.text(rate + more, place, f" {rate:,.1f}", va="center", fontsize=9)
        axis.set_yticks(range(len(rows)), [textwrap.fill(name, 30) for name in names])
        axis.set_xlim(0, 1.2 * max(map(sum, zip(rates, high, strict=True))))
        layers = rows[0]["config"]["layers"]
        axis.set_title(f"{case}, {layers} layer{'s' if layers > 1 else ''}", fontsize=10)
        _label(axis, "thousand tokens/s (line: p10 to p90)")
        for row in rows:  # Megatron's losses broad, megatron_fluid's thin above them
            steps = range(1, len(row["config"]["losses"]) + 1)
            fluid = row["variant"].startswith("fluid")
            style = (
                {"color": _OURS, "lw": 1.0, "zorder": 3} if fluid else {"color": _OTHERS, "lw": 3.5}
            )
            losses.plot(steps, row["config"]["losses"], **style)
        _label(losses, "step", "loss, nats a token")
    figure.suptitle(
        f"Training iterations through Megatron's loop, {_device(document)}", fontsize=10
    )
    figure.legend(
        handles=[Patch(fc=_OTHERS, ec="0.1"), Patch(fc=_OURS, ec="0.1")],
        labels=["Megatron", "with megatron_fluid"],
        loc="outside lower center",
        ncols=2,
        fontsize=9,
    )
    return _save(figure, picture or Path(results).with_suffix(".png"))


def draw_exposed(results: Path | str, picture: Path | None = None) -> Path:
    """Draw how much longer than its GEMM a linear under tensor parallelism takes, with
    megatron_fluid and with each rival, by the number of rows. A panel for each shape of which the
    summary shows several; without any of those, for each shape. Written next to the results
    unless `picture` is given."""
    from matplotlib.figure import Figure

    document, suite = read_results(results), SUITES["tp_overlap"]
    words = {**suite.others, "fluid": "megatron_fluid"}
    shown = re.compile(suite.shown(document["gpus"]))
    rows = [row for row in document["rows"] if row["variant"] in words]
    rows = [r for r in rows if shown.fullmatch(f"{r['case']} {r['mode']}")] or rows
    panels: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        operation, m, n, k = row["case"].split("-")
        lines = panels.setdefault((operation, f"N {n}, K {k}"), {})
        lines.setdefault(row["variant"], []).append((int(m), row["config"]["exposed_ms"]))
    several = {name: lines for name, lines in panels.items() if max(map(len, lines.values())) > 1}
    panels = several or panels
    styles: dict[str, dict[str, Any]] = {
        name: {"color": f"{0.25 + 0.1 * i}", "linestyle": dash, "marker": marker, "linewidth": 1.2}
        for i, (name, dash, marker) in enumerate(zip(words, _DASHES, _MARKERS, strict=False))
    }
    styles["fluid"] = {"color": _OURS, "linewidth": 2.5, "marker": "o"}
    columns = min(2, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * height + 0.7), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    drawn: dict[str, Any] = {}
    for axis, ((operation, shape), lines) in zip(axes.flat, sorted(panels.items()), strict=False):
        for name in filter(lines.get, words):
            points = zip(*sorted(lines[name]), strict=True)
            [drawn[words[name]]] = axis.plot(*points, markersize=4, **styles[name])
        axis.set_xscale("log", base=2)
        heading = "AllGather-GEMM" if operation == "ag" else "GEMM-ReduceScatter"
        axis.set_title(f"{heading}, {shape} on each GPU", fontsize=9)
        _label(axis, "M (rows)", "ms longer than the GEMM alone", 8)
        axis.axhline(0, color="0.6", linewidth=0.5)
    figure.suptitle(f"Communication that is not hidden, {_device(document)}", fontsize=10)
    figure.legend(
        drawn.values(), drawn, loc="outside lower center", ncols=3, fontsize=8, handlelength=3.5
    )
    return _save(figure, picture or Path(results).with_suffix(".png"))


def draw_losses(results: Path | str, picture: Path | None = None) -> Path:
    """Draw the losses of whole runs, with Megatron and with megatron_fluid, which coincide; in the
    second panel how far each is from Megatron's of the same seed, bf16 from bf16 and fp8 from fp8,
    over 20 iterations, beside what another seed changes. Written next to the results unless
    `picture` is given."""
    from matplotlib.figure import Figure

    document, suite = read_results(results), SUITES["losses"]
    words = {**suite.others, **suite.ours, "fluid": "megatron_fluid, bf16"}
    curves = {row["variant"]: row["config"]["losses"] for row in document["rows"]}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (variant, seeds) in enumerate(curves.items()):
        ours = variant.startswith("fluid")
        dash = "-" if ours else _DASHES[place % len(_DASHES)]
        colour = (_OURS if variant == "fluid" else "#65a30d") if ours else "0.35"
        label = words.get(variant, variant)
        left.plot(range(1, len(seeds[0]) + 1), seeds[0], dash, color=colour, lw=1.2, label=label)
        base = curves.get(variant.replace("fluid", "megatron"))
        if ours and base is not None:
            apart = _smooth([a - b for a, b in zip(seeds[0], base[0], strict=True)])
            right.plot(range(1, len(apart) + 1), apart, dash, color=colour, lw=1.2, label=label)
        if not ours and len(seeds) > 1:
            apart = _smooth([a - b for a, b in zip(seeds[1], seeds[0], strict=True)])
            words_of = f"{label}, another seed"
            right.plot(range(1, len(apart) + 1), apart, dash, color="0.6", lw=1, label=words_of)
    _label(left, "iteration", "loss, nats a token")
    _label(right, "iteration", "difference, mean of 20 iterations")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.suptitle(f"Losses of training runs on real text, {_device(document)}", fontsize=10)
    return _save(figure, picture or Path(results).with_suffix(".png"))


def _smooth(values: Sequence[float], over: int = 20) -> list[float]:
    """Means of windows, one for each place that has a whole window before it; of all values where
    there are fewer."""
    over = min(over, len(values))
    return [sum(values[i : i + over]) / over for i in range(len(values) - over + 1)]


def draw_later(draw: Callable[[], Path], command: str) -> None:
    """Draw, or where matplotlib is missing say by which command it is done elsewhere."""
    try:
        print(f"picture: {draw()}", flush=True)
    except ImportError as error:
        print(f"no picture ({error}); where matplotlib is, draw it with: {command}")


def draw_all(results: Path = RESULTS, folder: Path = CHART.parent) -> list[Path]:
    """The chart of README.md and the pictures of docs/results.md, from the result files."""
    drawn = [draw_overview(results, folder / CHART.name)]
    for draw, name, picture in (
        (draw_pretrain, "pretrain-1gpu.json", "pretrain.png"),
        (draw_exposed, "tp_overlap.json", "tp_overlap.png"),
    ):
        if (results / name).is_file():
            drawn.append(draw(results / name, folder / picture))
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    print(*draw_all(), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
