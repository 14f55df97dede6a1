"""The vocabulary of unsupported settings: a setting, why it is unsupported, and when it counts.

Each part of Megatron that is replaced has one table of them (moe/limits.py, attention/limits.py).
Decisions, the start-up report and docs/compatibility.md are made from these tables.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_fluid.config import FluidConfig

__all__ = ["Limit", "first_reason", "is_given", "offloads"]


@dataclass(frozen=True)
class Limit[T]:
    """A setting under which Megatron's own path is kept.

    Attributes:
        setting: its name.
        reason: why, in one clause.
        hit: whether T (a configuration or a request) has it in a way that is not honoured, under
            the settings that the layer keeps. None: whenever it is true.
    """

    setting: str
    reason: str
    hit: Callable[[T, FluidConfig], bool] | None = None

    def applies(self, subject: T, fluid: FluidConfig) -> bool:
        """Whether the setting rules out the overlapped path for this subject."""
        if self.hit is None:
            return bool(getattr(subject, self.setting))
        return self.hit(subject, fluid)


def first_reason(limits: Iterable[Limit[Any]], config: Any, fluid: FluidConfig) -> str | None:
    """The first limit that applies to a configuration, as `setting=value: reason`; or None."""
    for limit in limits:
        if limit.applies(config, fluid):
            value = getattr(config, limit.setting)
            return (
                f"{limit.setting}={getattr(value, '__name__', None) or repr(value)}: {limit.reason}"
            )
    return None


def is_given(setting: str) -> Callable[[Any, FluidConfig], bool]:
    """Whether a setting has any value but None."""
    return lambda config, _: getattr(config, setting) is not None


def offloads(config: Any, *modules: str) -> bool:
    """Whether fine-grained activation offloading hooks into one of these modules."""
    chosen = set(config.offload_modules or ())
    return bool(config.fine_grained_activation_offloading and chosen.intersection(modules))
