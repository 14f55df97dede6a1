"""The `megatron-fluid` program: reports, exit statuses, reasons."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fluid import patches
from megatron_fluid.cli import bench, main
from megatron_fluid.errors import ConfigError
from megatron_fluid.profiling import traces
from tests.support.fresh_program import run_code

NEEDS_MEGATRON = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)


def run_program(setup: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The program in a fresh process, after some lines of set-up."""
    code = (
        f"import sys\n{setup}\nfrom megatron_fluid.cli import main\nsys.exit(main({list(argv)!r}))"
    )
    return run_code(code, environment=os.environ)


WITHOUT_MEGATRON = "sys.modules['megatron'] = None"


def test_patches_without_megatron() -> None:
    done = run_program(WITHOUT_MEGATRON, "patches")
    assert done.returncode == 0, done.stderr
    assert "megatron-core is not installed" in done.stdout
    assert "megatron.training.arguments:parse_args" in done.stdout


@NEEDS_MEGATRON
def test_patches_with_megatron() -> None:
    done = run_program("", "patches", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["patch"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {patch.name for patch in patches.PATCHES}
    assert rows["arguments"]["state"] == "applied"


@NEEDS_MEGATRON
def test_patches_that_do_not_fit_fail() -> None:
    changed = "import megatron.core.datasets.utils as u\nu.compile_helpers = lambda force: None"
    done = run_program(changed, "patches")
    assert done.returncode == 1
    assert "'dataset-helpers' does not fit" in done.stderr
    assert "expected (), found (force)" in done.stderr
    assert " applied " not in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["docter"], "COMMAND: found 'docter', allowed: doctor, patches, "),
        (["docter"], "; did you mean doctor?"),
        (["doctor", "--bandwith"], "unknown flag --bandwith; did you mean --bandwidth?"),
        (["patches", "--zzz"], "megatron-fluid: error: unknown flag --zzz\n"),
    ],
)
def test_a_mistyped_command_line_ends_in_one_line_with_what_was_meant(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    shown = capsys.readouterr().err
    assert caught.value.code == 2 and text in shown and shown.count("\n") == 1


def test_the_markdown_table_lists_every_patch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert all(f"`{patch.target}`" in text for patch in patches.PATCHES)


def test_the_list_of_patches_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["patches"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    flat = re.sub(r"\s+", "", text)
    for row in patches.report():
        assert re.sub(r"\s+", "", row.target + row.reason) in flat, row.patch


@pytest.fixture
def source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with one suite and one helper, as the working directory."""
    (tmp_path / "megatron_fluid").mkdir()
    folder = tmp_path / "benchmarks"
    for name in ("suites", "harness"):
        (folder / name).mkdir(parents=True)
    shutil.copy(Path(bench.__file__).resolve().parents[2] / "benchmarks" / "launch.sh", folder)
    (folder / "__init__.py").write_text('"""A helper."""\n')
    (folder / "suites" / "echo.py").write_text(
        '"""Says what it was given.\n\nMore."""\n'
        "import os, pathlib, sys\n"
        'if __name__ == "__main__":\n'
        '    pathlib.Path(f"rank{os.environ["RANK"]}").write_text(" ".join(sys.argv[1:]))\n'
        '    sys.exit("--fail" in sys.argv)\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bench_lists_suites(source_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.find_suites(source_tree / "benchmarks") == {"echo": "Says what it was given."}
    assert main(["bench"]) == 0
    assert capsys.readouterr().out.split(maxsplit=1) == ["echo", "Says what it was given.\n"]


@pytest.mark.process
def test_bench_runs_a_suite_on_every_rank_and_hands_on_its_status(source_tree: Path) -> None:
    assert main(["bench", "--ranks", "2", "echo", "--tokens", "8"]) == 0
    assert [(source_tree / f"rank{rank}").read_text() for rank in (0, 1)] == ["--tokens 8"] * 2
    assert main(["bench", "--ranks", "1", "echo", "--fail"]) != 0


@pytest.mark.process
def test_bench_runs_what_is_no_suite_once(
    source_tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (source_tree / "benchmarks" / "harness" / "run_all.py").write_text(
        '"""Starts every suite."""\nimport os, sys\n'
        'if __name__ == "__main__":\n    print(os.environ.get("RANK"), *sys.argv[1:])\n'
    )
    assert main(["bench", "run_all", "--dry-run"]) == 0
    assert capfd.readouterr().out == "None --dry-run\n"
    assert main(["bench", "--ranks", "2", "run_all"]) == 2
    assert capfd.readouterr().err == "--ranks: found 2, allowed: none, as run_all is one process\n"
    assert main(["bench"]) == 0
    assert "Starts every suite. (one process)" in capfd.readouterr().out


def test_what_is_one_process_and_what_a_suite_is_told_apart() -> None:
    """By how each program's docstring says that it is started."""
    folder = Path(bench.__file__).resolve().parents[2] / "benchmarks"
    alone = []
    for name in bench.find_suites(folder):
        paths = [folder / each / f"{name}.py" for each in bench._FOLDERS]
        (path,) = (path for path in paths if path.is_file())
        if f"python -m benchmarks.{path.parent.name}.{name}" in path.read_text():
            alone.append(name)
    assert alone == list(bench._ONE_PROCESS)
    script = (folder / "launch.sh").read_text()
    assert f"case $name in {' | '.join(alone)}) exec" in script


@pytest.mark.parametrize("subcommand", ["bench", "profile"])
@pytest.mark.parametrize("ranks", ["0", "-1", "many"])
def test_no_rank_is_refused_by_name(
    subcommand: str, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([subcommand, "--ranks", ranks])
    assert caught.value.code == 2
    assert f"argument --ranks: found '{ranks}', allowed: 1 or more" in capsys.readouterr().err


@pytest.mark.process
def test_bench_tp_stands_for_the_sweep_of_real_layers(
    source_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = source_tree / "benchmarks" / "suites"
    shutil.move(suites / "echo.py", suites / "tp_overlap.py")
    assert main(["bench", "--ranks", "1", "tp", "--iters", "2"]) == 0
    sweep = "layers" if torch.cuda.is_available() else "tiny"
    assert (source_tree / "rank0").read_text() == f"--sweep {sweep} --iters 2"
    capsys.readouterr()
    assert main(["bench"]) == 0
    assert "short for tp_overlap --sweep layers" in capsys.readouterr().out


def test_bench_refuses_an_unknown_suite_by_name(
    source_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "nonsense"]) == 2
    assert capsys.readouterr().err == "suite: found 'nonsense', allowed: echo\n"


def test_bench_needs_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        bench, "__file__", str(tmp_path / "site-packages" / "megatron_fluid" / "cli" / "bench.py")
    )
    with pytest.raises(ConfigError, match="come with the source tree"):
        bench.find_suites()


def test_a_subcommand_is_needed_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def _event(
    name: str, category: str, begin: float, end: float, device: int | None = 0
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin,
        "dur": end - begin,
        "args": {"device": device},
    }


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
    first, second = traces.summarise(events)
    assert (first.device, first.window, first.compute, first.communication) == ("GPU 0", 10, 6, 5.5)
    assert (first.exposed, first.idle) == (3.0, 1.0)
    assert first.hidden == pytest.approx(2.5 / 5.5)
    assert first.exposed_by_name == (("Memcpy PtoP (Device -> Device)", 2.0), ("push_kernel", 2.0))
    assert any("45.5% of it hidden" in line for line in first.lines())
    assert (second.device, second.hidden) == ("GPU 1", None)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        *((n, True) for n in ("scatter_kernel", "reduce_kernel", "begin_combine_kernel")),
        *(
            (n, True)
            for n in (
                "arrive_heads_kernel",
                "reduce_push_kernel",
                "ncclDevKernel_AllGather_RING_LL",
            )
        ),
        *(
            (n, True)
            for n in (
                "push_kernel",
                "send_rows_kernel",
                "publish_kernel",
                "barrier_kernel",
                "combine_put_kernel",
            )
        ),
        ("void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", False),
        ("void at::native::_scatter_gather_elementwise_kernel", False),
        ("void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits>", False),
        *(
            (n, True)
            for n in (
                "plan_kernel",
                "void hybrid_ep::dispatch_kernel<bf16>",
                "two_shot_all_reduce_kernel<bf16>",
            )
        ),
        *((n, False) for n in ("grouped_forward", "activation_kernel", "topk_softmax_kernel")),
    ],
)
def test_what_waits_for_peers_is_told_from_what_computes(name: str, moves: bool) -> None:
    """By whole names where others have kernels called alike."""
    [found] = traces.summarise([_event(name, "kernel", 0, 1000)])
    assert (found.communication, found.compute) == ((1.0, 0.0) if moves else (0.0, 1.0))


@pytest.mark.slow
@pytest.mark.process
def test_profile_traces_both_variants_of_a_layer_and_says_what_was_hidden(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--compare", "--output", str(tmp_path), "--ranks", "2"]) == 0
    text = capfd.readouterr().out
    assert (tmp_path / "timeline.html").is_file()
    assert (tmp_path / "baseline" / "moe_layer.json.gz").is_file()
    trace = tmp_path / "fluid" / "moe_layer.json.gz"
    assert f"trace for https://ui.perfetto.dev: {trace}" in text
    (summary,) = traces.summarise(traces.read_trace(trace))
    assert summary.communication > 0 and summary.compute > 0 and "of it hidden" in text
    assert main(["profile", "--trace", str(trace)]) == 0
    assert "of it hidden" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.process
def test_profile_of_ranks_that_do_not_divide_the_experts(tmp_path: Path) -> None:
    assert main(["profile", "--output", str(tmp_path), "--ranks", "3"]) == 0
    assert (tmp_path / "moe_layer.json.gz").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["nosuch", "x"],
            "COMMAND: found 'nosuch', allowed: a program that can be started: No such file or "
            "directory",
        ),
        (["/"], "COMMAND: found '/', allowed: a program that can be started: Permission denied"),
        (
            ["--steps", "6", "4", "true"],
            "--steps: found '6 4', allowed: FIRST of 0 or more, and an END behind it",
        ),
        (["--steps", "4", "4", "true"], "--steps: found '4 4'"),
        (["--steps", "-1", "4", "true"], "--steps: found '-1 4'"),
    ],
)
def test_profile_refuses_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.process
def test_profile_gives_a_training_megatrons_own_flags(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import gzip, json, pathlib, sys\n"
        "args = sys.argv[1:]\n"
        "assert args[:2] == ['--train-iters', '9'] and args[args.index('--profile-step-start') + "
        "1] == '2', args\n"
        "out = pathlib.Path(args[args.index('--tensorboard-dir') + 1], '..', 'torch_profile')\n"
        "out.mkdir(parents=True)\n"
        "event = dict(ph='X', name='nccl', cat='kernel', ts=0, dur=1000, args=dict(device=0))\n"
        "gzip.open(out / 'rank-0.json.gz', 'wt').write(json.dumps(dict(traceEvents=[event])))\n"
    )
    old = tmp_path / "out" / "old.json.gz"
    old.parent.mkdir()
    old.write_bytes(b"")
    os.utime(old, (1, 1))
    output = ["--output", str(tmp_path / "out"), "--steps", "2", "4"]
    assert main(["profile", *output, sys.executable, str(script), "--train-iters", "9"]) == 0
    assert "0.0% of it hidden, 1.00 ms exposed" in capfd.readouterr().out
    assert main(["profile", *output, sys.executable, "-c", "raise SystemExit(3)"]) == 3
    os.utime(tmp_path / "out" / "torch_profile" / "rank-0.json.gz", (1, 1))
    assert main(["profile", *output, sys.executable, "-c", "pass"]) == 2
    assert "found no trace, although the program succeeded" in capfd.readouterr().err


def test_profile_refuses_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("[")
    assert main(["profile", "--trace", str(tmp_path / "x.json")]) == 2
    assert "cannot be read (JSONDecodeError" in capsys.readouterr().err
