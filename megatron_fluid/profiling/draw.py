"""Timelines as one self-contained HTML page and as a PNG."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from megatron_fluid.profiling.page import COLOURS, PAGE
from megatron_fluid.profiling.timeline import Timeline

__all__ = ["draw", "draw_page", "draw_picture"]

_MOST_BARS = 20_000


def draw(timelines: Sequence[Timeline], folder: Path, heading: str) -> list[Path]:
    """Write timeline.html and timeline.png; returns the paths written.

    Without matplotlib there is no PNG, and a message says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [draw_page(timelines, folder / "timeline.html", heading)]
    try:
        paths.append(draw_picture(timelines, folder / "timeline.png", heading))
    except ImportError as error:
        print(f"no timeline.png: install matplotlib ({error})", flush=True)
    return paths


def draw_page(timelines: Sequence[Timeline], path: Path, heading: str) -> Path:
    """Write the page, which holds its script and style and loads nothing."""
    names: dict[str, int] = {}
    variants: list[dict[str, Any]] = []
    for timeline in timelines:
        lanes = []
        for lane in timeline.lanes:
            events = [
                [round(at, 1), round(length, 1), kind, names.setdefault(name[:160], len(names))]
                for at, length, kind, name in lane.events
            ]
            lanes.append({"name": lane.name, "events": events})
        exposed = ("exposed communication", timeline.exposed, "exposed")
        marks = (exposed, ("host gaps", timeline.idle, "idle"))
        for name, spans, kind in marks:
            word = names.setdefault(name, len(names))
            marked = [[round(b, 1), round(e - b, 1), kind, word] for b, e in spans]
            lanes.append({"name": name, "events": marked})
        variant: dict[str, Any] = {"title": timeline.title, "device": timeline.device}
        variant |= {"lanes": lanes}
        variant |= {"figures": timeline.figures, "notes": timeline.notes, "length": timeline.length}
        variants.append(variant)
    data = json.dumps({"names": list(names), "variants": variants}, separators=(",", ":"))
    filled = {"heading": html.escape(heading), "data": data.replace("</", "<\\/")}
    filled |= {f"colour_{name}": colour for name, colour in COLOURS.items()}
    path.write_text(Template(PAGE).substitute(filled))
    return path


def draw_picture(timelines: Sequence[Timeline], path: Path, heading: str) -> Path:
    """Write the PNG: a panel per variant, on one time axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(t.lanes) + 2 for t in timelines]
    figure = Figure(figsize=(8.5, 1.2 + sum(0.34 * h + 0.9 for h in heights)), layout="constrained")
    panels = figure.subplots(
        len(timelines), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    shown = ("trace", "step", "communication", "hidden share", "MFU")
    hatches = {"communication": "", "exposed": "xxxx"}
    for axis, timeline in zip(panels, timelines, strict=True):
        rows: list[tuple[str, list[tuple[float, float, str]]]] = [
            (lane.name, [(at, length, kind) for at, length, kind, _ in lane.events[:_MOST_BARS]])
            for lane in timeline.lanes
        ]
        rows.append(("exposed communication", [(b, e - b, "exposed") for b, e in timeline.exposed]))
        rows.append(("host gaps", [(b, e - b, "idle") for b, e in timeline.idle]))
        for place, (_, bars) in enumerate(rows):
            for kind, colour in COLOURS.items():
                spans = [(at / 1e3, length / 1e3) for at, length, k in bars if k == kind]
                axis.broken_barh(
                    spans,
                    (place - 0.36, 0.72),
                    facecolor=colour,
                    hatch=hatches.get(kind),
                    edgecolor="white" if kind == "exposed" else colour,
                    linewidth=0.0 if kind == "exposed" else 0.2,
                )
        axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=10)
        axis.set_ylim(len(rows) - 0.4, -0.6)
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
    words = {"idle": "host gap", "exposed": "exposed communication"}
    words |= {"compute": "computation", "other": "other (copies, memset)"}
    kinds = {kind for t in timelines for lane in t.lanes for *_, kind, _ in lane.events}
    patches = [
        Patch(facecolor=c, hatch=hatches.get(k), edgecolor="white", label=words.get(k, k))
        for k, c in COLOURS.items()
        if k != "other" or "other" in kinds
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9)
    figure.suptitle(textwrap.fill(heading, 80), fontsize=11)
    figure.savefig(path, dpi=110)
    return path
