"""Megatron's errors about an optimizer of another expert parallelism, in words of its flag.

Both texts are Megatron's own, of EP 2 resumed with EP 1 and of EP 1 resumed with EP 2.
"""

from types import SimpleNamespace

import pytest

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.checkpoint_errors import load_checkpoint

pytestmark = pytest.mark.skipif(
    not patches.megatron_installed(), reason="megatron-core is not installed"
)

ERRORS = (
    ValueError("Could not find parameter group with key (None, 0.003) in loaded checkpoint."),
    RuntimeError("Expected 2 entries in state dict, but got 4."),
)


def _load(error: Exception) -> None:
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


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ValueError, match="of another kind"):
        _load(ValueError("of another kind"))
