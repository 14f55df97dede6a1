"""Timelines as one self-contained HTML page and as a PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fluid.profiling.page import KINDS, page
from megatron_fluid.profiling.timeline import Timeline

__all__ = ["draw", "draw_picture"]

_MOST_BARS = 20_000


def draw(timelines: Sequence[Timeline], folder: Path, heading: str) -> list[Path]:
    """Write timeline.html and timeline.png; returns the paths written.

    Without matplotlib there is no PNG, and a message says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "timeline.html"]
    paths[0].write_text(page(timelines, heading))
    try:
        paths.append(draw_picture(timelines, folder / "timeline.png", heading))
    except ImportError as error:
        print(f"no timeline.png: install matplotlib ({error})", flush=True)
    return paths


def draw_picture(timelines: Sequence[Timeline], path: Path, heading: str) -> Path:
    """Write the PNG: a panel per variant, on one time axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(t.lanes) for t in timelines]
    figure = Figure(figsize=(8.5, 1.2 + sum(0.34 * h + 0.9 for h in heights)), layout="constrained")
    panels = figure.subplots(
        len(timelines), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    shown = ("trace", "step", "communication", "hidden share", "MFU")
    styles: dict[str, dict[str, Any]] = {
        kind: {"facecolor": colour, "edgecolor": colour, "linewidth": 0.2}
        for kind, (colour, _) in KINDS.items()
    }
    styles["exposed"] |= {"hatch": "xxxx", "edgecolor": "white", "linewidth": 0.0}
    for axis, timeline in zip(panels, timelines, strict=True):
        for place, lane in enumerate(timeline.lanes):
            for kind, style in styles.items():
                bars = [
                    (at / 1e3, s / 1e3) for at, s, k, _ in lane.events[:_MOST_BARS] if k == kind
                ]
                axis.broken_barh(bars, (place - 0.36, 0.72), **style)
        axis.set_yticks(range(len(timeline.lanes)), [x.name for x in timeline.lanes], fontsize=10)
        axis.set_ylim(len(timeline.lanes) - 0.4, -0.6)
        axis.tick_params(axis="x", labelsize=10)
        axis.grid(axis="x", color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
        facts = "   ".join(
            f"{label} {value}"
            for label, value in timeline.figures
            if label.split()[-1] == "steps" or label in shown
        )
        title = f"{timeline.title} ({timeline.device})\n{facts}"
        axis.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlim(0, max(t.length for t in timelines) / 1e3 * 1.005)
    panels[-1].set_xlabel("milliseconds from the beginning of the step", fontsize=10)
    seen = {kind for t in timelines for lane in t.lanes for *_, kind, _ in lane.events}
    patches = [
        Patch(**styles[kind], label=words)
        for kind, (_, words) in KINDS.items()
        if kind != "other" or kind in seen
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(textwrap.fill(heading, 80), fontsize=11)
    figure.savefig(path, dpi=110)
    return path
