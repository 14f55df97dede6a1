"""Timelines as a PNG, and as one self-contained HTML page: bars of one time axis, that its script
zooms."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from megatron_fluid.profiling.timeline import Lane, Timeline

__all__ = ["draw", "draw_picture", "page"]

# Kind of an event: its colour and what a legend calls it. Distinguishable in grey too: dark, light,
# middle, hatched, lightest.
KINDS = {
    "compute": ("#1f4e8c", "computation"),
    "communication": ("#f2a33a", "communication"),
    "other": ("#8a94a0", "other (copies, memset)"),
    "exposed": ("#c8321e", "exposed: nothing computes meanwhile"),
    "idle": ("#c9ced6", "host gap: nothing runs"),
}
_TICKS = 5
_MOST_BARS = 20_000


def draw(timelines: Sequence[Timeline], folder: Path, heading: str) -> list[Path]:
    """Write timeline.html and timeline.png; returns the paths written.

    Without matplotlib there is no PNG, and a message says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "timeline.html"]
    paths[0].write_text(page(timelines, heading), encoding="utf-8")
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


def page(timelines: Sequence[Timeline], heading: str) -> str:
    """The page, with its script and style; it loads nothing."""
    end = max((t.length for t in timelines), default=0.0) or 1.0
    used = {kind for t in timelines for lane in t.lanes for *_, kind, _ in lane.events}
    shown = {kind: words for kind, words in KINDS.items() if kind != "other" or kind in used}
    legend = "".join(
        f"<span><i class={kind}></i>{words}</span>" for kind, (_, words) in shown.items()
    )
    colours = (f".{kind} {{ background: {colour}; }}" for kind, (colour, _) in KINDS.items())
    return Template(_PAGE).substitute(
        heading=html.escape(heading), end=end, ticks=_TICKS, legend=legend,
        colours="\n".join(colours), variants="".join(_section(t, end) for t in timelines),
    )  # fmt: skip


def _section(timeline: Timeline, end: float) -> str:
    title, device = html.escape(timeline.title), html.escape(timeline.device)
    figures = "".join(
        f"<div><span>{html.escape(label)}</span><b>{html.escape(value)}</b></div>"
        for label, value in timeline.figures
    )
    lanes = "\n".join(_lane(lane, end) for lane in timeline.lanes)
    notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in timeline.notes)
    ticks = (f"<span>{end * i / _TICKS / 1e3:.2f} ms</span>" for i in range(_TICKS))  # no script
    axis = f"<div class=label></div><div class=ticks>{''.join(ticks)}</div>"
    return (
        f"<section><h2>{title} <small>{device}</small></h2>\n<div class=figures>{figures}</div>\n"
        f"{lanes}\n<div class=lane>{axis}</div>{notes}</section>\n"
    )


def _lane(lane: Lane, end: float) -> str:
    bars = "".join(
        f'<i class={kind} style="left:{100 * at / end:.5f}%;width:{100 * length / end:.5f}%" '
        f'title="{html.escape(event[:160])} — {length / 1e3:.3f} ms at {at / 1e3:.3f} ms '
        f'({KINDS[kind][1]})"></i>'
        for at, length, kind, event in lane.events
    )
    name, mark = html.escape(lane.name), " mark" if lane.name == "exposed communication" else ""
    label = f'<div class=label title="{name}">{name}</div>'
    return (
        f'<div class="lane{mark}">{label}<div class=track><div class=bars>{bars}</div></div></div>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$heading</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1b2733; margin: 24px auto;
  max-width: 1240px; padding: 0 20px; background: #fff; }
h1 { font-size: 21px; margin: 0 0 6px; } h2 { font-size: 16px; margin: 0; }
h2 small { font-weight: 400; color: #66727f; }
#legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 10px 0 16px; }
#legend i { display: inline-block; width: 22px; height: 12px; margin-right: 7px; }
section { border: 1px solid #dde2e8; border-radius: 8px; padding: 14px 16px; margin-bottom: 18px; }
.figures { display: flex; flex-wrap: wrap; gap: 8px 20px; margin: 8px 0 12px; }
.figures div { max-width: 100%; } .figures b { display: block; font-size: 13px; }
.figures span { color: #66727f; font-size: 11.5px; }
.lane { display: flex; align-items: center; min-height: 30px; }
.mark { border-top: 1px solid #dde2e8; margin-top: 4px; padding-top: 4px; }
.label { flex: 0 0 210px; font-size: 12px; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.track, .ticks { flex: 1 1 0; min-width: 0; overflow: hidden; }
.track { height: 24px; background: #f5f7f9; border-radius: 2px; cursor: crosshair; }
.bars { position: relative; height: 100%; }
.bars i { position: absolute; top: 2px; bottom: 2px; min-width: 0.6px; }
.ticks { display: flex; color: #66727f; font-size: 11px; }
.ticks span { flex: 1 1 0; border-left: 1px solid; padding-left: 3px; }
$colours
.exposed { background: repeating-linear-gradient(45deg, #c8321e 0 4px, #fff 4px 5.5px); }
.note, .help { color: #66727f; font-size: 12px; margin: 4px 0 0; overflow-wrap: anywhere; }
button { font: inherit; font-size: 12px; }
@media (max-width: 700px) {
  body { padding: 0 10px; margin: 12px auto; } section { padding: 10px; }
  .lane { display: block; height: auto; margin-top: 3px; }
}
@media print { button, .help { display: none; } * { print-color-adjust: exact; } }
</style></head><body>
<h1>$heading</h1>
<p class="help">Every lane has the same time axis. Wheel: zoom. Drag: move. Double click: all of it.
<button id="all">show all</button></p>
<div id="legend">$legend</div>
$variants
<script>
"use strict";
const END = $end, all = query => [...document.querySelectorAll(query)];
let view = [0, END], drag = null;
function show(from, to) {
  const span = Math.min(Math.max(to - from, END / 2e4), END);
  const begin = Math.min(Math.max(from, 0), END - span);
  view = [begin, begin + span];
  for (const bars of all(".bars")) {
    bars.style.width = 100 * END / span + "%";
    bars.style.marginLeft = -100 * begin / span + "%";
  }
  const digits = Math.max(0, 2 - Math.floor(Math.log10(span / 1e3)));
  for (const row of all(".ticks")) [...row.children].forEach((tick, i) => {
    tick.textContent = ((begin + span * i / $ticks) / 1e3).toFixed(digits) + " ms";
  });
}
for (const track of all(".track")) {
  track.addEventListener("wheel", e => {
    e.preventDefault();
    const box = track.getBoundingClientRect(), factor = Math.exp(e.deltaY * 0.002);
    const t = view[0] + (e.clientX - box.left) / box.width * (view[1] - view[0]);
    show(t - (t - view[0]) * factor, t + (view[1] - t) * factor);
  }, {passive: false});
  track.addEventListener("mousedown", e => { drag = [e.clientX, track.clientWidth, ...view]; });
  track.addEventListener("dblclick", () => show(0, END));
}
addEventListener("mousemove", e => {
  if (!drag) return;
  const moved = (drag[0] - e.clientX) / drag[1] * (drag[3] - drag[2]);
  show(drag[2] + moved, drag[3] + moved);
});
addEventListener("mouseup", () => { drag = null; });
document.getElementById("all").addEventListener("click", () => show(0, END));
show(0, END);
</script></body></html>
"""
