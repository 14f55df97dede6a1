"""Megatron's error about the optimizer of a checkpoint, in words of the flags that caused it."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_fluid.errors import ConfigError

__all__ = ["load_checkpoint"]


# What Megatron says where experts were saved with expert parallelism, and without it.
_TEXTS = ("Could not find parameter group", "entries in state dict, but got")


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `megatron.training.checkpointing.load_checkpoint`: an optimizer whose parameter groups
    are not the checkpoint's is a ConfigError about expert parallelism, which divides them."""

    @functools.wraps(original)
    def fluid_load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            from megatron.training import get_args

            if not any(text in str(error) for text in _TEXTS) or not get_args().num_experts:
                raise
            raise ConfigError.of(
                "--expert-model-parallel-size",
                get_args().expert_model_parallel_size,
                "1 only if the checkpoint was saved with 1, and any other size only if it was "
                "saved with another than 1 (Megatron's optimizer keeps experts in a group of their "
                "own under expert parallelism alone); or --no-load-optim, which starts the "
                "optimizer anew",
            ) from error

    return fluid_load_checkpoint
