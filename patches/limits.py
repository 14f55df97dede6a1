"""Limits: settings under which Megatron's own path is kept, with when they count and why.

Each part of Megatron that is replaced has one table of them (moe/limits.py, attention/limits.py).
Decisions, the start-up report and docs/compatibility.md are made from these tables.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_fluid.config import FluidConfig

__all__ = ["Limit", "first_reason", "offloads", "remedy"]

# The flag that lifts a limit, where it is not the setting's own flag left out.
_REMEDIES = {
    "moe_backend": "--fluid-moe-backend auto",
    "cp_backend": "--fluid-cp-backend auto",
    "fp8": "--fp8-format e4m3",
    "fp8_recipe": "--fp8-recipe blockwise",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type alltoall",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size 1",
    "cuda_graph_impl": "--cuda-graph-impl none",
    "transformer_impl": "--transformer-impl transformer_engine",
}


def remedy(setting: str) -> str:
    """The flag with which, or without which, a setting no longer keeps Megatron's own path."""
    return _REMEDIES.get(setting, "no --" + setting.replace("_", "-"))


@dataclass(frozen=True)
class Limit[T]:
    """A setting under which Megatron's own path is kept.

    Attributes:
        setting: its name.
        reason: why, in one clause.
        hit: whether T, a configuration, has it in a way that is not honoured, under the settings
            that the layer keeps. None: whenever it is true.
        over: the backends over which it counts; empty for all of them.
    """

    setting: str
    reason: str
    hit: Callable[[T, FluidConfig], bool] | None = None
    over: tuple[str, ...] = ()


def first_reason(
    limits: Iterable[Limit[Any]], config: Any, fluid: FluidConfig, backend: str | None = None
) -> str | None:
    """The first limit that applies to a configuration, as `setting=value: reason`; or None.
    backend: who moves the data; None for a limit of all backends."""
    for limit in limits:
        value = getattr(config, limit.setting)
        counts = not limit.over or backend in limit.over
        if counts and (value if limit.hit is None else limit.hit(config, fluid)):
            name = getattr(value, "__name__", None) or repr(getattr(value, "name", value))
            return f"{limit.setting}={name}: {limit.reason}"
    return None


def offloads(config: Any, *modules: str) -> bool:
    """Whether fine-grained activation offloading hooks into one of these modules."""
    chosen = set(config.offload_modules or ())
    return bool(config.fine_grained_activation_offloading and chosen.intersection(modules))
