"""Two runs of a training give the same bits, and a bit that differs is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.faulty_training import ITERATIONS, SHARDED, train
from tools.compare_two_runs import differences


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode")
def test_two_runs_of_a_training_give_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        saved = ("--save", str(folder), SHARDED)
        training = train(tmp_path, f"log of {folder.name}", *saved, ranks=2).require_success()
        losses = dict(enumerate(training.losses, 1))
        (folder / "losses.json").write_text(json.dumps({"all": losses}))
    assert len(losses) == ITERATIONS + 2
    assert differences(*folders) == []


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two alike, written as a training writes them."""
    for name in ("first", "second"):
        checkpoint = tmp_path / name / "iter_0000004"
        checkpoint.mkdir(parents=True)
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("4")
        (tmp_path / name / "losses.json").write_text(json.dumps({"train": {"1": 4.5, "2": 4.25}}))
        (checkpoint / "__0_0.distcp").write_bytes(b"tensors")
    return tmp_path / "first", tmp_path / "second"


def test_a_loss_or_a_tensor_that_differs_is_named(runs: tuple[Path, Path]) -> None:
    assert differences(*runs) == []
    (runs[1] / "losses.json").write_text(json.dumps({"train": {"1": 4.5, "2": 4.250001}}))
    (runs[1] / "iter_0000004" / "__0_0.distcp").write_bytes(b"tensorz")
    loss, tensors = differences(*runs)
    assert loss == "train loss of iteration 2: 4.25, then 4.250001"
    assert tensors.startswith("iter_0000004/__0_0.distcp: ")


def test_a_run_without_a_checkpoint_is_no_proof(runs: tuple[Path, Path]) -> None:
    for run in runs:
        (run / "iter_0000004" / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match="no tensors in"):
        differences(*runs)
