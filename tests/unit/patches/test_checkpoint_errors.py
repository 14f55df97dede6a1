"""Megatron's errors about a checkpoint of another model, or an optimizer of another expert
parallelism, in words of the flags.

Both texts are Megatron's own, of EP 2 resumed with EP 1 and of EP 1 resumed with EP 2.
"""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.checkpoint_errors import load_checkpoint, settings_that_differ

pytestmark = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)

ERRORS = (
    ValueError("Could not find parameter group with key (None, 0.003) in loaded checkpoint."),
    RuntimeError("Expected 2 entries in state dict, but got 4."),
)


def _load(error: BaseException) -> None:
    def original() -> None:
        raise error

    load_checkpoint(original)()


@pytest.mark.parametrize("error", ERRORS, ids=["saved with", "saved without"])
def test_the_flag_and_the_way_out_are_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(num_experts=8, expert_model_parallel_size=1)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    with pytest.raises(ConfigError, match="--expert-model-parallel-size: found 1") as caught:
        _load(error)
    assert "--no-load-optim" in str(caught.value) and caught.value.__cause__ is error
    args.num_experts = None
    with pytest.raises(type(error), match=str(error)[:20]):
        _load(error)


def test_other_errors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.training.get_args", lambda: SimpleNamespace(num_experts=8))
    with pytest.raises(ValueError, match="of another kind"):
        _load(ValueError("of another kind"))


SAVED = {"num_layers": 2, "hidden_size": 128, "num_experts": 8, "add_bias_linear": False}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with what Megatron reads of a distributed checkpoint to learn its arguments."""
    state = {"args": Namespace(**SAVED, seq_length=64), "iteration": 7, "checkpoint_version": 3.0}
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    torch.save(state, folder / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backends | common))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    return tmp_path


def _settings(folder: Path, **changes: object) -> Namespace:
    megatrons = {
        **{"non_persistent_global_ckpt_dir": None, "non_persistent_ckpt_type": None},
        **{"ckpt_step": None, "ckpt_format": "torch_dist", "exit_on_missing_checkpoint": False},
        **{"auto_detect_ckpt_format": False, "use_dist_ckpt": True, "seq_length": 128},
    }
    return Namespace(load=str(folder), **{**megatrons, **SAVED, **changes})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size mismatch for decoder.layers.0.mlp.router.weight"),
        CheckpointException("load", {}),  # torch's, a BaseException
    ],
    ids=["one file a rank", "distributed"],
)
def test_a_checkpoint_of_another_model_names_the_settings_that_differ(
    error: BaseException, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _settings(checkpoint, num_layers=4, add_bias_linear=True)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    with pytest.raises(ConfigError) as caught:
        _load(error)
    assert caught.value.__cause__ is error
    assert str(caught.value) == (
        f"--load {checkpoint}: the checkpoint does not fit this model: --num-layers: found 4, in "
        "the checkpoint 2; add_bias_linear (--disable-bias-linear): found True, in the checkpoint "
        "False; allowed: the checkpoint's own settings (--use-checkpoint-args takes them), or "
        "another folder"
    )


def test_a_checkpoint_of_the_same_model_keeps_its_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for args in (_settings(checkpoint), _settings(checkpoint.parent / "nowhere", num_layers=4)):
        monkeypatch.setattr("megatron.training.get_args", lambda args=args: args)
        with pytest.raises(OSError, match="disk"):
            _load(OSError("the disk is gone"))


def test_ranks_count_where_the_format_keeps_them_apart() -> None:
    mine = Namespace(tensor_model_parallel_size=2, ckpt_format="torch")
    saved = Namespace(tensor_model_parallel_size=1)
    found = "--tensor-model-parallel-size: found 2, in the checkpoint 1"
    assert settings_that_differ(mine, saved) == [found]
    mine.ckpt_format = "torch_dist"
    assert settings_that_differ(mine, saved) == [] == settings_that_differ(mine, None)


def test_query_groups_count_where_there_are_some() -> None:
    mine = Namespace(num_query_groups=1, group_query_attention=False)
    saved = Namespace(num_query_groups=4, group_query_attention=False)
    assert settings_that_differ(mine, saved) == []
    mine.group_query_attention = True
    named = [text.partition(":")[0] for text in settings_that_differ(mine, saved)]
    assert named == ["--num-query-groups", "--group-query-attention"]
