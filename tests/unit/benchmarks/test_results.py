"""The result files of benchmarks, the timing behind them, and their tables."""

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cases.moe_rivals import RIVALS
from benchmarks.cases.moe_variants import MEGATRON
from benchmarks.harness import measured_code, results, timing
from benchmarks.harness.measured_code import ROOT, fingerprint, measured_files
from benchmarks.harness.results import (
    NO_SUITES,
    RESULTS,
    Row,
    default_command,
    read_results,
    validate,
    write_results,
)
from benchmarks.harness.timing import measure, quantile, slowest_rank
from benchmarks.report.descriptions import FLOORS, SUITES
from benchmarks.report.headline import between_hosts, headline
from benchmarks.report.tables import launched, suite_page, summary
from benchmarks.suites.tp_backends import BACKENDS
from benchmarks.tune import tp_table
from megatron_fluid.tensor_parallel.choice import read_table
from tools import release_check


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


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": []}, "no rows"),
    ({"rows": [{"case": "c"}]}, "row 0 lacks mode"),
    ({"rows": [vars(Row("c", "m", "v", float("nan"), 1.0, 1.0, 1))]}, "median_ms"),
    ({"rows": [vars(Row("c", "m", "v", 2.0, 3.0, 4.0, 1))]}, "p10"),
])  # fmt: skip
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
    assert json.loads((tmp_path / "good.json").read_text()) == good and "cublas" in good


def test_the_cublas_that_is_called_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = results._version("nvidia-cublas", "nvidia-cublas-cu12") or "None."
    assert installed.startswith(f"{results.cublas_version()}.")
    preloaded = SimpleNamespace(cublasLtGetVersion=lambda: 131000)
    monkeypatch.setattr(results.ctypes, "CDLL", {None: preloaded}.__getitem__)
    assert results.cublas_version() == "13.10.0", "not torch's, loaded, too"


def test_a_sample_is_that_of_the_slowest_rank() -> None:
    found = slowest_rank({"a": [[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]})["a"]
    assert (found.p10_ms, found.median_ms) == (quantile([2.0, 3.0, 5.0], 0.1), 3.0)
    assert found.p90_ms == pytest.approx(4.6)


def test_a_command_does_not_tell_where_its_files_were_put(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "--profile --profile-folder here/too --iters 3 --output r.json --logs l --modes train"
    script = str(RESULTS.parent / "suites" / "tp_layer.py")
    monkeypatch.setattr("sys.argv", [script, *said.split(), "--output=x.json"])
    kept = "--profile --iters 3 --modes train"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert default_command(1) == f"benchmarks/launch.sh tp_layer {kept}"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_command(4) == f"NPROC=4 benchmarks/launch.sh tp_layer {kept}"
    monkeypatch.setenv("LD_PRELOAD", "/here/libcublasLt.so.13")
    assert 'NPROC=4 LD_PRELOAD="$CUBLAS/libcublasLt.so.13 ' in default_command(4)


def test_the_committed_table_is_that_of_the_committed_results() -> None:
    documents = [read_results(f) for f in (RESULTS / "archive").glob("tp_table-*gpu.json")]
    assert set(tp_table.entries_of(documents)) == set(read_table())


def test_a_form_enters_the_table_where_the_mean_of_all_files_beats_nccl_and_the_gemm() -> None:
    def document(nccl: float, engine: float, fused: float, host_us: float = 0.0) -> dict[str, Any]:
        times = {"torch": nccl, "fluid_copy_engine": engine, "fluid_fused": fused}
        rows = [
            {"case": "rs-8-4-2", "mode": "forward", "variant": name, "median_ms": ms,
             "config": {"host_us": host_us if name == "fluid_fused" else None}}
            for name, ms in times.items()
        ]  # fmt: skip
        return {"gpu": "any", "gpus": 2, "rows": rows}

    def chosen(*documents: dict[str, Any]) -> str:
        ((*key, name),) = tp_table.entries_of(documents)
        return name if key == ["any", 2, "scatter", 8, 4, 2] else f"{key}"

    assert chosen(document(1.0, 0.9, 0.8)) == "fused"
    assert chosen(document(1.0, 0.9, 0.8, host_us=950.0)) == "copy_engine"
    assert chosen(document(1.0, 0.99, 1.2)) == "collective", "two percent, at least"
    assert chosen(document(1.0, 0.9, 0.8), document(1.0, 0.9, 1.4)) == "copy_engine"
    with pytest.raises(ValueError, match="needed: one with forward rows of torch, fluid_copy"):
        tp_table.entries_of([{"gpu": "any", "gpus": 2, "rows": []}])


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
    assert fingerprint("pretrain") != fingerprint("pretrain", [{"config": {"layout": "tp2-ep2"}}])


def test_a_table_is_marked_once_measured_code_changes_but_not_its_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measured_code.measured_files
    changed = tmp_path / "changed.py"
    changed.write_text("def one():\n    return 1\n")
    monkeypatch.setattr(measured_code, "ROOT", Path("/"))
    monkeypatch.setattr(measured_code, "measured_files", lambda suite: [*real(suite), changed])
    rows = of("mixtral-8x7b", "train", {"megatron_te_alltoall": 4.0, "fluid": 2.0})
    write_results("moe_layer", rows, 1, tmp_path / "moe_layer-1gpu.json", command="x")
    changed.write_text('def one():\n    """Return 1."""\n    return 1  # one\n')
    assert "earlier version" not in summary(tmp_path)
    changed.write_text("def one():\n    return 2\n")
    assert "the measured code has changed since" in summary(tmp_path)


# ---- tables: ratios the right way round, each variant on its side, nothing lost


def of(case: str, mode: str, times: Mapping[str, float], **config: object) -> list[Row]:
    return [Row(case, mode, variant, ms, ms, ms, 7, config) for variant, ms in times.items()]


def on_gpus(path: Path, suite: str, rows: Iterable[Row], gpus: int, **changes: str) -> None:
    """A result file as H200s would have written it, with changes of its head."""
    write_results(suite, rows, gpus, path, command=f"bench {suite}")
    document = json.loads(path.read_text()) | {"gpu": "NVIDIA H200", "cuda": "13.0", **changes}
    path.write_text(json.dumps(document))


def test_an_moe_layer_is_compared_with_megatrons_own_paths_inside_megatron_and_alone(
    tmp_path: Path,
) -> None:
    """Floors are nobody's rivals, fp8 is compared with fp8, and what was not run is named."""
    times = {
        "fluid": 2.0, "fluid_megatron": 2.5, "fluid_no_overlap": 1.0, "floor": 1.6,
        "schedule_whole": 1.0,
    }  # fmt: skip
    rivals = {"megatron_te_alltoall": 4.0, "megatron_te_allgather": 6.0}
    fp8 = {"megatron_te_fp8": 3.0, "fluid_fp8": 1.5, "fluid_megatron_fp8": 1.0}
    rows = of("olmoe", "train", times | rivals | fp8)
    rows += of("olmoe", "phase forward", {"fc1": 1.0}) + of("olmoe", "host", times)
    rows += of("olmoe-zipf", "train", {"fluid": 2.0, "megatron_te_alltoall": 6.0})
    on_gpus(tmp_path / "moe_layer-2gpu.json", "moe_layer", rows, 2)
    head, _, *table = summary(tmp_path).splitlines()
    assert head.startswith("**moe_layer, 2 H200.** ") and "`bench moe_layer` on NVIDIA" in head
    assert "The floor is the experts' GEMMs alone" in head
    assert head.count("Not run of") == 1
    assert "Not run of olmoe-zipf: allgather dispatcher; alltoall dispatcher, fp8" in head
    assert table == [
        "| case | mode | best of the others, of those run | megatron_fluid inside Megatron | "
        "times faster | megatron_fluid without overlap | megatron_fluid on plain torch | "
        "times faster | over the floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| olmoe | train | 4.00 ms, alltoall dispatcher | 2.50 ms | 1.60 | 1.00 ms | 2.00 ms | "
        "2.00 | 1.25 |",
        "| olmoe | train, fp8 | 3.00 ms, alltoall dispatcher, fp8 blockwise | 1.00 ms | 3.00 |  | "
        "1.50 ms | 2.00 |  |",
        "| olmoe-zipf | train | 6.00 ms, alltoall dispatcher |  |  |  | 2.00 ms | 3.00 |  |",
    ]


def test_a_file_of_todays_code_is_shown_before_one_of_more_gpus(tmp_path: Path) -> None:
    rows = of("olmoe", "train", {"fluid": 1.0})
    for gpus in (4, 2):
        on_gpus(tmp_path / f"moe_layer-{gpus}gpu.json", "moe_layer", rows, gpus)
    assert "**moe_layer, 4 H200.**" in summary(tmp_path)
    on_gpus(tmp_path / "moe_layer-4gpu.json", "moe_layer", rows, 4, code="another")
    assert "**moe_layer, 2 H200.**" in summary(tmp_path)


def test_the_headline_compares_bf16_with_bf16_and_the_best_with_the_best(tmp_path: Path) -> None:
    megatron = {"megatron": 9.0, "megatron_graph": 8.0, "megatron_best_fp8": 4.0}
    ours = {"fluid": 6.0, "fluid_whole_graph": 5.0, "fluid_whole_graph_fp8": 1.0}
    rows = of("olmoe-mbs4", "train", {"megatron": 15.0, "fluid": 5.0}, micro_batch_size=4)
    rows += of("olmoe", "train", megatron | ours, cublas="13.10.0")
    on_gpus(tmp_path / "pretrain.json", "pretrain", rows, 2, cublas="13.4.0")
    row = "| olmoe, 2 H200 | 8 ms (8 to 8) | 5 ms (5 to 5) | **1.60** | 3.0 |"
    assert row in headline(tmp_path) and "cuBLAS 13.10.0 and 13.4.0:" in headline(tmp_path)
    assert "nothing was measured" in between_hosts(tmp_path)
    rows = of("deepseek-v3", "train", megatron | ours, layers=1, experts=64)
    on_gpus(tmp_path / "pretrain.json", "pretrain", rows, 1)
    assert "1 of 61 layers, 64 of 256 experts, 1 H200" in headline(tmp_path)


def test_a_page_says_what_else_a_reader_of_a_time_must_know(tmp_path: Path) -> None:
    """Where the host is why another is slow, what a layer keeps, the settings of a rival, and of
    two files of a suite which is which."""

    def write(name: str, suite: str, variant: str, **config: object) -> None:
        rows = of("olmoe", "train", {"fluid": 2.0, variant: 4.0}, **config)
        on_gpus(tmp_path / name, suite, rows, 2)

    write("moe_layer-2gpu.json", "moe_layer", "megatron_te_alltoall", host_ms=4.5)
    config = {"tokens": 8192, "host_ms": 3.0, "kept_bytes": 2**25}
    write("moe_layer-8192-2gpu.json", "moe_layer", "liger_cute", **config)
    write("dispatch_combine-2gpu.json", "dispatch_combine", "deepep", settings="48 SMs")
    page = suite_page("moe_layer", tmp_path)
    assert page.count("or more for the fastest other in olmoe train;") == 1
    assert "## moe_layer, 2 H200\n" in page and "2 H200, 8192 tokens\n" in page
    assert "| samples | host |\n" in page
    assert "| 7 | 3.00 ms | 32 MiB |" in page
    assert "Settings: 48 SMs. " in suite_page("dispatch_combine", tmp_path)
    rows = of("olmoe", "train", {"fluid": 2.0})
    command = "bench block --cases a --x && bench block --cases b --x"
    on_gpus(tmp_path / "block.json", "block", rows, 2, command=command)
    page = suite_page("block", tmp_path)
    assert "by `bench block --cases CASE --x`, CASE being a, b in turn, on NVIDIA" in page


def test_the_first_screen_shows_figures_of_older_code_alone_and_none_of_a_dirty_tree(
    tmp_path: Path,
) -> None:
    def write(name: str, suite: str, rows: list[Row], **changes: str) -> None:
        on_gpus(tmp_path / name, suite, rows, 2, **changes)

    trained = of("olmoe", "train", {"megatron": 8.0, "fluid": 5.0})
    write("pretrain.json", "pretrain", trained)
    assert "Not measured again" not in headline(tmp_path)
    write("pretrain.json", "pretrain", trained, code="of another version")
    assert "Not measured again since the code changed." in headline(tmp_path)
    newer = of("mixtral-8x7b", "train", {"megatron_best": 3.0, "fluid": 2.0})
    on_gpus(tmp_path / "pretrain-1gpu.json", "pretrain", newer, 1)
    assert "olmoe" not in headline(tmp_path) and "**1.50**" in headline(tmp_path)
    times = {"megatron_alltoall": 9.5, "plain": 9.0, "fluid_no_overlap": 5.0, "fluid": 4.0}
    hosts = of("moe-2x1-wire-1", "train", times, hidden_share=0.5)
    hosts += of("main-2x1-wire-1", "train", times, hidden_share=0.5)
    write("slow_wire.json", "slow_wire", hosts, commit="a" * 40)
    assert "| 9 ms | 4 ms | 2.25 | 1.25 |" in between_hosts(tmp_path)
    write("slow_wire.json", "slow_wire", hosts, commit="a" * 40 + "-dirty")
    assert "nothing was measured" in between_hosts(tmp_path)


def test_a_release_takes_figures_of_todays_code_at_one_commit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLUID_COMMIT", "a" * 40)
    rows = of("a", "train", {"fluid": 1.0})
    on_gpus(tmp_path / "attention.json", "attention", rows, 4)
    assert release_check.main([], tmp_path) == 0
    monkeypatch.setenv("FLUID_COMMIT", "a" * 40 + "-dirty")
    on_gpus(tmp_path / "attention-2gpu.json", "attention", rows, 2)
    for name in ("attention-1gpu", "moe_layer"):
        on_gpus(tmp_path / f"{name}.json", name.partition("-")[0], rows, 1, code="another")
    assert release_check.main([], tmp_path) == 1
    said = capsys.readouterr().err
    assert "attention-1gpu.json: of older code" in said and "moe_layer.json: of older" in said
    assert "attention-2gpu.json: found commit aaaa" in said and "attention.json" not in said
    assert release_check.main(["--archive"], tmp_path) == 0
    kept = {path.name for path in tmp_path.glob("*.json")}
    assert kept == {"attention.json"} and len(list((tmp_path / "archive").iterdir())) == 3


def test_no_rival_is_forgotten() -> None:
    assert set(SUITES["moe_layer"].others) - {"megatron_te_single_launch"} == {  # in older files
        *(name for name in MEGATRON if not name.startswith("fluid")),
        *RIVALS,
    }
    assert set(SUITES["tp_overlap"].others) == {
        b for b in BACKENDS if not b.startswith("fluid") and b not in FLOORS
    }


@pytest.mark.parametrize(
    "path",
    sorted(path for path in RESULTS.glob("*.json") if path.name not in NO_SUITES),
    ids=lambda path: path.stem,
)
def test_every_command_that_is_shown_starts_a_program_that_is_here(path: Path) -> None:
    paths = (ROOT / "benchmarks").rglob("*.py")
    programs = {path.stem for path in paths if '\nif __name__ == "__main__":' in path.read_text()}
    for command in launched(json.loads(path.read_text())["command"]).split(" && "):
        words = [word for word in shlex.split(command) if "=" not in word]
        if words[0] == "torchrun":
            assert (ROOT / words[3]).is_file() and words[3].startswith("tests/")
        else:
            assert words[0] == "benchmarks/launch.sh" and words[1] in programs


def test_a_table_stays_current_when_checks_of_settings_change_and_nothing_else() -> None:
    def code(check: str = "pass", where: str = "__post_init__") -> str:
        text = f"class Config:\n    def {where}(self):\n        {check}\n        self.half = 1"
        return measured_code._code(text.encode()).decode().replace("        pass\n", "")

    refused = "if self.size < 1: raise ValueError(self.size)"
    for check in (refused, "self.check_fields()", f"for name in 'ab':\n            {refused}"):
        assert code(check) == code()
    assert code(refused, "check_fields") == code("pass", "check_fields")
    assert code(refused, "call") != code("pass", "call"), "it costs time in every call"
    for counts in ("self.size = 1", "if (n := self.size) < 1: raise ValueError(n)"):
        assert code(counts) != code()
    assert code(f"{refused}\n        else: self.size = 2") != code()
