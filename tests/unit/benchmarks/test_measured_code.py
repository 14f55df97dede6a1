"""Figures of code that has changed since are seen to be old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import measured_code
from benchmarks.harness.measured_code import ROOT, fingerprint, measured_files
from benchmarks.harness.results import Row, read_results, write_results
from benchmarks.report.pictures import draw_overview
from benchmarks.report.tables import summary

ROWS = [
    Row("mixtral-8x7b", "train", variant, ms, ms, ms, 3)
    for variant, ms in (("megatron_te_alltoall", 4.0), ("fluid", 2.0), ("fluid_megatron", 2.0))
]


def names(suite: str) -> set[str]:
    return {file.relative_to(ROOT).as_posix() for file in measured_files(suite)}


def test_a_suite_measures_what_it_imports_and_nothing_else() -> None:
    grouped = names("grouped_gemm")
    assert "megatron_fluid/kernels/grouped_gemm.py" in grouped
    assert "megatron_fluid/kernels/grouped_gemm_sm90.cu" in grouped, "compiled, not imported"
    assert not any(name.startswith(("patches/", "megatron_fluid/attention")) for name in grouped)
    layer = names("moe_layer")
    assert "megatron_fluid/moe/layer.py" in layer, "by its public name"
    assert "patches/moe/layer.py" in names("pretrain"), "started in another process"
    assert not any(name.startswith("tests/") for name in layer)


def test_every_suite_has_a_fingerprint_of_its_own() -> None:
    suites = sorted(path.stem for path in (ROOT / "benchmarks" / "suites").glob("[a-z]*.py"))
    found = [fingerprint(suite) for suite in suites]
    assert None not in found and len(set(found)) == len(suites)
    assert fingerprint("no such suite") is None


def test_a_table_is_marked_once_a_measured_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results("moe_layer", ROWS, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    assert "earlier version" not in summary(tmp_path)
    real = measured_code.measured_files
    changed = tmp_path / "changed.py"
    changed.write_text("x = 1\n")
    monkeypatch.setattr(measured_code, "ROOT", Path("/"))
    monkeypatch.setattr(measured_code, "measured_files", lambda suite: [*real(suite), changed])
    assert "the measured code has changed since" in summary(tmp_path)


def test_figures_without_a_fingerprint_are_old(tmp_path: Path) -> None:
    path = write_results("moe_layer", ROWS, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    document = read_results(path)
    del document["code"]
    path.write_text(json.dumps(document))
    assert "the measured code has changed since" in summary(tmp_path)


def test_rivals_that_were_not_run_are_named(tmp_path: Path) -> None:
    write_results("moe_layer", ROWS, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    text = summary(tmp_path)
    assert "Not run: allgather dispatcher" in text and "SonicMoE" in text
    assert "best of Megatron's own, of those run" in text


def test_the_chart_of_the_readme_follows_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = write_results("moe_layer", ROWS, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    first = draw_overview(results, tmp_path / "one.svg").read_bytes()
    assert draw_overview(results, tmp_path / "two.svg").read_bytes() == first
    other = [*ROWS[:2], Row("mixtral-8x7b", "train", "fluid_megatron", 1.0, 1.0, 1.0, 3)]
    results = write_results("moe_layer", other, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    assert draw_overview(results, tmp_path / "two.svg").read_bytes() != first
