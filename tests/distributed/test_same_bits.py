"""Two runs of the main job give the same bits, and a bit that differs is seen."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from tools.compare_two_runs import differences, main

TINY = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 32 "
    "--num-experts 4 --moe-router-topk 2 --micro-batch-size 2 --global-batch-size 8 --eval-iters 1 "
    "--train-iters 4"
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU ranks")
def test_two_runs_of_the_main_job_give_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.training")
    pytest.importorskip("tqdm")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a short text\n" for i in range(4000)))
    flags = [*TINY, "--text-path", str(text), "--text-cache", str(tmp_path / "cache")]
    code = main(["--nproc-per-node", "2", "--", *flags])
    said = capfd.readouterr().out
    assert code == 0, said
    assert "the same bits: " in said


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
