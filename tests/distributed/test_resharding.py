"""A checkpoint is resumed under another split of the model: the loss goes on as without a stop, or
one line says which flag stands in the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.faulty_training import FIRST_SAVE, Training, begin_from, train

pytest.importorskip("megatron.training")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode"),
]

# Not the distributed optimizer, whose default format is bound to a split; and no balancing loss,
# which is taken over a rank's own tokens, so that each split would have its own. The vocabulary is
# padded to a multiple of this times TP: alike with 1 and 2.
COMMON = ("--moe-router-load-balancing-type", "none", "--make-vocab-size-divisible-by", "64")


def resume(
    source: Path, folder: Path, ranks: int, *split: str, from_: int = FIRST_SAVE
) -> Training:
    saved = begin_from(source, folder / "saved", from_)
    place = ("--load", str(saved), "--save", str(saved))
    return train(folder, "log", *COMMON, *place, *split, ranks=ranks)


@pytest.fixture(scope="module")
def ep2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[float]]:
    """Checkpoints of two ranks with EP2 (TP1), and all losses."""
    folder = tmp_path_factory.mktemp("ep2")
    through = train(folder, "log", *COMMON, "--save", str(folder / "saved"), ranks=2)
    return folder / "saved", through.require_success().losses


@pytest.fixture(scope="module")
def ep4(
    ep2: tuple[Path, Sequence[float]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Training]:
    """Four ranks with EP4 that went on from EP2's first save: their checkpoints and their run."""
    folder = tmp_path_factory.mktemp("ep4")
    resumed = resume(ep2[0], folder, 4, "--expert-model-parallel-size", "4").require_success()
    return folder / "saved", resumed


def test_the_loss_goes_on_from_ep2_under_ep4(
    ep2: tuple[Path, Sequence[float]], ep4: tuple[Path, Training]
) -> None:
    whole, resumed = ep2[1], ep4[1]
    assert resumed.losses[0] == pytest.approx(whole[FIRST_SAVE], rel=1e-5)
    assert resumed.losses[-2:] == pytest.approx(whole[-2:], rel=1e-5)


def test_the_loss_goes_on_from_tp1_under_tp2(
    ep2: tuple[Path, Sequence[float]], tmp_path: Path
) -> None:
    saved, whole = ep2
    split = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    split += ("--expert-tensor-parallel-size", "1")
    resumed = resume(saved, tmp_path, 2, *split).require_success()
    assert resumed.losses[0] == pytest.approx(whole[FIRST_SAVE], rel=1e-5)
    assert resumed.losses[-2:] == pytest.approx(whole[-2:], rel=1e-5)


def test_one_expert_parallel_rank_goes_on_from_ep4_with_the_weights_alone(
    ep2: tuple[Path, Sequence[float]], ep4: tuple[Path, Training], tmp_path: Path
) -> None:
    """With the optimizer's state Megatron itself refuses it."""
    last = 2 * FIRST_SAVE  # saved by the ranks of EP4
    weights = ("--expert-model-parallel-size", "1", "--no-load-optim")
    anew = resume(ep4[0], tmp_path, 2, *weights, from_=last).require_success()
    assert anew.losses[0] == pytest.approx(ep2[1][last], rel=1e-5)  # before its first step
