"""The result files of benchmarks and the timing behind them."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.cases.tensor_parallel import SWEEPS, divided
from benchmarks.harness import timing
from benchmarks.harness.results import (
    RESULTS,
    Row,
    default_command,
    read_results,
    validate,
    write_results,
)
from benchmarks.harness.timing import Timing, measure, quantile, rows_of, slowest_rank
from benchmarks.suites.tp_overlap import Report, recommend
from benchmarks.tune import tp_table
from megatron_fluid.tensor_parallel.measured import read_table


def test_quantiles_interpolate() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.1) == 1.0
    assert quantile([5.0], 0.9) == 5.0
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


@pytest.mark.parametrize("count", range(1, 9))
def test_each_variant_runs_in_each_place_and_behind_each_other_one_equally_often(
    count: int,
) -> None:
    names, order = "abcdefgh"[:count], []
    iters = count * (1 + count % 2)
    timings = measure(
        {n: partial(order.append, n) for n in names}, "cpu", warmup=1, iters=iters, repeats=2
    )
    assert list(timings) == list(names) and "".join(order[:count]) == names
    assert all(t.iters == iters and 0 <= t.p10_ms <= t.p90_ms for t in timings.values())
    assert order[count::2] == order[count + 1 :: 2], "repeats come one after the other"
    rounds = [order[count:][2 * count * i : 2 * count * (i + 1) : 2] for i in range(iters)]
    places = Counter(place for r in rounds for place in enumerate(r))
    behind = Counter(pair for r in rounds for pair in itertools.pairwise(r))
    assert places == dict.fromkeys(itertools.product(range(count), names), iters // count)
    assert behind == dict.fromkeys(itertools.permutations(names, 2), iters // count)


def test_the_host_s_time_stands_beside_a_gpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    host = {"a": [[6.0, 7.0, 9.0], [1.0, 8.0, 1.0]]}  # by rank
    monkeypatch.setattr(timing, "_samples", lambda *_: ({"a": [[2.0] * 3] * 2}, host))
    found = measure({"a": lambda: None}, "cuda:0", iters=3)["a"]
    assert found.median_ms == 2.0 and found.host_ms == 8.0
    assert found.row("case", "forward", "a", {"h": 1}).config == {"h": 1, "host_ms": 8.0}
    on_cpu = measure({"a": lambda: None}, "cpu", iters=3)["a"]
    assert on_cpu.host_ms is None and on_cpu.row("case", "forward", "a").config == {}


def test_a_cpu_has_no_head_start() -> None:
    assert timing.layer_head_start_ms(torch.device("cpu")) == 0.0
    started = time.perf_counter()
    measure({"a": lambda: None}, "cpu", warmup=0, iters=1, head_start_ms=60_000.0)
    assert time.perf_counter() - started < 30
    with pytest.raises(ValueError, match="head_start_ms -1"):
        measure({"a": lambda: None}, "cpu", head_start_ms=-1.0)


def test_a_result_file_has_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUID_COMMIT", "abc")
    rows = rows_of(
        {"fluid": Timing(2.0, 1.0, 3.0, 5), "floor": Timing(1.0, 1.0, 1.0, 5)},
        "case",
        "forward",
        {"h": 4},
    )
    document = read_results(
        write_results("suite", rows, 4, tmp_path / "deep" / "suite.json", command="make it")
    )
    assert list(document) == [
        "suite",
        "date",
        "commit",
        "gpu",
        "gpus",
        "torch",
        "cuda",
        "nccl",
        "triton",
        "megatron_core",
        "transformer_engine",
        "command",
        "code",
        "rows",
    ]
    assert (document["commit"], document["gpus"], document["command"]) == ("abc", 4, "make it")
    assert document["rows"][0] == {
        "case": "case",
        "mode": "forward",
        "variant": "fluid",
        "median_ms": 2.0,
        "p10_ms": 1.0,
        "p90_ms": 3.0,
        "iters": 5,
        "config": {"h": 4},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": []}, "no rows"),
        ({"rows": [{"case": "c"}]}, "row 0 lacks mode"),
        ({"rows": [vars(Row("c", "m", "v", float("nan"), 1.0, 1.0, 1))]}, "median_ms"),
        ({"rows": [vars(Row("c", "m", "v", 2.0, 3.0, 4.0, 1))]}, "p10"),
    ],
)
def test_a_wrong_document_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good = read_results(
        write_results("suite", [Row("c", "m", "v", 1.0, 1.0, 1.0, 1)], 1, tmp_path / "good.json")
    )
    with pytest.raises(ValueError, match=message):
        validate({**good, **change})
    with pytest.raises(ValueError, match="lacks gpu"):
        validate({key: value for key, value in good.items() if key != "gpu"})
    assert json.loads((tmp_path / "good.json").read_text()) == good


def test_a_sample_is_that_of_the_slowest_rank() -> None:
    found = slowest_rank({"a": [[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]})["a"]
    assert (found.p10_ms, found.median_ms, found.p90_ms) == (
        quantile([2.0, 3.0, 5.0], 0.1),
        3.0,
        pytest.approx(4.6),
    )


def test_exposed_and_hidden_are_relative_to_the_gemm_and_to_nccl() -> None:
    timings = {
        name: Timing(ms, ms, ms, 1)
        for name, ms in {"gemm_only": 2.0, "torch": 3.0, "fluid": 2.25}.items()
    }
    report = Report("ag", (8, 4, 2), (8, 8, 2), timings, {"flux": "not there"}, {"fluid": 1e-3})
    assert (report.exposed("fluid"), report.hidden("fluid"), report.hidden("torch")) == (
        0.25,
        0.75,
        0.0,
    )
    row = next(row for row in report.rows() if row.variant == "fluid")
    assert (row.case, row.config["exposed_ms"], row.config["hidden"]) == ("ag-8-4-2", 0.25, 0.75)
    assert any("flux" in line and "absent: not there" in line for line in report.lines())
    assert any(
        line.startswith("ag-8-4-2") and " fluid " in line and "1.125" in line
        for line in recommend([report])
    )
    free = Report("ag", (8, 4, 2), (8, 8, 2), {**timings, "torch": timings["gemm_only"]})
    assert free.hidden("fluid") is None and free.rows()


def test_a_command_does_not_tell_where_its_files_were_put(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "--profile --profile-folder here/too --iters 3 --output there/r.json --modes train"
    script = RESULTS.parent / "suites" / "tp_layer.py"
    monkeypatch.setattr("sys.argv", [str(script), *said.split(), "--output=x.json"])
    kept = "--profile --iters 3 --modes train"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert default_command(1) == f"benchmarks/launch.sh tp_layer {kept}"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_command(4) == f"NPROC=4 benchmarks/launch.sh tp_layer {kept}"


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("tp_overlap*.json")), ids=lambda path: path.stem
)
def test_the_committed_table_is_that_of_the_committed_results(path: Path) -> None:
    entries = tp_table.entries_of(read_results(path))
    assert entries and set(entries) <= set(read_table())


def test_the_table_of_backends_is_made_from_results(tmp_path: Path) -> None:
    def row(case: str, variant: str, milliseconds: float, host_us: float | None = None) -> Row:
        return Row(
            case,
            "forward",
            variant,
            milliseconds,
            milliseconds,
            milliseconds,
            1,
            {"host_us": host_us},
        )

    rows = [
        row("ag-8-4-4", "torch", 2.0, 1000.0),
        row("ag-8-4-4", "fluid_fused", 1.5, 2100.0),
        row("ag-8-4-2", "torch", 2.0),
        row("ag-8-4-2", "fluid_copy_engine", 1.5),
        row("ag-8-4-2", "fluid_fused", 1.25),
        row("rs-8-4-2", "torch", 2.0),
        row("rs-8-4-2", "fluid_copy_engine", 1.97),
        row("rs-16-4-2", "torch", 2.0),
        row("ag-8-4-2", "flux", 1.0),
    ]
    results = write_results("tp_overlap", rows, 4, tmp_path / "r.json")
    gpu = read_results(results)["gpu"]
    assert tp_table.main([str(results), "--output", str(tmp_path / "table.json")]) == 0
    table = [tuple(entry) for entry in json.loads((tmp_path / "table.json").read_text())]
    assert set(table) >= {entry for entry in read_table() if entry[0] != gpu}
    ours = [entry for entry in table if entry[0] == gpu]
    host_bound = (gpu, 4, "gather", 8, 4, 4, "collective")
    assert ours == [
        (gpu, 4, "gather", 8, 4, 2, "fused"),
        host_bound,
        (gpu, 4, "scatter", 8, 4, 2, "collective"),
    ]


def test_a_case_that_the_ranks_do_not_divide_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = "allowed: M and N (ag), M and K (rs) that are multiples of the 3 ranks\n"
    fits = ("ag", 66, 96, 32)
    for rank, said in (
        ("0", f"cases left out: found ag-66-32-96, rs-64-33-33, {allowed}"),
        ("1", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            divided(SWEEPS["goals"], 3)
        assert caught.value.code == (2 if said else 0)
        capsys.readouterr()
        assert divided([("ag", 66, 32, 96), fits, ("rs", 64, 33, 33)], 3) == [fits]
        assert capsys.readouterr().err == said
    assert divided(SWEEPS["layers"], 4) == SWEEPS["layers"]
