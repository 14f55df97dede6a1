"""The commands that the summary of a run proposes: they go on training, fit the machine, and say
how long they take."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = str(Path(__file__).resolve().parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

import next_commands as nc  # noqa: E402
import pretrain_defaults as pd  # noqa: E402


def _args(folder: Path, **given: Any) -> argparse.Namespace:
    """Megatron's arguments of a run of the example without flags, as far as they are looked at."""
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    settings = pd.default_settings({}, pd.Machine(2, False, False, False, False))
    return argparse.Namespace(
        **{**settings, "save": str(folder), "train_samples": None, "curr_iteration": 50, **given}
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four CPU cores, two of them in use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py"])


@pytest.mark.parametrize(
    ("unit", "given"), [("iters", {"train_samples": None}), ("samples", {"train_samples": 64})]
)
def test_the_command_to_train_on_goes_on_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, given: dict[str, Any]
) -> None:
    words = f"--train-{unit} 64 --skip-train --profile --profile-step-end 3 --lr 1e-3".split()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", *words])
    args = _args(tmp_path, train_iters=64, **given)
    found = next(line for line in nc.next_commands(args, None) if "--load" in line).split()
    kept = found[found.index(next(word for word in found if word.endswith(".py"))) + 1 :]
    length = f"--train-{unit} 128 --override-opt-param-scheduler"
    assert kept == f"--lr 1e-3 --load {tmp_path} {length}".split()


def test_every_command_says_how_long_it_takes(tmp_path: Path) -> None:
    lines = nc.next_commands(_args(tmp_path), 0.3)
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles[0] == "train on from the checkpoint (about 60 s):"
    assert titles[1] == "your own text (about 60 s):"  # the same model, as many iterations
    assert re.fullmatch(r"a larger model on 4 ranks \(about \d+ min\):", titles[2])
    assert nc.next_commands(_args(tmp_path), None)[0] == "train on from the checkpoint:"
    stopped = nc.next_commands(_args(tmp_path), 2.0, stopped=True)
    assert stopped[0] == "go on where it stopped (about 5 min):" and "--resume" in stopped[1]


def test_a_run_of_a_tiny_model_tells_no_time_of_a_larger_one(tmp_path: Path) -> None:
    lines = nc.next_commands(_args(tmp_path, hidden_size=16, num_layers=1), 0.3)
    assert lines[0] == "train on from the checkpoint (about 60 s):"
    assert lines[2] == "your own text:"


def _larger(lines: list[str]) -> tuple[str, list[str]]:
    title, command = lines[-2:]
    return title, command.split()


@pytest.mark.parametrize(
    ("cores", "gpus", "ranks"), [(4, 0, 4), (2, 0, 2), (3, 0, 3), (64, 8, 4), (64, 2, 2)]
)
def test_no_more_ranks_than_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    title, words = _larger(nc.next_commands(_args(tmp_path), 0.3))
    assert words[words.index("--nproc_per_node") + 1] == str(ranks)
    assert (f"on {ranks} ranks" in title) == (ranks > 2)
