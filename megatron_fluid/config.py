"""The settings of megatron_fluid: one frozen, validated object.

They come from the environment (`MEGATRON_FLUID_MOE_BACKEND=rounds`), from Megatron's command line (`--fluid-moe-backend
rounds`, see patches/arguments.py), or from `set_config(FluidConfig(...))`; whoever speaks last wins.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fluid.errors import ConfigError

__all__ = [
    "CP_BACKENDS",
    "ENVIRONMENT_PREFIX",
    "MOE_BACKENDS",
    "TP_OVERLAP",
    "FluidConfig",
    "current_config",
    "set_config",
]

ENVIRONMENT_PREFIX = "MEGATRON_FLUID_"

MOE_BACKENDS = ("auto", "nvlink", "rounds", "megatron")
TP_OVERLAP = ("auto", "on", "off")
CP_BACKENDS = ("auto", "nvlink", "rounds", "collective", "megatron")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class FluidConfig:
    """Settings of the overlapped layers. Every field is validated when the object is made.

    Attributes:
        moe_backend: who moves the tokens of an MoE layer. "auto" takes the fastest that the machine can do, "nvlink"
            symmetric memory inside one NVLink domain, "rounds" peer rounds over NCCL or gloo, "megatron" Megatron's own
            path.
        dx_chunks: of peer rounds: pieces in which dX is computed and sent back in backward, at least 1.
        defer_weight_grads: queue weight gradients across layers and run them beside later exchanges; False: beside the
            exchange of their own layer.
        timeout_s: bound in seconds on every wait for a peer.
        deterministic: tensor parallelism without symmetric memory sums in rank order, not as NCCL likes, at some cost; every other
            sum here has a fixed order anyway.
        tp_overlap: Megatron's own linear layers under tensor and sequence parallelism, with their collectives hidden behind
            their GEMMs: "auto" where that is faster, "on" everywhere, "off" nowhere.
        cp_backend: who exchanges heads and sequence in attention under context parallelism by a2a: "nvlink" symmetric memory
            inside one NVLink domain, "rounds" peer rounds over NCCL or gloo, both beside the projections; "collective" one
            all-to-all each way between them, "megatron" Megatron's own path, "auto" nvlink where that can be had; else on GPUs
            Megatron's own path with Transformer Engine and collective without, and on CPUs rounds.

    Raises:
        ConfigError: a value out of range; the message names the setting, what was found and what is allowed.
    """

    moe_backend: str = "auto"
    dx_chunks: int = 1
    defer_weight_grads: bool = False
    timeout_s: float = 300.0
    deterministic: bool = False
    tp_overlap: str = "auto"
    cp_backend: str = "auto"

    def __post_init__(self) -> None:
        if self.moe_backend not in MOE_BACKENDS:
            raise ConfigError.of("moe_backend", self.moe_backend, ", ".join(MOE_BACKENDS))
        if self.tp_overlap not in TP_OVERLAP:
            raise ConfigError.of("tp_overlap", self.tp_overlap, ", ".join(TP_OVERLAP))
        if self.cp_backend not in CP_BACKENDS:
            raise ConfigError.of("cp_backend", self.cp_backend, ", ".join(CP_BACKENDS))
        if isinstance(self.dx_chunks, bool) or not isinstance(self.dx_chunks, int) or self.dx_chunks < 1:
            raise ConfigError.of("dx_chunks", self.dx_chunks, "an integer of at least 1")
        for name in ("defer_weight_grads", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError.of(name, getattr(self, name), "True or False")
        timeout = self.timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ConfigError.of("timeout_s", timeout, "a finite number of seconds above 0")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "FluidConfig":
        """The settings that `MEGATRON_FLUID_<FIELD>` variables give; fields without a variable keep their default.

        Args:
            environ: where to look, `os.environ` by default.

        Raises:
            ConfigError: a variable that cannot be read as its field's type; the message names the variable.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + field.name.upper()
            if variable in environ:
                values[field.name] = _read(variable, environ[variable], field.type)
        return cls(**values)


def _read(variable: str, text: str, kind: object) -> object:
    if kind is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ConfigError.of(variable, text, ", ".join(_TRUE + _FALSE))
    if kind is int or kind is float:
        try:
            return kind(text)  # type: ignore[operator]
        except ValueError:
            raise ConfigError.of(variable, text, "a number" if kind is float else "an integer") from None
    return text


_current: FluidConfig | None = None


def current_config() -> FluidConfig:
    """The configuration in force: what `set_config` was last given, else what the environment says."""
    global _current
    if _current is None:
        _current = FluidConfig.from_environment()
    return _current


def set_config(config: FluidConfig | None) -> None:
    """Put `config` in force for layers that are built from now on; None returns to the environment's settings."""
    global _current
    if config is not None and not isinstance(config, FluidConfig):
        raise ConfigError.of("config", config, "a FluidConfig or None")
    _current = config
