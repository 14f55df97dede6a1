"""The result files of benchmarks and the timing behind them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.results import Row, commit_id, read_results, validate, write_results
from benchmarks.timing import Timing, measure, quantile, rows_of


def test_quantiles_interpolate() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.1) == 1.0
    assert quantile([5.0], 0.9) == 5.0
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_variants_are_interleaved_in_a_rotating_order() -> None:
    order: list[str] = []
    timings = measure({n: partial(order.append, n) for n in "abc"}, "cpu", warmup=1, iters=3, repeats=2)
    assert "".join(order) == "abc" + "aabbcc" + "bbccaa" + "ccaabb"
    assert list(timings) == ["a", "b", "c"] and all(
        t.iters == 3 and 0 <= t.p10_ms <= t.p90_ms for t in timings.values()
    )
    with pytest.raises(ValueError, match="iters 0"):
        measure({}, "cpu", iters=0)


def test_a_result_file_has_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUID_COMMIT", "abc")
    rows = rows_of({"fluid": Timing(2.0, 1.0, 3.0, 5), "floor": Timing(1.0, 1.0, 1.0, 5)}, "case", "forward", {"h": 4})
    document = read_results(write_results("suite", rows, 4, tmp_path / "deep" / "suite.json", command="make it"))
    assert list(document) == [
        "suite", "date", "commit", "gpu", "gpus", "torch", "cuda", "nccl", "triton", "megatron_core", "transformer_engine",
        "command", "rows",
    ]  # fmt: skip
    assert (document["commit"], document["gpus"], document["command"]) == ("abc", 4, "make it")
    assert document["rows"][0] == {
        "case": "case", "mode": "forward", "variant": "fluid", "median_ms": 2.0, "p10_ms": 1.0, "p90_ms": 3.0, "iters": 5,
        "config": {"h": 4},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": []}, "no rows"),
        ({"rows": [{"case": "c"}]}, "row 0 lacks mode"),
        ({"rows": [vars(Row("c", "m", "v", float("nan"), 1.0, 1.0, 1))]}, "median_ms"),
        ({"rows": [vars(Row("c", "m", "v", 2.0, 3.0, 4.0, 1))]}, "p10"),
    ],
)
def test_a_wrong_document_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    good = read_results(write_results("suite", [Row("c", "m", "v", 1.0, 1.0, 1.0, 1)], 1, tmp_path / "good.json"))
    with pytest.raises(ValueError, match=message):
        validate({**good, **change})
    with pytest.raises(ValueError, match="lacks gpu"):
        validate({key: value for key, value in good.items() if key != "gpu"})
    assert json.loads((tmp_path / "good.json").read_text()) == good


def test_the_commit_names_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUID_COMMIT", raising=False)
    found = commit_id()
    assert found is None or len(found.removesuffix("-dirty")) == 40
