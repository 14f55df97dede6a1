"""`--fluid-profile-steps` in a training under Megatron, on CPU ranks."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from megatron_fluid.profiling.traces import read_document
from tests.support.launch import run_ranks
from tests.support.pretrain_flags import ARGUMENTS, losses

pytest.importorskip("megatron.training")

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "pretrain_program.py"


def _program(rank: int, world_size: int, arguments: list[str], log: str) -> None:
    sys.argv = [str(PROGRAM), *ARGUMENTS, *arguments]
    with open(f"{log}-{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        runpy.run_path(str(PROGRAM), run_name="__main__")
        sys.stdout.flush()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode is for machines without a GPU")
def test_the_steps_of_a_training_are_drawn_by_rank_0(tmp_path: Path) -> None:
    board = tmp_path / "board"
    flags = ["--expert-model-parallel-size", "2", "--train-iters", "3", "--eval-iters", "0"]
    flags += ["--fluid-profile-steps", "2:3", "--tensorboard-dir", str(board)]
    run_ranks(_program, 2, flags, str(tmp_path / "log"), backend="", timeout_s=200)
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in (0, 1)]
    assert len(losses(logs[1])[:3]) == 3
    folder = board / "profile" / "steps-2-3"
    assert f"megatron_fluid: steps 2 to 3, rank 0: {folder / 'timeline.html'}" in logs[0]
    assert "steps 2 to 3" not in logs[1]
    page = (folder / "timeline.html").read_text()
    for word in ("steps 2 to 3, rank 0", '"2 steps"', "hidden share", "sent by this rank"):
        assert word in page
    events = read_document(folder / "trace.json.gz")["traceEvents"]
    (mark,) = [e for e in events if e.get("name") == "megatron_fluid.step" and e["ph"] == "X"]
    optimizer = [e for e in events if str(e.get("name")).startswith("Optimizer.step")]
    assert len(optimizer) == 2 * 2, (
        "two steps, each of the dense parameters' optimizer and the experts'"
    )
    assert all(mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"] for e in optimizer)
