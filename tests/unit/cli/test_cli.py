"""The `megatron-fluid` program: reports, exit statuses, reasons."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from megatron_fluid import patches
from megatron_fluid.cli import main, profile, profile_layer
from megatron_fluid.moe.config import MoEConfig
from megatron_fluid.run import run
from tests.support.fresh_program import run_code
from tests.support.launch import run_ranks

ROOT = Path(__file__).resolve().parents[3]
NEEDS_MEGATRON = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)


def run_program(setup: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The program in a fresh process, after some lines of set-up."""
    code = (
        f"import sys\n{setup}\nfrom megatron_fluid.cli import main\nsys.exit(main({list(argv)!r}))"
    )
    return run_code(code, environment=os.environ)


def test_without_megatron_a_report_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "megatron_installed", lambda: False)
    assert main(["patches"]) == 0
    said = capsys.readouterr().out
    assert "megatron-core is not installed" in said
    assert "megatron.training.arguments:parse_args" in said
    assert main(["doctor", "--require", "megatron"]) == 1
    text = capsys.readouterr()
    assert "missing: megatron, which lacks megatron-core: see above" in text.err
    assert re.search(r"^megatron-core +- .*pip install 'megatron-core<", text.out, re.MULTILINE)


@NEEDS_MEGATRON
def test_patches_with_megatron() -> None:
    done = run_program("", "patches", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["patch"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {patch.name for patch in patches.PATCHES}
    assert rows["arguments"]["state"] == "applied"


@NEEDS_MEGATRON
@pytest.mark.parametrize("strict", [False, True])
def test_patches_that_do_not_fit_are_named_and_fail_if_strict(strict: bool) -> None:
    changed = "import os\nos.environ['MEGATRON_FLUID_STRICT'] = '1'\n" if strict else ""
    changed += "import megatron.core.datasets.utils as u\nu.compile_helpers = lambda force: None"
    done = run_program(changed, "patches")
    assert done.returncode == strict
    told = done.stderr if strict else " ".join(done.stdout.split())
    assert "'dataset-helpers' does not fit" in told
    assert "expected (), found (force)" in told
    assert (" applied\n" in done.stdout) is not strict


@pytest.mark.parametrize(("command", "said"), [
    ("", "the following arguments are required: COMMAND"),
    ("docter", "invalid choice: 'docter'"),
    ("run --nproc-per-node 0 x.py", "--nproc-per-node: found '0', allowed: 1 or"),
    ("run --nproc-per-node two x.py", "Unsupported nproc_per_node value: two"),
    ("run --nnodes abc x.py", "--nnodes: found 'abc', allowed: N or MIN:MAX, 1 or more"),
    ("run --monitor-interval -1 x.py", "--monitor-interval: found -1.0, allowed: seconds, mo"),
    ("run --grace 0 x.py", "argument --grace: found '0', allowed: 1 or more"),
    ("run", "megatron-fluid run: error: no script is named"),
    ("run --nproc-per-node 2 none.py", "SCRIPT: found 'none.py', allowed: a file that exi"),
    ("profile --ranks many", "argument --ranks: found 'many', allowed: 1 or more"),
    ("profile nosuch x", "COMMAND: cannot start 'nosuch': No such file or directory"),
    ("profile --trace setup.py --", "cannot be read (JSONDecodeError"),
    ("profile --steps 4 4 true", "--steps: found '4 4', allowed: FIRST of 0 or more, and"),
    ("profile --compare --trace a.json", "--compare, --trace and COMMAND are mutually excl"),
    ("compare --warm-up 9 --steps 10 -- x", "--warm-up: found 9, allowed: 0 to 8"),
    ("compare --tolerance nan -- x", "--tolerance: found nan, allowed: 0 or more"),
    ("compare -- torchrun none.py", "names no file SCRIPT.py"),
    ("compare --", "found 'nothing'"),
    ("compare --output setup.py -- python setup.py", "--output: found 'setup.py', allowed: a"),
    ("profile --output pyproject.toml/x", "--output: found 'pyproject.toml/x', allowed: a pa"),
    ("plan olmoe --gpu h100 --write tests", "--write: found 'tests', allowed: a path that ca"),
    ("plan", "give MODEL, or --from-args"),
    ("plan gpt-5", "MODEL: found 'gpt-5', allowed: deepseek-v3"),
    ("plan mixtral-8x7b --context-parallel 3", "attention heads: found 32, allowed: a mult"),
    ("plan mixtral-8x7b --expert-parallel 3", "experts: found 8, allowed: a multiple of 3"),
    ("plan mixtral-8x7b --machine nowhere", 'machine: found "nowhere ('),
    ("warm --from-args --hidden-size 2", "--from-args: --num-attention-heads"),
    ("plan --from-args -- --hidden-size 2 --write=a", "--write: found after --from-args"),
    (
        "warm --from-args --hidden-size wide",
        "argument --hidden-size: found 'wide', allowed: 1 ",
    ),
    ("warm llama-3-70b", "llama-3-70b has no experts"),
])  # fmt: skip
def test_a_wrong_command_line_ends_in_one_line(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    try:
        status = main(command.split())
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    shown = capsys.readouterr().err
    assert status == 2 and said in shown and shown.count("\n") == 1


@pytest.mark.process
def test_a_reader_that_has_enough_is_no_error() -> None:
    words = f"{sys.executable} -m megatron_fluid.cli plan olmoe"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words} | true"], capture_output=True)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_rank_that_was_killed_and_a_node_that_does_not_come_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic import rendezvous
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    killed = ChildFailedError("x.py", {1: ProcessFailure(1, 7, -9, "no file")})
    errors = iter((killed, rendezvous.RendezvousTimeoutError()))
    monkeypatch.setattr(torchrun, "run", lambda _: exec("raise error", {"error": next(errors)}))
    monkeypatch.setattr(PContext, "close", PContext.close)  # which `run` wraps
    assert main(["run", "--nproc-per-node", "2", __file__]) == 128 + 9
    assert "rank 1 was ended by SIGKILL" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--nnodes", "2", "--master-addr", "a", __file__])
    said = "--rdzv-endpoint: found a:29500 (--master-addr), where --nnodes 2 did not meet by --rdz"
    assert said in (text := capsys.readouterr().err) and text.count("\n") == 1


def test_a_missing_requirement_or_a_wrong_variable_is_one_line() -> None:
    wrong = (
        "import os; os.environ.update(MEGATRON_FLUID='maybe', LOCAL_RANK='1'); sys.argv = ['-m']"
    )
    for setup, said in (
        ("sys.modules['torch'] = None", "import of torch halted"),
        (wrong, "megatron_fluid: MEGATRON_FLUID: found 'maybe'"),
    ):
        done = run_program(setup, "plan", "olmoe")
        assert done.returncode == 2 and re.fullmatch(f"{said}.*\n", done.stderr), done.stderr


@pytest.mark.parametrize(("codes", "status"), [([0, -2], 130), ([0, 1], 1), ([130, -9], 137)])
def test_after_a_signal_the_status_is_that_of_a_rank_that_failed(
    codes: list[int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    ranks = {i: SimpleNamespace(proc=SimpleNamespace(returncode=c)) for i, c in enumerate(codes)}

    def stopped(arguments: object) -> None:  # as torchrun's agent does
        try:
            raise SignalException("stopped", signal.SIGINT)
        except SignalException:
            PContext.close(SimpleNamespace(subprocess_handlers=ranks))  # type: ignore[arg-type]
            raise

    monkeypatch.setattr(torchrun, "run", stopped)
    monkeypatch.setattr(PContext, "close", lambda *_: None)  # which `run` wraps
    assert main(["run", __file__]) == status


@pytest.mark.parametrize(
    ("words", "grace_s", "alone"),
    [("", 600, True), ("--grace=5", 5, True), ("--grace 5 --master-port 29500", 5, False)],
)
def test_a_script_has_its_seconds_to_save_and_a_port_that_is_free_or_named(
    words: str, grace_s: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import run as torchrun

    waits: list[int] = []
    started: list[argparse.Namespace] = []
    monkeypatch.setattr("megatron_fluid.cli.run._wait_for_ranks_after_a_signal", waits.append)
    monkeypatch.setattr(torchrun, "run", started.append)
    of_the_script = ["--grace", "7", "--grace=8", "--help"]
    assert main(["run", *words.split(), __file__, *of_the_script]) == 0
    assert waits == [grace_s]
    assert (started[0].standalone, started[0].master_port) == (alone, 29500)
    assert started[0].training_script == __file__
    assert started[0].training_script_args == of_the_script


def _profile_a_small_layer(rank: int, ranks: int, flags: list[str]) -> int:
    small = MoEConfig(hidden_size=32, ffn_hidden_size=48, num_experts=8, top_k=2)
    profile_layer._ON_CPU = 64, small
    sys.argv = ["profile_layer.py", *flags]
    return profile_layer.main()


def _forked(command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> int:
    """What `profile` starts by `run`, on forked ranks and without a wire between them."""
    launch, module = command.index("--nproc_per_node"), profile_layer.__name__
    flags = list(command[command.index(module) + 1 :])
    return max(run_ranks(_profile_a_small_layer, int(command[launch + 1]), flags, backend=""))


def test_profile_traces_both_variants_of_a_layer_and_says_what_was_hidden(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "run_command", _forked)
    # 3 ranks do not divide the layer's usual number of experts.
    assert main(["profile", "--compare", "--output", str(tmp_path), "--ranks", "3"]) == 0
    text = capfd.readouterr().out
    assert (tmp_path / "timeline.html").is_file()
    assert (tmp_path / "baseline" / "moe_layer.json.gz").is_file()
    trace = tmp_path / "fluid" / "moe_layer.json.gz"
    assert f"trace for https://ui.perfetto.dev: {trace}" in text
    assert re.search(r"hidden share +[0-9.]+%", text) and "no communication" not in text
    assert main(["profile", "--trace", str(trace)]) == 0
    assert "hidden share" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.process
def test_profile_starts_the_ranks_of_a_layer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--output", str(tmp_path), "--ranks", "1"]) == 0
    assert str(tmp_path / "moe_layer.json.gz") in capfd.readouterr().out


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
    assert re.search(r"hidden share +0\.0%\n  exposed +1\.00 ms\n", capfd.readouterr().out)
    assert main(["profile", *output, sys.executable, "-c", "raise SystemExit(3)"]) == 3
    os.utime(tmp_path / "out" / "torch_profile" / "rank-0.json.gz", (1, 1))
    assert main(["profile", *output, sys.executable, "-c", "pass"]) == 2
    assert "the program succeeded but wrote no trace" in capfd.readouterr().err


# ---- `python -m megatron_fluid.run SCRIPT`

SCRIPT = """\
import sys
print(__name__, "megatron_fluid" in sys.modules, sys.argv[1:], sys.path[0], __file__)
import neighbour
"""


def test_a_script_sees_what_python_would_show_it_and_the_package(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("print('found')")
    command = [sys.executable, "-m", "megatron_fluid.run", "train.py", "--lr", "1e-3", "-x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = f"__main__ True ['--lr', '1e-3', '-x'] {tmp_path} train.py"
    assert done.stdout.splitlines() == [first, "found"]


def test_a_script_that_is_absent_is_named_beside_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "run: no script is named; usage: python -m", "there is no file absent.py; usage"
    for words, found in (
        ([], missing[0]),
        (["absent.py", "--lr"], missing[1]),
        (["--help"], "^0$"),
    ):
        with pytest.raises(SystemExit, match=found):
            run(words)
    assert capsys.readouterr().out.startswith("usage: python -m megatron_fluid.run SCRIPT")
