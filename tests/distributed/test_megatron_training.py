"""`megatron.training.pretrain` from end to end, on CPU ranks: evaluation and TensorBoard."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fluid.profiling.traces import read_document
from tests.support.forked_program import run_program
from tests.support.small_training import ARGUMENTS, PROGRAM, losses

pytest.importorskip("megatron.training")

MEGATRON_LM = os.environ.get("MEGATRON_LM")
TOKENS = ("tokens-per-expert-max-over-mean", "layer-mean-tokens-per-expert-max-over-mean")
CPU_MODE = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a GPU"
)
FIGURES = ("iteration-ms", "tokens-per-s", "tflops-per-gpu", *TOKENS)


def scalars(events: Path) -> dict[str, list[float]]:
    """The values of each name in a file of TensorBoard's."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(events)).Reload()
    return {name: [e.value for e in board.Scalars(name)] for name in board.Tags()["scalars"]}


def _train(folder: Path, *arguments: str) -> str:
    """Train on two ranks, and return what both printed."""
    code, output = run_program(PROGRAM, 2, [*ARGUMENTS, *arguments], folder, {})
    assert code == 0, output[-4000:]
    return output


@CPU_MODE
def test_it_trains_evaluates_and_logs_its_speed(tmp_path: Path) -> None:
    """Resuming: test_pretrain_example.py with dropout, tests/faults/test_lost_rank.py sharded."""
    board = tmp_path / "board"
    flags = ("--expert-model-parallel-size", "2", "--use-distributed-optimizer")
    log = _train(tmp_path, *flags, "--train-iters", "5", "--tensorboard-dir", str(board))
    found = losses(log)
    assert len(found) == 7, "five iterations, validation, test"
    assert found[4] < found[0]
    (events,) = board.glob("events.out.tfevents.*")
    logged = scalars(events)
    assert {len(logged[f"megatron_fluid/{name}"]) for name in FIGURES} == {4}, "iterations 1 to 4"
    assert all(value > 0 for name in FIGURES for value in logged[f"megatron_fluid/{name}"])
    worst, mean = (logged[f"megatron_fluid/{name}"] for name in TOKENS)
    assert all(1 <= less <= most for most, less in zip(worst, mean, strict=True))


@CPU_MODE
def test_the_steps_of_a_training_are_drawn_by_rank_0(tmp_path: Path) -> None:
    board = tmp_path / "board"
    flags = ["--expert-model-parallel-size", "2", "--train-iters", "3", "--eval-iters", "0"]
    flags += ["--fluid-profile-steps", "2:3", "--tensorboard-dir", str(board)]
    log = _train(tmp_path, *flags)
    assert len(losses(log)) >= 3 and "steps 2 to 3, rank 1" not in log
    folder = board / "profile" / "steps-2-3"
    assert f"megatron_fluid: steps 2 to 3, rank 0: {folder / 'timeline.html'}" in log
    page = (folder / "timeline.html").read_text()
    words = "steps 2 to 3, rank 0", "<span>2 steps</span>", "hidden share", "sent by this rank"
    assert all(word in page for word in words)
    events = read_document(folder / "trace.json.gz")["traceEvents"]
    (mark,) = [e for e in events if e.get("name") == "megatron_fluid.step" and e["ph"] == "X"]
    optimizer = [e for e in events if str(e.get("name")).startswith("Optimizer.step")]
    assert len(optimizer) == 2 * 2, "two steps, each of the dense parameters and the experts"
    assert all(mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"] for e in optimizer)


@CPU_MODE
def test_settings_for_a_gpu_are_adapted_and_said_once(tmp_path: Path) -> None:
    flags = "--context-parallel-size 2 --moe-grouped-gemm --train-iters 1".split()
    said = [line for line in _train(tmp_path, *flags).splitlines() if "CPU mode" in line]
    (line,) = [line for line in said if "distributed_backend" in line]
    for change in ("nccl -> gloo", "transformer_engine -> local", "['p2p'] -> ['a2a']"):
        assert change in line
    assert "moe_grouped_gemm True -> False" in line


@pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_lms_own_pretrain_gpt_unchanged(ranks: int, tmp_path: Path) -> None:
    for file in Path(str(MEGATRON_LM)).glob("*.py"):  # run on the megatron-core that is installed
        shutil.copy(file, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", "megatron_fluid.run"]
    command += [str(tmp_path / "pretrain_gpt.py"), *ARGUMENTS]
    command += ["--expert-model-parallel-size", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(losses(done.stdout)) == 6 and all(map(math.isfinite, losses(done.stdout)))
