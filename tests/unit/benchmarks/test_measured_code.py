"""Figures of code that has changed since are seen to be old."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import measured_code
from benchmarks.harness.measured_code import ROOT, fingerprint, measured_files
from benchmarks.harness.results import Row, write_results
from benchmarks.report.tables import summary

ROWS = [
    Row("mixtral-8x7b", "train", variant, ms, ms, ms, 3)
    for variant, ms in (("megatron_te_alltoall", 4.0), ("fluid", 2.0), ("fluid_megatron", 2.0))
]


def names(suite: str) -> set[str]:
    return {file.relative_to(ROOT).as_posix() for file in measured_files(suite)}


def test_a_suite_measures_what_it_imports_and_nothing_else() -> None:
    grouped = names("grouped_gemm")
    assert "megatron_fluid/kernels/grouped_gemm/launch.py" in grouped
    assert "megatron_fluid/kernels/grouped_gemm/kernel.cu" in grouped, "compiled, not imported"
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


def test_a_table_is_marked_once_measured_code_changes_but_not_its_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measured_code.measured_files
    changed = tmp_path / "changed.py"
    changed.write_text("def one():\n    return 1\n")
    monkeypatch.setattr(measured_code, "ROOT", Path("/"))
    monkeypatch.setattr(measured_code, "measured_files", lambda suite: [*real(suite), changed])
    write_results("moe_layer", ROWS, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    changed.write_text('def one():\n    """Return 1."""\n    return 1  # one\n')
    assert "earlier version" not in summary(tmp_path)
    changed.write_text("def one():\n    return 2\n")
    assert "the measured code has changed since" in summary(tmp_path)
