"""The benchmarks' pictures: drawn from result files and traces, and different where the figures
are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.report.pictures import draw_all
from benchmarks.report.timeline import draw_timeline


def test_one_command_draws_the_pictures_of_the_pages(tmp_path: Path) -> None:
    drawn = {path.name: path for path in draw_all(folder=tmp_path)}
    assert all(path.stat().st_size > 10_000 for path in drawn.values())
    chart = drawn["speedup.svg"].read_text()
    assert "<!-- deepseek-v3 -->" in chart
    assert "<!-- with megatron_fluid -->" in chart  # the legend
    root = Path(__file__).resolve().parents[3]
    pages = (root / "README.md").read_text() + (root / "docs" / "results.md").read_text()
    assert all(f"{name})" in pages and (root / "docs" / name).exists() for name in drawn)


def test_a_timeline_is_drawn_for_each_region_of_a_trace(tmp_path: Path) -> None:
    def event(
        name: str, category: str, begin: float, length: float, stream: int
    ) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": length, "tid": stream}

    trace = tmp_path / "trace.json"
    events = [event("fluid", "user_annotation", 0, 100, 1), event("gemm", "kernel", 10, 50, 7)]
    pictures = []
    for more in ([], [event("Memcpy PtoP", "gpu_memcpy", 20, 30, 8)]):
        trace.write_text(json.dumps({"traceEvents": events + more}))
        pictures.append(draw_timeline(trace).read_bytes())
    assert pictures[0] != pictures[1]
    with pytest.raises(ValueError, match="absent"):
        draw_timeline(trace, ["absent"])
