"""Template (`string.Template`) of the page that shows timelines, with its script and style."""

__all__ = ["KINDS", "PAGE"]

# Kind of an event: its colour and what a legend calls it. Distinguishable in grey too: dark, light,
# middle, hatched, lightest.
KINDS = {
    "compute": ("#1f4e8c", "computation"),
    "communication": ("#f2a33a", "communication"),
    "other": ("#8a94a0", "other (copies, memset)"),
    "exposed": ("#c8321e", "exposed: nothing computes meanwhile"),
    "idle": ("#c9ced6", "host gap: nothing runs"),
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$heading</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1b2733; margin: 24px auto;
  max-width: 1240px; padding: 0 20px; background: #fff; }
h1 { font-size: 21px; margin: 0 0 6px; } h2 { font-size: 16px; margin: 0; }
h2 small { font-weight: 400; color: #66727f; }
#legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 10px 0 16px; }
#legend i { display: inline-block; width: 22px; height: 12px;
  margin-right: 7px; border-radius: 2px; }
.variant { border: 1px solid #dde2e8; border-radius: 8px; padding: 14px 16px; margin-bottom: 18px; }
.figures { display: flex; flex-wrap: wrap; gap: 8px 20px; margin: 8px 0 12px; }
.figures div { max-width: 100%; } .figures b { display: block; font-size: 13px; }
.figures span { color: #66727f; font-size: 11.5px; }
.lane { display: flex; align-items: center; height: 30px; }
.lane.first-mark { border-top: 1px solid #dde2e8; margin-top: 4px; padding-top: 4px; }
.label { flex: 0 0 210px; font-size: 12px; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
canvas { flex: 1 1 0; min-width: 0; height: 24px; background: #f5f7f9; border-radius: 2px; }
.axis canvas { background: none; cursor: default; } .lane canvas { cursor: crosshair; }
.note, .help { color: #66727f; font-size: 12px; margin: 4px 0 0; overflow-wrap: anywhere; }
#tip { position: fixed; display: none; pointer-events: none; background: #1b2733; color: #fff;
  padding: 5px 9px; border-radius: 4px; font-size: 12px; max-width: min(460px, 92vw);
  overflow-wrap: anywhere; }
button { font: inherit; font-size: 12px; }
@media (max-width: 700px) {
  body { padding: 0 10px; margin: 12px auto; } .variant { padding: 10px; }
  .lane { display: block; height: auto; margin-top: 3px; } .lane canvas { width: 100%; }
  .axis .label { display: none; }
}
@media print { button, .help { display: none; } * { print-color-adjust: exact; } }
</style></head><body>
<h1>$heading</h1>
<p class="help">Every lane has the same time axis. Wheel: zoom. Drag: move. Double click: all of it.
<button id="all">show all</button></p>
<div id="legend"></div><div id="variants"></div><div id="tip"></div>
<script type="application/json" id="data">$data</script>
<script>
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const END = Math.max(...DATA.variants.map(v => v.length), 1);
let view = [0, END];
const surfaces = [], axes = [], tip = document.getElementById("tip");
function make(parent, tag, cls, text) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  parent.appendChild(e);
  return e;
}
const fill = k => k === "exposed" ?
  `repeating-linear-gradient(45deg,$${DATA.kinds[k][0]} 0 4px,#fff 4px 5.5px)` : DATA.kinds[k][0];
const used = new Set(DATA.variants.flatMap(v => v.lanes.flatMap(l => l.events.map(e => e[2]))));
for (const kind of Object.keys(DATA.kinds)) if (kind !== "other" || used.has(kind)) {
  const entry = make(document.getElementById("legend"), "span", "entry");
  make(entry, "i").style.background = fill(kind);
  entry.append(DATA.kinds[kind][1]);
}
for (const variant of DATA.variants) {
  const box = make(document.getElementById("variants"), "section", "variant");
  const head = make(box, "h2", "", variant.title + " ");
  make(head, "small", "", variant.device);
  const figures = make(box, "div", "figures");
  for (const [label, value] of variant.figures) {
    const figure = make(figures, "div");
    make(figure, "span", "", label);
    make(figure, "b", "", value);
  }
  for (const lane of variant.lanes) {
    const mark = lane.name === "exposed communication" ? " first-mark" : "";
    const row = make(box, "div", "lane" + mark);
    const label = make(row, "div", "label", lane.name);
    label.title = lane.name;
    surfaces.push([make(row, "canvas"), lane.events]);
  }
  const row = make(box, "div", "lane axis");
  make(row, "div", "label", "");
  axes.push(make(row, "canvas"));
  for (const note of variant.notes) make(box, "p", "note", note);
}
function ready(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = 24;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  return [g, width, height];
}
const hatch = (() => {
  const c = document.createElement("canvas");
  c.width = c.height = 6;
  const g = c.getContext("2d");
  g.fillStyle = DATA.kinds.exposed[0];
  g.fillRect(0, 0, 6, 6);
  g.strokeStyle = "#fff";
  g.beginPath();
  g.moveTo(0, 6);
  g.lineTo(6, 0);
  g.stroke();
  return c;
})();
function paint() {
  const [from, to] = view;
  for (const [canvas, events] of surfaces) {
    const [g, width, height] = ready(canvas), scale = width / (to - from);
    for (const [at, length, kind] of events) {
      if (at > to || at + length < from) continue;
      g.fillStyle = kind === "exposed" ? g.createPattern(hatch, "repeat") : DATA.kinds[kind][0];
      g.fillRect((at - from) * scale, 2, Math.max(length * scale, 0.6), height - 4);
    }
  }
  let step = Math.pow(10, Math.floor(Math.log10(to - from)));
  if ((to - from) / step < 2.5) step /= 5;
  else if ((to - from) / step < 5) step /= 2;
  const digits = Math.max(0, 3 - Math.floor(Math.log10(step) + 1e-9));
  for (const canvas of axes) {
    const [g, width] = ready(canvas), scale = width / (to - from);
    g.fillStyle = g.strokeStyle = "#66727f";
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    let free = 0;
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = (t - from) * scale, text = (t / 1e3).toFixed(digits) + " ms";
      const room = g.measureText(text).width, at = Math.min(x + 3, width - room);
      g.fillRect(x, 0, 1, 5);
      if (at < free) continue;
      g.fillText(text, at, 15);
      free = at + room + 8;
    }
  }
}
function limit(from, to) {
  const span = Math.min(Math.max(to - from, 1), END);
  const begin = Math.min(Math.max(from, 0), END - span);
  view = [begin, begin + span];
  requestAnimationFrame(paint);
}
let drag = null;
for (const [canvas, events] of surfaces) {
  const time = e => view[0] + (e.offsetX / canvas.clientWidth) * (view[1] - view[0]);
  canvas.addEventListener("wheel", e => {
    e.preventDefault();
    const factor = Math.exp(e.deltaY * 0.002), t = time(e);
    limit(t - (t - view[0]) * factor, t + (view[1] - t) * factor);
  }, {passive: false});
  canvas.addEventListener("mousedown", e => { drag = [e.clientX, ...view, canvas.clientWidth]; });
  canvas.addEventListener("dblclick", () => limit(0, END));
  canvas.addEventListener("mousemove", e => {
    const t = time(e), near = 2 * (view[1] - view[0]) / canvas.clientWidth;
    let found = null;
    for (const event of events)
      if (t >= event[0] - near && t <= event[0] + event[1] + near &&
          (!found || event[1] < found[1])) found = event;
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    const [at, length, kind, name] = found;
    tip.textContent = `$${DATA.names[name]} — $${(length / 1e3).toFixed(3)} ms at ` +
      `$${(at / 1e3).toFixed(3)} ms ($${DATA.kinds[kind][1]})`;
    tip.style.left = Math.max(Math.min(e.clientX + 14, innerWidth - 480), 4) + "px";
    tip.style.top = e.clientY + 16 + "px";
  });
  canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}
addEventListener("mousemove", e => {
  if (!drag) return;
  const moved = (drag[0] - e.clientX) / drag[3] * (drag[2] - drag[1]);
  limit(drag[1] + moved, drag[2] + moved);
});
addEventListener("mouseup", () => { drag = null; });
addEventListener("resize", paint);
document.getElementById("all").addEventListener("click", () => limit(0, END));
paint();
</script></body></html>
"""
