"""What rank 0 prints once, when the model has been built: the patches, and which features are
on."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron_fluid import patches
from megatron_fluid.patches.tables import startup_table

__all__ = ["features", "note_feature", "setup_model_and_optimizer", "withdraw_feature"]

_features: dict[tuple[str, bool, str], int] = {}


def note_feature(feature: str, on: bool, reason: str) -> None:
    """Record, for the start-up table, that a feature is on or off for one more object (a layer,
    say), and why."""
    key = (feature, on, reason)
    _features[key] = _features.get(key, 0) + 1


def withdraw_feature(feature: str, on: bool, reason: str) -> None:
    """Take back what was noted for one object, of which something else has turned out to be
    true."""
    key = (feature, on, reason)
    if key in _features:
        _features[key] -= 1
        if not _features[key]:
            del _features[key]


def features() -> list[tuple[str, bool, str, int]]:
    """What was noted: feature, on or off, reason, and for how many objects."""
    return [(*key, count) for key, count in _features.items()]


def setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Print the table after Megatron has built its model."""

    @functools.wraps(original)
    def fluid_setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        _note_left_out(built)
        _print_once()
        return built

    return fluid_setup_model_and_optimizer


def _note_left_out(built: Any) -> None:
    """Layers whose __init__ is not patched could not note themselves. Their forwards may be patched
    all the same: they are asked now."""
    for patch, module in (
        ("moe-layer-init", "moe.layer"),
        ("self-attention-init", "attention.self_attention"),
    ):
        if patches.off_reason(patch) is not None:
            announce_built = importlib.import_module(
                f"megatron_fluid.patches.{module}"
            ).announce_built
            for layer in [layer for chunk in built[0] for layer in chunk.modules()]:
                announce_built(layer)


@functools.cache
def _print_once() -> None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(startup_table(patches.report(), features()), flush=True)
