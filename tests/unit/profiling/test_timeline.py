"""A trace as lanes: exposed and hidden communication, and the page and picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fluid.profiling.draw import draw_picture, page
from megatron_fluid.profiling.timeline import STEP, Timeline, read_timeline


def kernel(name: str, begin: float, length: float, stream: int) -> dict[str, Any]:
    args = {"device": 0, "stream": stream}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": length, "args": args}


def mark(begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": STEP, "ts": begin, "dur": length}


def a_trace(*more: dict[str, Any]) -> dict[str, Any]:
    """A GEMM of 100 us, and an all-to-all of 100 us that begins in the middle of it."""
    gemm = kernel("sm90_gemm_bf16", 1000.0, 100.0, 7)
    moved = kernel("ncclDevKernel_SendRecv", 1050.0, 100.0, 8)
    return {"traceEvents": [gemm, moved, *more], "deviceProperties": [{"name": "NVIDIA H200"}]}


def read(*more: dict[str, Any]) -> Timeline:
    return read_timeline(a_trace(*more), "with the package")


def test_communication_is_exposed_where_nothing_computes() -> None:
    timeline = read()
    assert timeline.length == pytest.approx(150.0)
    assert dict(timeline.figures)["hidden share"].startswith("50")
    lanes = {lane.name: [event[:3] for event in lane.events] for lane in timeline.lanes}
    assert lanes == {
        "stream 7": [(0.0, 100.0, "compute")],
        "stream 8": [(50.0, 100.0, "communication")],
        "exposed communication": [(100.0, 50.0, "exposed")],
        "host gaps": [],
    }


def test_threads_of_gloo_share_a_lane() -> None:
    def of_cpu(name: str, begin: float, thread: int, category: str) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": 50.0, "tid": thread}

    named = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": "pt_gloo_runloop"}}
        for tid in (5, 6)
    ]
    events = [
        of_cpu("aten::mm", 0.0, 1, "cpu_op"),
        of_cpu("gloo:all_to_all", 20.0, 5, "user_annotation"),
        of_cpu("gloo:all_to_all", 90.0, 6, "user_annotation"),
    ]
    timeline = read_timeline({"traceEvents": [*named, *events]}, "with the package")
    lanes = [(lane.name, len(lane.events)) for lane in timeline.lanes]
    assert lanes[:2] == [("main 0: computation", 1), ("gloo threads: communication", 2)]


def test_of_several_steps_the_one_of_median_length_is_read() -> None:
    late = kernel("sm90_gemm_bf16", 5000.0, 10.0, 7)
    marks = [mark(990.0, 200.0), mark(4000.0, 3000.0), mark(9000.0, 1.0)]
    assert read(late, *marks).length == pytest.approx(150.0)


def test_the_page_loads_nothing_and_shows_every_variant() -> None:
    timelines = [read(), read_timeline(a_trace(), "plain </script> all-to-all")]
    text = page(timelines, "One <layer>")
    assert "with the package" in text and "plain &lt;/script&gt; all-to-all" in text
    assert "One &lt;layer&gt;" in text
    assert "src=" not in text and "href=" not in text and "@import" not in text


def test_the_picture_is_a_png_with_a_panel_a_variant(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = draw_picture([read()], tmp_path / "one.png", "One").read_bytes()
    both = draw_picture([read(), read()], tmp_path / "both.png", "Both").read_bytes()
    assert one.startswith(b"\x89PNG") and both.startswith(b"\x89PNG")
    height = [int.from_bytes(data[20:24], "big") for data in (one, both)]
    assert height[1] > 1.4 * height[0]
