"""examples/pretrain_gpt_moe.py as a user runs it: real text, checkpoint, resume, evaluation,
summary. Runs are forked (forked_program.py), as each start costs two imports of Megatron.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.test_megatron_training import scalars
from tests.support.forked_program import run_program
from tests.support.fresh_program import run_code

pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt_moe.py"
TINY = shlex.split(
    "--hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 32 --num-experts 4 "
    "--lr 1e-2 --log-interval 1 --eval-iters 2 --micro-batch-size 4 --global-batch-size 16"
)

pytestmark = [pytest.mark.slow]


@dataclass(frozen=True)
class Run:
    code: int
    output: str

    @property
    def losses(self) -> dict[int, float]:
        """By iteration, from Megatron's log, whose second line is the mean of the first two."""
        found = re.findall(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+)", self.output)
        losses = {int(iteration): float(loss) for iteration, loss in found}
        first = min(losses)
        losses[first + 1] = 2 * losses[first + 1] - losses[first]
        return losses

    def summary(self, name: str) -> str:
        ending = self.output.split("run complete", 1)[1]
        found = re.search(rf"^{name} *: (.*(?:\n {{3,}}.*)*)", ending, re.MULTILINE)
        assert found is not None, f"no row {name!r} in the summary"
        return found[1]


VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEGATRON_FLUID_CPU": "1"}


def forked(folder: Path, ranks: int, flags: str) -> Run:
    return Run(*run_program(SCRIPT, ranks, [*TINY, *shlex.split(flags)], folder, VARIABLES))


def succeed(folder: Path, ranks: int, flags: str) -> Run:
    """A run with Megatron's full log that must end well."""
    done = forked(folder, ranks, f"{flags} --fluid-verbose")
    assert done.code == 0, done.output[-6000:]
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("pretrain")
    (where / "text").mkdir()
    for name in ("argparse", "textwrap", "typing"):
        source = Path(os.__file__).with_name(f"{name}.py")
        (where / "text" / f"{name}.txt").write_bytes(source.read_bytes())
    return where


@pytest.fixture(scope="module")
def trained(folder: Path) -> Run:
    return succeed(folder, 2, "--text-path text --train-iters 10 --save c --save-interval 5")


def test_the_loss_falls_on_real_text_tokenised_once(trained: Run, folder: Path) -> None:
    assert sorted(trained.losses) == list(range(1, 11))
    assert 5.2 < trained.losses[1] < 6.5  # about ln(257) before anything is learned
    assert trained.losses[10] < trained.losses[1] - 1.0
    assert "tokenising text" in trained.output
    (built,) = (folder / "runs" / "text").glob("*/dataset.json")
    names = {path.name for path in built.parent.iterdir()}
    assert names >= {"train.bin", "train.idx", "valid.bin", "valid.idx"}


def test_the_summary_says_what_was_done(trained: Run) -> None:
    assert "overlapped MoE layer: 2 on (rounds" in trained.summary("patches")
    assert trained.summary("ranks").startswith("2 x CPU, gloo; parallel: expert 2")
    assert "text: 3 files, bytes" in trained.summary("data")
    assert re.match(r"[\d,]+ tokens/s", trained.summary("speed"))
    first, last = re.findall(r"(\d\.\d{4}) ", trained.summary("training loss").replace(" ->", " "))
    assert float(first) == pytest.approx(trained.losses[1], abs=1e-4)
    assert float(last) == pytest.approx(trained.losses[10], abs=1e-4)
    assert trained.summary("checkpoint") == "c (iteration 10)"
    resume = trained.summary("next").split("\n")[1]
    assert "--load c --train-iters 20 --override-opt-param-scheduler" in resume
    assert "--train-iters 10" not in resume


def test_the_held_out_loss_is_megatrons(trained: Run) -> None:
    said = r"validation loss at iteration 10 on validation set \| lm loss value: ([0-9.E+-]+)"
    (megatron,) = re.findall(said, trained.output)
    said = r"^(.+) nats a token after iteration 10, perplexity ([\d.]+), ([\d.]+) bits a byte"
    (row,) = re.findall(said, trained.summary("held-out loss"))
    loss, perplexity, bits = map(float, row)
    assert loss == pytest.approx(float(megatron), abs=1e-4)
    assert perplexity == pytest.approx(2.718281828**loss, rel=1e-2)
    # A little above: the ends of documents are tokens, not bytes.
    assert loss / 0.6931 <= bits < 1.02 * loss / 0.6931


def test_logs_for_tensorboard(trained: Run, folder: Path) -> None:
    pytest.importorskip("tensorboard")
    logged = scalars(folder / "c" / "tensorboard")
    assert logged["lm loss"] == pytest.approx(list(trained.losses.values()), rel=1e-5)
    assert "lm loss validation" in logged


def test_resuming_goes_on_as_if_never_stopped(trained: Run, folder: Path) -> None:
    flags = "--text-path text --train-iters 10 --load c --ckpt-step 5 --no-defaults save"
    resumed = succeed(folder, 2, flags)
    assert sorted(resumed.losses) == [6, 7, 8, 9, 10]
    for iteration, loss in resumed.losses.items():
        assert loss == pytest.approx(trained.losses[iteration], rel=1e-5)
    assert "tokenising text" not in resumed.output  # the cache served it
    assert resumed.summary("held-out loss") == trained.summary("held-out loss")
    assert resumed.summary("checkpoint").startswith("none")


def test_one_rank_with_files_of_its_own_that_stops_early(folder: Path) -> None:
    flags = "--text-path text/argparse.txt text/typing.txt --train-iters 6 --exit-interval 4"
    done = succeed(folder, 1, f"{flags} --no-defaults save")
    assert sorted(done.losses) == [1, 2, 3, 4] and done.losses[4] < done.losses[1]
    assert "2 files, bytes" in done.summary("data") and "validation loss" not in done.output


def errors(done: Run) -> list[str]:
    """The lines of a run that speak of an error; there must be no traceback."""
    assert "Traceback" not in done.output, done.output[-3000:]
    return [line for line in done.output.splitlines() if "error" in line.lower()]


def test_a_run_is_never_overwritten(trained: Run, folder: Path) -> None:
    before = sorted(path.name for path in (folder / "c").iterdir())
    done = forked(folder, 1, "--text-path text --train-iters 2 --save c")
    assert done.code == 2
    (line,) = errors(done)
    assert line.startswith("error: c holds a run (its last checkpoint: 10)") and "--resume" in line
    assert sorted(path.name for path in (folder / "c").iterdir()) == before


@pytest.mark.parametrize("flags", ["--save a_file/run", "--train-iters 0 --save nothing"])
def test_what_cannot_be_done_is_found_before_anything_long(folder: Path, flags: str) -> None:
    (folder / "a_file").write_text("")
    done = forked(folder, 1, flags)
    assert done.code == 2 and "tokenising" not in done.output
    said = ("a_file/run: this folder for the run cannot be", "--train-iters: found 0, allowed: 1 o")
    assert errors(done)[0].startswith(tuple(f"error: {text}" for text in said))


def test_without_a_launcher_the_one_to_take_is_named(folder: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    code = f"import os, runpy, sys; os.chdir({str(folder)!r}); sys.argv[0] = {str(SCRIPT)!r}; "
    code += f"sys.path[0] = {str(SCRIPT.parent)!r}; runpy.run_path(sys.argv[0], None, '__main__')"
    done = run_code(code, "--save", "alone", environment=kept)
    assert done.returncode == 2
    (line,) = errors(Run(done.returncode, done.stdout + done.stderr))
    assert line.startswith("error: MASTER_ADDR") and "`megatron-fluid run --nproc" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_or_one_saves_and_sums_up_and_the_run_resumes(
    folder: Path, number: signal.Signals
) -> None:
    saves = f"stopped_{number}"
    flags = f"--text-path text --save {saves} --train-iters"
    launcher = [sys.executable, "-m", "megatron_fluid.cli", "run", "--nproc-per-node", "2"]
    kept = {name: value for name, value in os.environ.items() if "MEGATRON_FLUID" not in name}
    with subprocess.Popen(
        [*launcher, str(SCRIPT), *TINY, *flags.split(), "100000"],
        cwd=folder,
        env=kept | VARIABLES | {"CUDA_VISIBLE_DEVICES": ""},  # every machine does the same
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if line.startswith("iteration      3/100000"):
                    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                    second = int(children.read_text().split()[1])
                    os.kill(second if number == signal.SIGTERM else process.pid, number)
        finally:
            process.kill()
    done = Run(process.returncode, "".join(seen))
    assert done.code == 128 + number, done.output[-3000:]
    assert "Traceback" not in done.output
    assert "megatron_fluid: run stopped by a signal" in done.output
    saved = int((folder / saves / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < 1000
    assert "--resume" in done.output.split("next ")[1].split("\n")[1]
    if number == signal.SIGTERM:
        return  # it resumes as the other does

    resumed = forked(folder, 2, f"{flags} {saved + 2} --resume")
    assert resumed.code == 0, resumed.output[-3000:]
    shown = [line for line in resumed.output.splitlines() if not line.startswith("INFO:")]
    assert len(shown) < 100, "the terminal shows little (pytest's forks INFO); the log has it all"
    assert f"iteration {saved + 1}/{saved + 2}  loss " in resumed.output
    losses = json.loads((folder / saves / "losses.json").read_text())["train"]
    assert list(map(int, losses)) == list(range(1, saved + 3))
    starts = json.loads((folder / saves / "run.json").read_text())
    assert [start["resumed_from"] for start in starts] == [None, str(saved)]
    assert json.loads((folder / saves / "data.json").read_text())["files"] == 3
    assert "iteration" in (folder / saves / "log-1.txt").read_text()  # Megatron's last rank
