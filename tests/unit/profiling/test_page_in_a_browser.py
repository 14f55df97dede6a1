"""The page of a profile, opened by a browser: what is drawn, and what its document says."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid.profiling.draw import draw_page
from megatron_fluid.profiling.page import COLOURS
from megatron_fluid.profiling.timeline import Timeline, read_timeline
from tests.unit.profiling.test_timeline import a_trace, kernel

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
WIDTH, HEIGHT = 1280, 1000


def timelines() -> list[Timeline]:
    """Two variants of 0.15 and 0.29 ms: a GEMM, an all-to-all, and what only one of them has."""
    stated = {"In msg nelems": 50_000_000, "dtype": "BFloat16"}
    moved = kernel("ncclDevKernel_SendRecv", 1160.0, 100.0, 8)
    moved["args"] |= stated
    late = kernel("sm90_gemm_bf16", 1280.0, 10.0, 7)
    facts: dict[str, Any] = {"megatron_fluid": {"flops": 98.94e9, "dtype": "bfloat16"}}
    plain = read_timeline({**a_trace(moved, late), **facts}, "plain all-to-all")
    return [plain, read_timeline(a_trace(), "megatron_fluid")]


def browse(folder: Path, *flags: str) -> str:
    """What chromium prints."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'user'}", "--virtual-time-budget=2000", *flags]
    page = (folder / "timeline.html").as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    draw_page(timelines(), found / "timeline.html", "One MoE layer")
    return found


def test_the_document_names_lanes_marks_and_figures(folder: Path) -> None:
    document = browse(folder, "--dump-dom").partition('<script type="application/json"')
    sections = re.findall(r"<section.*?</section>", document[0], flags=re.DOTALL)
    assert len(sections) == 2, "a section a variant, made by the page's script"
    said = [html.unescape(re.sub(r"<[^>]*>", "\n", section)) for section in sections]
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in said]
    assert lines[0][:2] == ["plain all-to-all", "NVIDIA H200"]
    assert lines[1][:2] == ["megatron_fluid", "NVIDIA H200"]
    for found in lines:
        lanes = ["stream 7", "stream 8", "exposed communication", "host gaps"]
        assert [line for line in found if line in lanes][-4:] == lanes
    shown = lines[0][2 : lines[0].index("stream 7")]
    figures = dict(zip(shown[::2], shown[1::2], strict=True))
    assert figures["hidden share"] == "25.0%"
    assert figures["sent by this rank"] == "100.00 MB"
    # Over the all-to-all whose bytes are stated; the other's 0.1 ms would halve it.
    assert figures["rate"] == "1,000.00 GB/s"
    assert figures["MFU"].startswith("34.5% of 989.4")
    assert figures["host gaps"].startswith("2, 0.03 ms in all")
    legend = re.findall(r'class="entry">.*?</i>([^<]*)', document[0])
    assert legend[:2] == ["computation", "communication"]
    assert [word.split(":")[0] for word in legend[2:]] == ["exposed", "host gap"]


def test_the_screenshot_shows_every_colour_on_one_time_axis(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = folder / "shot.png"
    browse(folder, f"--screenshot={shot}", f"--window-size={WIDTH},{HEIGHT}")
    picture = image.open(shot).convert("RGB")
    assert picture.size == (WIDTH, HEIGHT)
    counts = {colour: count for count, colour in picture.getcolors(WIDTH * HEIGHT)}
    for kind, colour in COLOURS.items():
        rgb = tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
        if kind != "other":
            assert counts.get(rgb, 0) > 500, f"{kind} is not drawn"
    # A GEMM of 100 us at the begin of each variant: as wide in the shorter one.
    blue = tuple(int(COLOURS["compute"][at : at + 2], 16) for at in (1, 3, 5))
    rows = [sum(picture.getpixel((x, y)) == blue for x in range(WIDTH)) for y in range(180, HEIGHT)]
    bars = sorted({width for width in rows if width > 100})
    assert bars and bars[-1] < 1.25 * bars[0]


def test_kinds_differ_in_grey_print() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    assert abs(grey(COLOURS["compute"]) - grey(COLOURS["communication"])) > 80
