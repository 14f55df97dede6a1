"""The benchmarks' pictures: drawn from result files and traces, and different where the figures
are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness.results import Row, write_results

pytest.importorskip("matplotlib")

from benchmarks.report.pictures import draw_all, draw_exposed, draw_losses, draw_pretrain
from benchmarks.report.timeline import _kind, draw_timeline


def exposed_rows(scale: float) -> list[Row]:
    return [
        Row(
            f"{operation}-{m}-512-256",
            "forward",
            variant,
            1.0,
            1.0,
            1.0,
            3,
            {"exposed_ms": scale * ms * m},
        )
        for operation in ("ag", "rs")
        for m in (1024, 2048)
        for variant, ms in (("fluid", 1e-4), ("torch", 3e-4), ("gemm_only", 0.0))
    ]


def test_exposed_communication_is_drawn_next_to_the_results(tmp_path: Path) -> None:
    drawn = []
    for scale in (1.0, 5.0):
        results = write_results(
            "tp_overlap", exposed_rows(scale), 4, tmp_path / f"tp{scale}.json", command="x"
        )
        picture = draw_exposed(results)
        assert picture == results.with_suffix(".png")
        drawn.append(picture.read_bytes())
    assert all(data.startswith(b"\x89PNG") for data in drawn) and drawn[0] != drawn[1]


def test_losses_of_runs_are_drawn_with_what_a_seed_changes(tmp_path: Path) -> None:
    drawn = []
    for shift in (0.0, 0.3):
        rows = [
            Row("small", "train", variant, 1.0, 1.0, 1.0, 2, {"losses": losses})
            for variant, losses in (
                ("megatron", [[4.0, 3.0, 2.5], [4.1, 3.1, 2.4]]),
                ("fluid", [[4.0, 3.0 + shift, 2.5]]),
                ("fluid_fp8", [[4.0, 3.1, 2.6]]),
            )
        ]
        results = write_results("losses", rows, 1, tmp_path / f"{shift}.json", command="x")
        drawn.append(draw_losses(results).read_bytes())
    assert drawn[0].startswith(b"\x89PNG") and drawn[0] != drawn[1]


def test_whole_iterations_are_drawn_with_their_losses(tmp_path: Path) -> None:
    drawn = []
    for last in (3.0, 4.0):
        rows = []
        for variant, steps in (("megatron", [9.0, 8.0]), ("fluid", [9.0, 8.0, last])):
            config = {"tokens_per_s": 1e4, "layers": 2, "losses": steps}
            rows.append(Row("tiny", "train", variant, 10.0, 9.0, 12.0, 3, config))
        results = write_results("pretrain", rows, 1, tmp_path / f"{last}.json", command="x")
        drawn.append(draw_pretrain(results).read_bytes())
    assert drawn[0].startswith(b"\x89PNG") and drawn[0] != drawn[1]


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("push_kernel", "communication"),
        ("scatter_kernel", "communication"),
        ("reduce_push_kernel", "communication"),
        ("reduce_kernel", "communication"),
        ("arrive_heads_kernel", "communication"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("grouped_gated", "gemm"),
        ("grouped_sums", "gemm"),
        ("gather_forward", "gemm"),
        ("scatter_backward", "gemm"),
        ("nvjet_sm90_tss_128x64_64x8_1x2_h_bz_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm"),
        ("dispatch_put_kernel", "communication"),
        ("wait_for_peers_kernel", "communication"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>", "other"),
        ("void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits>", "other"),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int>", "other"),
        ("plan_kernel", "communication"),
        ("topk_softmax_kernel", "other"),
    ],
)
def test_kernels_have_the_colour_of_what_they_do(name: str, kind: str) -> None:
    assert _kind({"name": name, "cat": "kernel"}) == kind
    assert _kind({"name": name, "cat": "gpu_memcpy"}) == "communication"
