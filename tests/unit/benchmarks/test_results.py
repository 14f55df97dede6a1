"""The result files of benchmarks and the timing behind them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness import measured_code, timing
from benchmarks.harness.measured_code import ROOT, fingerprint, measured_files
from benchmarks.harness.results import (
    RESULTS,
    Row,
    default_command,
    read_results,
    validate,
    write_results,
)
from benchmarks.harness.timing import measure, quantile, slowest_rank
from benchmarks.report.tables import summary
from benchmarks.tune import tp_table
from megatron_fluid.tensor_parallel.choice import read_table


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
    assert (found.p10_ms, found.median_ms) == (quantile([2.0, 3.0, 5.0], 0.1), 3.0)
    assert found.p90_ms == pytest.approx(4.6)


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
    "path", sorted(RESULTS.rglob("tp_overlap*.json")), ids=lambda path: path.stem
)
def test_the_committed_table_is_that_of_the_committed_results(path: Path) -> None:
    entries = tp_table.entries_of(read_results(path))
    assert entries and set(entries) <= set(read_table())


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
    for suite in ("pretrain", "recipes"):
        assert "patches/moe/layer.py" in names(suite), "started in another process"
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
