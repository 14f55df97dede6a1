"""Tables of the result files: ratios the right way round, and nothing lost."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Row, write_results
from benchmarks.tables import NOTHING, all_results, summary

ROWS = [
    Row(case, "forward", variant, ms, ms, ms, 7)
    for case, times in {
        "ag-8192-7168-8192": {"fluid": 1.5, "gemm_only": 1.0, "torch": 3.0, "flux": 2.25, "fluid_no_overlap": 0.5},
        "ag-1024-1-1": {"fluid": 0.0125},
    }.items()
    for variant, ms in times.items()
]


def test_the_summary_compares_with_the_floor_and_the_best_rival(tmp_path: Path) -> None:
    write_results("tp_overlap", ROWS, 4, tmp_path / "tp_overlap.json", command="bench tp")
    text = summary(tmp_path)
    assert "| ag-8192-7168-8192 | forward | 1.50 ms | 1.50 | flux: 2.25 ms | 1.50 |" in text
    assert "`bench tp` on 4 " in text
    assert "ag-1024" not in text, "the README shows the suite's highlights alone"


def test_a_case_without_rivals_has_empty_cells(tmp_path: Path) -> None:
    write_results("other", ROWS, 1, tmp_path / "other.json", command="x")
    assert "| ag-1024-1-1 | forward | 12.5 us |  |  |  |" in summary(tmp_path)


def test_the_page_of_results_holds_every_row(tmp_path: Path) -> None:
    write_results("tp_overlap", ROWS, 4, tmp_path / "tp_overlap.json", command="x")
    text = all_results(tmp_path)
    for row in ROWS:
        assert f"| {row.case} | {row.mode} | {row.variant} | " in text


def test_without_result_files_it_is_said(tmp_path: Path) -> None:
    assert summary(tmp_path) == NOTHING and NOTHING in all_results(tmp_path)
