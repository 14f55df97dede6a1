"""The pages of `compare` and `profile` in a real browser, wide and as narrow as a telephone.

A script in a copy of the page turns the wheel, drags, and writes what it finds into the document.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid.profiling.compare_page import Comparison, Step, write_page
from megatron_fluid.profiling.draw import page
from megatron_fluid.profiling.timeline import read_timeline
from tests.unit.profiling.test_timeline import a_trace

_NAMES = "chromium-headless-shell chromium chromium-browser google-chrome chrome".split()
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(BROWSER is None, reason=f"none of these browsers is found: {_NAMES}"),
]

_BEFORE = """<head><script>
const found = {errors: []};
addEventListener("error", e => found.errors.push(e.message));
console.error = (...words) => found.errors.push(words.join(" "));
</script>"""
_AFTER = """<script>
addEventListener("load", () => {
  const leaves = [...document.querySelectorAll("body *")].filter(e => e.offsetParent !== null
    && !e.closest("svg, script") && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const boxes = leaves.map(e => {
    const text = document.createRange();
    text.selectNodeContents(e);
    return [e, e.getBoundingClientRect(), text.getBoundingClientRect()];
  });
  found.texts = leaves.length;
  found.overlaps = [];
  for (const [a, , p] of boxes) for (const [b, , q] of boxes)
    if (a !== b && !a.contains(b) && !b.contains(a) && p.left < q.right - 1 && q.left < p.right - 1
        && p.top < q.bottom - 1 && q.top < p.bottom - 1)
      found.overlaps.push([a.textContent, b.textContent]);
  found.smallest = Math.min(...leaves.map(e => parseFloat(getComputedStyle(e).fontSize)));
  found.wider = document.documentElement.scrollWidth - innerWidth;
  found.narrowest = Math.min(...[...document.querySelectorAll(".track, svg")]
    .map(e => e.getBoundingClientRect().width));
  const track = document.querySelector(".track");
  if (track) {
    const box = track.getBoundingClientRect(), middle = box.left + box.width / 2;
    const bar = track.querySelector("i"), at = () => bar.getBoundingClientRect().left - box.left;
    const fire = (name, x) =>
      track.dispatchEvent(new MouseEvent(name, {bubbles: true, clientX: x}));
    found.whole = [...view];
    found.bar = bar.title;
    found.at = [at()];
    track.dispatchEvent(new WheelEvent("wheel",
      {bubbles: true, cancelable: true, deltaY: -400, clientX: middle}));
    found.zoomed = [...view];
    found.at.push(at());
    fire("mousedown", middle);
    fire("mousemove", middle - box.width / 4);
    fire("mouseup", middle);
    found.moved = [...view];
    found.at.push(at());
    found.ticks = [...document.querySelectorAll(".ticks span")].slice(0, 2).map(e => e.textContent);
    fire("dblclick", middle);
    found.back = [...view];
  }
  const result = document.body.appendChild(document.createElement("pre"));
  result.id = "result";
  result.textContent = JSON.stringify(found);
});
</script></body>"""


def looked_at(page: Path, width: int) -> dict[str, Any]:
    """What the added script finds in a window of this width."""
    text = page.read_text()
    assert text.count("<head>") == text.count("</body>") == 1
    copy = page.with_name(f"checked-{width}.html")
    copy.write_text(text.replace("<head>", _BEFORE).replace("</body>", _AFTER))
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent}/user"]
    done = subprocess.run(
        [str(BROWSER), *words, f"--window-size={width},900", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-2000:]
    unescaped = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    result: dict[str, Any] = json.loads(unescaped)
    return result


def check_layout(found: dict[str, Any], width: int) -> None:
    assert found["errors"] == []
    assert found["texts"] > 10
    assert found["overlaps"] == []
    assert found["smallest"] >= 11
    assert found["wider"] <= 0
    assert found["narrowest"] > width / 3


@pytest.mark.parametrize("width", [1400, 420])
def test_a_timeline_can_be_read_zoomed_and_moved(tmp_path: Path, width: int) -> None:
    timelines = [read_timeline(a_trace(), name) for name in ("plain all-to-all", "megatron_fluid")]
    heading = "One MoE layer: 1.7 times as fast: 350 -> 206 ms a step, 77% hidden"
    (tmp_path / "timeline.html").write_text(page(timelines, heading))
    found = looked_at(tmp_path / "timeline.html", width)
    check_layout(found, width)
    begin, end = found["whole"]
    zoomed, moved = found["zoomed"], found["moved"]
    assert begin < zoomed[0] < zoomed[1] < end
    assert zoomed[0] < moved[0] and moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert found["back"] == found["whole"]
    # The first bar begins with the trace: it leaves to the left, and shows its name.
    assert found["at"][0] == 0 > found["at"][1] > found["at"][2]
    assert found["bar"] == "sm90_gemm_bf16 — 0.100 ms at 0.000 ms (computation)"
    first, second = (float(text.removesuffix(" ms")) for text in found["ticks"])
    assert first == pytest.approx(moved[0] / 1e3, abs=1e-3) and second > first


@pytest.mark.parametrize("width", [1400, 420])
def test_a_comparison_can_be_read(tmp_path: Path, width: int) -> None:
    pytest.importorskip("matplotlib")
    steps = {ms: [Step(i, ms, 10 / i, 2 / i) for i in range(1, 8)] for ms in (100.0, 50.0)}
    comparison = Comparison(
        off=steps[100.0], on=steps[50.0], again=steps[100.0], warm_up=2, tolerance=0.005,
        memory_mib=(512.0, 498.0), started=["megatron_fluid: " + "a long line of a log " * 9],
        command=["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *["--flag"] * 40],
    )  # fmt: skip
    check_layout(looked_at(write_page(comparison, tmp_path)[0], width), width)
