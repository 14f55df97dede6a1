"""`megatron-fluid compare`, on a training that is played by a small script."""

import sys
from pathlib import Path

import pytest

from megatron_fluid.cli import compare, main
from megatron_fluid.cli.compare import _environment, prepare, read_log
from megatron_fluid.profiling.compare_page import Step

# Writes Megatron's lines, with the package twice as fast. For that import it is started as it is.
_TRAINING = """
import os, sys
if not sys.argv:
    import megatron_fluid
assert "--save" not in sys.argv and "--log-interval" in sys.argv, sys.argv
on = not os.environ.get("MEGATRON_FLUID_DISABLE_PATCH")
assert on or not any(word.startswith("--fluid") for word in sys.argv), sys.argv
if on and not os.environ.get("SILENT"):
    print("feature               state  objects  reason")
    print("--------------------  -----  -------  ------")
    print("overlapped MoE layer  on     2        rounds")
    print("attention             off    2        one rank")
    print("building datasets")
drift = float(os.environ.get("DRIFT", 0)) if on else 0.0
missing = int(os.environ.get("MISSING", 0)) if on else 0
for i in range(1, int(sys.argv[sys.argv.index("--exit-interval") + 1]) + 1):
    if i == missing:
        continue
    loss, ms = 10.0 / i + (drift if i > 1 else 0.0), 50.0 if on else 100.0
    shown = f"lm loss: {loss:.6E} | " if loss >= 0.0 else ""  # as Megatron does
    print(f" [2026-11-27] iteration {i:8}/ 100 | elapsed time per iteration (ms): {ms} | "
          f"{shown}loss scale: 1.0 | grad norm: {2.0 / i:.3f} |")
print("[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 512.0 |")
sys.exit(int(os.environ.get("STATUS", 0)))
"""

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(_TRAINING)
    flags = ["--num-layers", "2", "--save", "checkpoints", "--fluid-moe-backend", "rounds"]
    return ["--", sys.executable, str(script), *flags]


@pytest.mark.process
def test_a_page_says_how_much_faster_and_that_losses_agree(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--steps", "6", "--warm-up", "2", "--output", str(tmp_path / "out")]
    assert main([*words, *command]) == 0
    said = capsys.readouterr().out
    assert "2.00 times as fast: 100.0 ms an iteration -> 50.0 ms" in said
    assert "of an iteration: 100.0 to 100.0 ms -> 50.0 to 50.0 ms" in said
    assert "losses agree" in said and "512 MiB -> 512 MiB" in said
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<h1>2.00 times as fast" in page and page.count("<svg") == 4
    started = page[page.index("What was on") : page.index("The command")]
    assert "overlapped MoE layer  on" in started and "attention             off" in started
    assert "building datasets" not in started
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000


@pytest.mark.process
@pytest.mark.parametrize(("name", "value", "said"), [
    ("DRIFT", "0.01", "losses agree: with and without the package they differ by 0.00"),
    ("DRIFT", "0.5", "losses DIFFER: with and without the package they differ by 0."),
    ("DRIFT", "nan", "losses DIFFER: with the package iteration 2 has no finite loss\n"),
    ("SILENT", "1", "losses agree: with and without the package they differ by nothing"),
    ("MISSING", "1", "losses DIFFER: with the package iteration 1 has no finite loss\n"),
    ("MISSING", "3", "losses DIFFER: with the package iteration 3 has no finite loss\n"),
])  # fmt: skip
def test_the_exit_status_says_whether_losses_agree(
    name: str, value: str, said: str, command: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without a page: one of such losses is drawn in tests/unit/profiling/test_compare_page.py."""
    monkeypatch.setattr(compare, "write_page", lambda comparison, folder: [])
    monkeypatch.setenv(name, value)
    words = ["compare", "--steps", "4", "--warm-up", "1", "--output", str(tmp_path / "out")]
    assert main([*words, *command]) == ("DIFFER" in said)
    assert said in (text := capsys.readouterr().out)
    assert ("no sign of this package in" in text) is (name == "SILENT")


@pytest.mark.process
def test_a_run_that_fails_ends_the_comparison_with_its_status(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "7")
    assert main(["compare", "--output", str(tmp_path / "out"), *command]) == 7
    assert not (tmp_path / "out" / "compare.html").exists()


@pytest.mark.process
def test_a_program_that_is_no_training_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # It is said to import the package, so that no module that imports Megatron is started first.
    (tmp_path / "x.py").write_text("print('hello')\nif 0:\n import megatron_fluid")
    words = ["compare", "--output", str(tmp_path), "--", sys.executable, str(tmp_path / "x.py")]
    assert main(words) == 2
    assert "it must be a Megatron training" in capsys.readouterr().err


def test_the_script_is_started_with_the_package_unless_it_imports_it(tmp_path: Path) -> None:
    plain, own = tmp_path / "plain.py", tmp_path / "own.py"
    plain.write_text("import torch")
    own.write_text("import megatron_fluid")
    end = ["--exit-interval", "5", "--log-interval", "1"]
    runner = ["-m", "megatron_fluid.run"]
    left_out = "--log-interval=10 --fluid-disable-patch moe-layer peer-watch"
    flags, kept = f"--lr -1e-4 {left_out} --x".split(), ["--lr", "-1e-4", "--x"]
    launcher = ["torchrun", "--nproc-per-node", "2"]
    begin = [*launcher, *runner, str(plain)]
    assert prepare([*launcher, str(plain), *flags], 5, on=False) == [*begin, *kept, *end]
    assert prepare(begin, 5, on=True) == [*begin, *end]
    assert prepare(["python", str(own)], 5, on=True) == ["python", str(own), *end]
    assert prepare([str(own)], 5, on=True) == [sys.executable, str(own), *end]
    program = "megatron-fluid run --nproc-per-node 2".split()
    example = str(ROOT / "examples/pretrain_gpt_moe.py")  # of the README
    assert prepare([*program, example], 5, on=True) == [*program, example, *end]


def test_steps_without_a_gradient_norm_are_read() -> None:
    line = " iteration  3/ 9 | elapsed time per iteration (ms): 1.5 | lm loss: 2.0E+00 | x: 1 |"
    assert read_log(f"{line}\n").steps == [Step(3, 1.5, 2.0, None)]


@pytest.mark.parametrize("cut", ["iteration 4/ 9 | lm loss: 2.0E+", "[Rank 0] max allocated: ."])
def test_a_line_that_is_cut_is_left_out(cut: str) -> None:
    for log in (read_log(cut), read_log(f"{cut}\n")):
        assert not log.steps and log.memory_mib is None


def test_a_line_without_a_loss_is_a_step_whose_loss_is_nan() -> None:
    begin = " iteration {}/ 9 | elapsed time per iteration (ms): 1.5 |"
    end = " number of skipped iterations:   {} | number of nan iterations:   {} |"
    lines = [
        begin.format(1) + end.format(1, 0),  # the loss scale was too large
        begin.format(2) + " lm loss: 2.0 |" + end.format(0, 0),
        begin.format(3) + end.format(0, 0),
        begin.format(4) + end.format(1, 1),
    ]
    lines.append("")
    found = [(step.iteration, str(step.loss)) for step in read_log("\n".join(lines)).steps]
    assert found == [(2, "2.0"), (3, "nan"), (4, "nan")]
    assert len(read_log("\n".join(lines[2:])).steps) == 2, "all may be lost from the first on"


def test_both_runs_are_told_what_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUID", "off")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _environment(True)["MEGATRON_FLUID"] == "on"
    assert _environment(False)["MEGATRON_FLUID_CPU"] == "1"  # the flag --fluid-cpu is dropped
