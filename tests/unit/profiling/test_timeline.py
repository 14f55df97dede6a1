"""A trace as lanes: exposed and hidden communication, and the page and picture of it."""

import functools
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid.errors import ConfigError
from megatron_fluid.profiling import traces
from megatron_fluid.profiling.draw import draw, draw_picture, page
from megatron_fluid.profiling.timeline import STEP, Timeline, read_timeline


def _event(
    name: str, category: str, begin: float, end: float, thread: int = 0, **args: int
) -> dict[str, Any]:
    span = {"ts": begin, "dur": end - begin, "tid": thread}
    return {"ph": "X", "name": name, "cat": category, **span, "args": {"device": 0, **args}}


def a_trace(*more: dict[str, Any]) -> dict[str, Any]:
    """A GEMM of 100 us, and an all-to-all of 100 us that begins in the middle of it."""
    gemm = _event("sm90_gemm_bf16", "kernel", 1000.0, 1100.0, stream=7)
    moved = _event("ncclDevKernel_SendRecv", "kernel", 1050.0, 1150.0, stream=8)
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
    named = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": "pt_gloo_runloop"}}
        for tid in (5, 6)
    ]
    events = [
        _event("aten::mm", "cpu_op", 0.0, 50.0, 1),
        _event("gloo:all_to_all", "user_annotation", 20.0, 70.0, 5),
        _event("gloo:all_to_all", "user_annotation", 90.0, 140.0, 6),
    ]
    timeline = read_timeline({"traceEvents": [*named, *events]}, "with the package")
    lanes = [(lane.name, len(lane.events)) for lane in timeline.lanes]
    assert lanes[:2] == [("main 0: computation", 1), ("gloo threads: communication", 2)]


def test_of_several_steps_the_one_of_median_length_is_read() -> None:
    late = _event("sm90_gemm_bf16", "kernel", 5000.0, 5010.0, stream=7)
    spans = (990.0, 1190.0), (4000.0, 7000.0), (9000.0, 9001.0)
    marks = [_event(STEP, "user_annotation", *span) for span in spans]
    assert read(late, *marks).length == pytest.approx(150.0)


def test_the_page_loads_nothing_and_shows_every_variant() -> None:
    timelines = [read(), read_timeline(a_trace(), "plain </script> all-to-all")]
    text = page(timelines, "One <layer>")
    assert "with the package" in text and "plain &lt;/script&gt; all-to-all" in text
    assert "One &lt;layer&gt;" in text
    assert "src=" not in text and "href=" not in text and "@import" not in text


def test_pages_are_utf_8_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_by_default = functools.partialmethod(Path.write_text, encoding="ascii")
    monkeypatch.setattr(Path, "write_text", ascii_by_default)
    assert "\N{EM DASH}" in draw([read()], tmp_path, "One")[0].read_text("utf-8")


def test_the_picture_is_a_png_with_a_panel_a_variant(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = draw_picture([read()], tmp_path / "one.png", "One").read_bytes()
    both = draw_picture([read(), read()], tmp_path / "both.png", "Both").read_bytes()
    assert one.startswith(b"\x89PNG") and both.startswith(b"\x89PNG")
    height = [int.from_bytes(data[20:24], "big") for data in (one, both)]
    assert height[1] > 1.4 * height[0]


# ---- which events count, as what, and what they add up to


def test_hidden_is_what_computation_covers() -> None:
    events = [
        _event("nvjet_gemm", "kernel", 0, 4000),
        _event("nvjet_gemm", "kernel", 3000, 5000),
        _event("ncclDevKernel_AllGather", "kernel", 1000, 3000),  # hidden
        _event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 4500, 7000),  # 2 ms of it exposed
        _event("push_kernel", "kernel", 6000, 8000),  # 1 ms of it beside the copy: exposed once
        _event("Memcpy HtoD", "gpu_memcpy", 8000, 8500),
        _event("aten::mm", "cpu_op", 0, 9000),
        _event("elementwise", "kernel", 9000, 10000),
        _event("nvjet_gemm", "kernel", 0, 1000, device=1),
        {"ph": "M", "name": "process_name"},
    ]
    timeline = read_timeline({"traceEvents": events}, "a trace")
    figures = dict(timeline.figures)
    for label, value in (("trace", "10.00"), ("computation", "6.00"), ("communication", "5.50")):
        assert figures[label] == f"{value} ms"
    assert (figures["exposed"], figures["hidden share"]) == ("3.00 ms", "45.5%")
    assert figures["host gaps"].startswith("1, 0.50 ms in all")
    longest = ("Memcpy PtoP (Device -> Device)", "push_kernel")
    assert timeline.notes[:2] == tuple(f"Exposed for 2.00 ms: {name}" for name in longest)
    assert "  Exposed for 2.00 ms: push_kernel" in timeline.lines()
    instant = read_timeline({"traceEvents": [_event("ncclDevKernel", "kernel", 5, 5)]}, "")
    assert ("hidden share", "no communication") in instant.figures


def test_a_gemm_on_a_cpu_computes_although_it_has_inner_operators() -> None:
    events = [
        _event("FunctionBackward", "cpu_op", 0, 9000),  # may wait for a peer
        _event("aten::mm", "cpu_op", 1000, 5000),
        _event("aten::resolve_conj", "cpu_op", 1000, 1100),
        _event("gloo:send", "user_annotation", 3000, 6000),
    ]
    timeline = read_timeline({"traceEvents": events}, "a trace")
    figures = dict(timeline.figures)
    assert figures["computation"] == "4.00 ms"
    assert figures["hidden share"] == "66.7%"


@pytest.mark.parametrize(("names", "kind"), [
    (
        "scatter_kernel begin_combine_kernel arrive_heads_kernel reduce_push_kernel "
        "push_kernel send_rows_kernel publish_kernel barrier_kernel combine_put_kernel "
        "plan_kernel ncclDevKernel_AllGather_RING_LL hybrid_ep::dispatch_kernel<bf16> "
        "two_shot_all_reduce_kernel<bf16>",
        "communication",
    ),
    (
        "grouped_forward activation_kernel topk_softmax_kernel "
        "at::native::reduce_kernel<512> at::native::_scatter_gather_elementwise_kernel "
        "flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits>",
        "compute",
    ),
])  # fmt: skip
def test_what_waits_for_peers_is_told_from_what_computes(names: str, kind: str) -> None:
    """By whole names where others have kernels called alike."""
    for name in names.split():
        assert traces.kind_of(_event(name, "kernel", 0, 1000)) == kind, name


def test_an_event_without_its_length_makes_a_trace_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "M"}, {"ph": "X", "ts": 1, "name": "x"}]}')
    with pytest.raises(ConfigError, match="trace.json: cannot be read .KeyError: 'dur'"):
        traces.read_document(path)
