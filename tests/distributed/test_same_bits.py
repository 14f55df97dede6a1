"""Two runs of a training give the same bits, and a bit that differs is seen."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save

from tests.support.small_training import ITERATIONS, SHARDED, train
from tools.compare_two_runs import differences, main


@pytest.mark.slow
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
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        write(folder, 4.25, torch.arange(6.0))
    return folders


def write(folder: Path, loss: float, weight: torch.Tensor) -> None:
    state = {"weight": weight, "step": torch.ones(1)}
    save(state, checkpoint_id=folder / "iter_0000004", no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    (folder / "losses.json").write_text(json.dumps({"train": {"1": 4.5, "2": loss}}))


def test_a_loss_or_a_tensor_that_differs_is_named(runs: tuple[Path, Path]) -> None:
    assert main([*map(str, runs)]) == 0
    other = torch.arange(6.0)
    other[2] = torch.nextafter(other[2], torch.tensor(9.0))  # one bit
    write(runs[1], 4.250001, other)
    loss, tensors = differences(*runs)
    assert loss == "train loss of iteration 2: 4.25, then 4.250001"
    assert tensors.startswith("tensor weight: ")


def test_a_run_without_tensors_is_no_proof(runs: tuple[Path, Path]) -> None:
    for run in runs:
        save({"note": "none"}, checkpoint_id=run / "iter_0000004", no_dist=True)
    with pytest.raises(FileNotFoundError, match="no tensors in"):
        differences(*runs)
