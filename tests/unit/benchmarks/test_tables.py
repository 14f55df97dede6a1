"""Tables of the result files: ratios the right way round, each variant on its side, nothing
lost."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks.cases.moe_rivals import RIVALS
from benchmarks.harness.results import NO_SUITES, RESULTS, Row, result_path, write_results
from benchmarks.report.descriptions import FLOORS, SUITES
from benchmarks.report.tables import NOTHING, all_results, headline, launched, summary
from benchmarks.suites.moe_layer import MEGATRON
from benchmarks.suites.tp_backends import BACKENDS
from megatron_fluid.cli.bench import find_suites

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    Row(case, "forward", variant, ms, ms, ms, 7)
    for case, times in {
        "ag-8192-7168-8192": {
            "fluid": 1.5,
            "gemm_only": 1.0,
            "torch": 3.0,
            "flux": 2.25,
            "fluid_fused": 0.5,
        },
        "ag-1024-1-1": {"fluid": 0.0125},
    }.items()
    for variant, ms in times.items()
]


def of(case: str, mode: str, times: Mapping[str, float]) -> list[Row]:
    return [Row(case, mode, variant, ms, ms, ms, 7) for variant, ms in times.items()]


def on_gpus(path: Path, suite: str, rows: Iterable[Row], gpus: int) -> None:
    """A result file as H200s would have written it."""
    write_results(suite, rows, gpus, path, command=f"bench {suite}")
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"gpu": "NVIDIA H200", "cuda": "13.0"}))


def test_the_summary_compares_with_the_floor_and_the_best_rival(tmp_path: Path) -> None:
    on_gpus(tmp_path / "tp_overlap.json", "tp_overlap", ROWS, 4)
    text = summary(tmp_path)
    head = "| case | mode | best other, of those run | without overlap | ours | times faster |"
    assert f"{head} over the floor |" in text
    row = "| ag-8192-7168-8192 | forward | 2.25 ms, Flux | 3.00 ms | 1.50 ms | 1.50 | 1.50 |"
    assert row in text
    assert "**tp_overlap, 4 H200.** " in text and "`bench tp_overlap` on NVIDIA H200" in text
    assert "The floor is the GEMM alone." in text
    assert "ag-1024" not in text, "the README shows the suite's highlights alone"


def test_the_summary_has_the_highlights_of_the_most_gpus_and_the_page_has_all(
    tmp_path: Path,
) -> None:
    shown = []
    for gpus in (4, 2, 8):
        case = f"rs-8192-8192-{28672 // gpus}"
        on_gpus(
            tmp_path / result_path("tp_overlap", gpus).name,
            "tp_overlap",
            of(case, "forward", {"fluid": gpus}),
            gpus,
        )
        text = summary(tmp_path)
        shown.append(
            [
                n
                for n in (2, 4, 8)
                if f"**tp_overlap, {n} H200.**" in text and f"-{28672 // n} |" in text
            ]
        )
    assert shown == [[4], [4], [8]]
    headings = [line for line in all_results(tmp_path).splitlines() if line.startswith("## ")]
    assert headings == [f"## tp_overlap, {gpus} H200" for gpus in (2, 4, 8)]


def test_two_files_of_one_suite_and_machine_have_two_titles(tmp_path: Path) -> None:
    for name, version in (("a", "2.20"), ("b", None)):
        on_gpus(tmp_path / f"{name}.json", "attention", of("a", "train", {"fluid": 2.0}), 2)
        document = json.loads((tmp_path / f"{name}.json").read_text())
        (tmp_path / f"{name}.json").write_text(
            json.dumps(document | {"transformer_engine": version})
        )
    headings = [line for line in all_results(tmp_path).splitlines() if line.startswith("## ")]
    assert headings == ["## attention, 2 H200", "## attention, 2 H200, without Transformer Engine"]
    assert "**attention, 2 H200, without Transformer Engine.** " in summary(tmp_path)


def test_the_host_s_time_has_a_column_where_there_is_one(tmp_path: Path) -> None:
    on_gpus(tmp_path / "a.json", "other", of("a", "train", {"fluid": 2.0}), 2)
    assert "| samples |\n" in all_results(tmp_path) and "| host |" not in all_results(tmp_path)
    rows = [
        Row("a", "train", "fluid", 2.0, 2.0, 2.0, 7, {"host_ms": 0.5}),
        *of("a", "train", {"floor": 1.0}),
    ]
    on_gpus(tmp_path / "a.json", "other", rows, 2)
    text = all_results(tmp_path)
    assert "| samples | host |\n" in text
    assert (
        "2.00 ms to 2.00 ms | 7 | 500.0 us |\n" in text and "1.00 ms to 1.00 ms | 7 |  |\n" in text
    )


def test_the_name_of_a_result_file_tells_the_gpus() -> None:
    names = {gpus: result_path("block", gpus).relative_to(RESULTS).name for gpus in (2, 4, 8)}
    assert names == {2: "block-2gpu.json", 4: "block.json", 8: "block-8gpu.json"}


def test_an_moe_layer_is_compared_with_megatrons_own_paths_inside_megatron_and_alone(
    tmp_path: Path,
) -> None:
    times = {
        "fluid": 2.0,
        "fluid_megatron": 2.5,
        "fluid_no_overlap": 1.0,
        "floor": 1.6,
        "schedule_whole": 1.0,
    }
    rivals = {"megatron_te_alltoall": 4.0, "megatron_te_allgather": 6.0}
    rows = (
        of("olmoe", "train", times | rivals)
        + of("olmoe", "phase forward", {"fc1": 1.0})
        + of("olmoe", "host", times)
    )
    on_gpus(tmp_path / "moe_layer-2gpu.json", "moe_layer", rows, 2)
    text = summary(tmp_path)
    assert text.splitlines()[2:] == [
        "| case | mode | best of the others, of those run | ours inside Megatron | times "
        "faster | ours without overlap | ours on plain torch | times faster | over the floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| olmoe | train | 4.00 ms, alltoall dispatcher | 2.50 ms | 1.60 | 1.00 ms | 2.00 ms | "
        "2.00 | 1.25 |",
    ]


def test_what_was_not_run_of_some_cases_is_named(tmp_path: Path) -> None:
    best = {"fluid": 2.0, "megatron_te_alltoall": 6.0}
    rows = of("olmoe", "train", best | {"megatron_te_allgather": 4.0})
    rows += of("olmoe-zipf", "train", best) + of("mixtral-8x7b", "train", best)
    on_gpus(tmp_path / "moe_layer.json", "moe_layer", rows, 4)
    text = summary(tmp_path)
    assert "Not run of olmoe-zipf: allgather dispatcher." in text
    assert "| olmoe-zipf | train | 6.00 ms, alltoall dispatcher |" in text
    assert text.count("Not run of") == 1


def test_a_floor_is_nobodys_rival(tmp_path: Path) -> None:
    times = {"fluid": 2.0, "floor": 1.0, "floor_sdpa": 0.5, "megatron_te_a2a": 3.0}
    on_gpus(tmp_path / "attention.json", "attention", of("a", "train", times), 4)
    assert "| a | train | 3.00 ms | 2.00 ms | 1.50 | 2.00 |" in summary(tmp_path)
    on_gpus(tmp_path / "attention.json", "unknown", of("a", "train", times), 4)
    assert "| a | train | 3.00 ms, megatron_te_a2a | 2.00 ms | 1.50 | 2.00 |" in summary(tmp_path)


def test_easier_work_is_no_rival_and_nccl_is_one_of_both_directions(tmp_path: Path) -> None:
    rows = of(
        "deepseek-v3", "fc1", {"fluid": 2.0, "torch": 3.0, "torch_even": 1.0, "fluid_even": 1.0}
    )
    on_gpus(tmp_path / "grouped_gemm.json", "grouped_gemm", rows, 1)
    assert "| deepseek-v3 | fc1 | 3.00 ms, torch's grouped GEMM | 2.00 ms | 1.50 |" in summary(
        tmp_path
    )
    rows = [
        row
        for mode in ("plan", "push", "dispatch", "combine")
        for row in of("olmoe", mode, {"fluid": 2.0})
    ]
    rows += of("olmoe", "nccl", {"nccl": 5.0}) + of("olmoe", "push", {"copy_engine": 1.0})
    on_gpus(tmp_path / "dispatch_combine.json", "dispatch_combine", rows, 4)
    lines = [line for line in summary(tmp_path).splitlines() if line.startswith("| olmoe")]
    assert lines == [
        f"| olmoe | {mode} | 5.00 ms | 2.00 ms | 2.50 |" for mode in ("dispatch", "combine")
    ]


def test_columns_without_a_figure_are_left_out(tmp_path: Path) -> None:
    write_results(
        "other", of("a", "forward", {"fluid": 0.0125}), 2, tmp_path / "other.json", command="x"
    )
    assert "| case | mode | ours |\n| --- | --- | --- |\n| a | forward | 12.5 us |" in summary(
        tmp_path
    )


def test_ours_as_a_graph_has_a_column_and_a_traced_iteration_a_table(tmp_path: Path) -> None:
    times = {"megatron_graph_unchecked": 300.0, "fluid": 250.0, "fluid_whole_graph": 150.0}
    rows = of("qwen3-30b-a3b", "train", times)
    kinds = {"attention": 20.0, "optimizer": 100.5}
    rows[2].config["kernels"] = {"kinds": kinds, "busy_ms": 130.0}
    rows[0].config["kernels"] = {"kinds": {"attention": 21.0, "other": 1.0}, "busy_ms": 290.0}
    on_gpus(tmp_path / "pretrain.json", "pretrain", rows, 1)
    text = summary(tmp_path)
    assert "| ours | times faster | ours as one CUDA graph | times faster |" in text
    assert "| 250.00 ms | 1.20 | 150.00 ms | 2.00 |" in text
    assert "| in all | a kernel runs | optimizer | attention | other |" in text
    assert "| qwen3-30b-a3b | fluid_whole_graph | 150.0 | 130.0 | 100.5 | 20.0 |  |" in text


def test_the_share_of_the_wire_that_is_hidden_has_a_column(tmp_path: Path) -> None:
    rows = of("moe-2x1-wire-1", "train", {"plain": 800.0, "fluid": 400.0})
    rows[1].config["hidden_share"] = 0.944
    rows += of("moe-2x1-wire-0", "train", {"plain": 390.0, "fluid": 400.0})
    on_gpus(tmp_path / "slow_wire.json", "slow_wire", rows, 4)
    text = summary(tmp_path)
    assert "| ours | times faster | of the wire's time hidden |" in text
    assert "| 400.00 ms | 2.00 | 94% |" in text and "| 400.00 ms | 0.97 |  |" in text


def test_a_case_without_rivals_has_empty_cells(tmp_path: Path) -> None:
    write_results("other", ROWS, 1, tmp_path / "other.json", command="x")
    assert "| ag-1024-1-1 | forward |  | 12.5 us |  |  |" in summary(tmp_path)


def test_the_page_of_results_holds_every_row_and_says_what_variants_are(tmp_path: Path) -> None:
    on_gpus(tmp_path / "tp_overlap.json", "tp_overlap", ROWS, 4)
    text = all_results(tmp_path)
    for row in ROWS:
        assert f"| {row.case} | {row.mode} | {row.variant} | " in text
    assert "Variants: `fluid`: ours; `gemm_only`: the floor; `torch`: " in text


def test_without_result_files_it_is_said(tmp_path: Path) -> None:
    assert summary(tmp_path) == NOTHING and NOTHING in all_results(tmp_path)


@pytest.mark.parametrize("name", list(SUITES))
def test_the_words_are_about_variants_that_the_suite_measures(name: str) -> None:
    files = {
        "moe_layer": ("suites/moe_layer", "cases/moe_rivals"),
        "pretrain": ("cases/pretrain",),
        "slow_wire": ("cases/slow_wire",),
        "tp_overlap": ("suites/tp_backends",),
    }
    paths = files.get(name, (f"suites/{name}",))
    source = "".join((ROOT / "benchmarks" / f"{path}.py").read_text() for path in paths)
    spelled = dict.fromkeys(("fluid_even", "torch_even"), "{variant}_even")
    suite = SUITES[name]
    for variant in (*(suite.others or {}), *suite.ours):
        wanted = spelled.get(variant, f'"{variant}"')
        assert wanted in source, f"{name} measures no {variant}"
    assert (ROOT / "benchmarks" / "suites" / f"{name}.py").is_file()


def test_no_rival_is_forgotten() -> None:
    assert set(SUITES["moe_layer"].others or ()) == {
        *(name for name in MEGATRON if not name.startswith("fluid")),
        *RIVALS,
    }
    assert set(SUITES["tp_overlap"].others or ()) == {
        b for b in BACKENDS if not b.startswith("fluid") and b not in FLOORS
    }


@pytest.mark.parametrize(
    "path",
    sorted(path for path in RESULTS.glob("*.json") if path.name not in NO_SUITES),
    ids=lambda path: path.stem,
)
def test_every_command_that_is_shown_starts_a_program_that_is_here(path: Path) -> None:
    programs = find_suites(ROOT / "benchmarks")
    for command in launched(json.loads(path.read_text())["command"]).split(" && "):
        words = [word for word in shlex.split(command) if "=" not in word]
        if words[0] == "torchrun":
            assert (ROOT / words[3]).is_file() and words[3].startswith("tests/")
        else:
            assert words[0] == "benchmarks/launch.sh" and words[1] in programs


def test_the_headline_takes_the_most_gpus_and_of_these_megatron_with_the_patches(
    tmp_path: Path,
) -> None:
    alone = {"fluid": 2.0, "fluid_no_overlap": 1.5, "megatron_te_alltoall": 8.0}
    patched = alone | {"fluid_megatron": 4.0, "megatron_te_alltoall": 12.0}
    for name, times, gpus in (
        ("moe_layer-4gpu", alone, 4),
        ("moe_layer", patched, 4),
        ("moe_layer-2gpu", patched | {"fluid_megatron": 1.0}, 2),
    ):
        rows = of("qwen3-30b-a3b", "train", times)
        on_gpus(tmp_path / f"{name}.json", "moe_layer", rows, gpus)
    iteration = of("qwen3-30b-a3b", "train", {"fluid": 3.0, "fluid_graph": 2.0, "megatron": 6.0})
    on_gpus(tmp_path / "pretrain.json", "pretrain", iteration, 4)
    on_one = of("qwen3-30b-a3b", "train", {"fluid": 2.0, "megatron": 9.0})
    on_gpus(tmp_path / "pretrain-1gpu.json", "pretrain", on_one, 1)
    block = {"fluid": 1.0, "fluid_megatron": 1.0, "megatron_te_a2a": 2.0}
    path = tmp_path / "block.json"
    on_gpus(path, "block", of("mixtral-8x7b", "train", block), 4)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "another"}))
    text = headline(tmp_path)
    layer = (
        "| qwen3-30b-a3b, MoE layer, 4 H200 | 12.00 ms | 4.00 ms | **3.00** | 2.00 ms | 1.50 ms |"
    )
    assert layer in text
    assert "end to end, 4 H200 | 6.00 ms | 2.00 ms | **3.00** |  |  |" in text
    assert "end to end, 1 H200 | 9.00 ms | 2.00 ms | **4.50** |  |  |" in text
    said = text.splitlines()[-1]
    assert said.count("its code has changed since") == 1, "the block's"
    assert "docs/results.md" in said
