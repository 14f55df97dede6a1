"""Errors of launchers whose operands do not fit."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = ["refuse"]


def refuse(what: str, allowed: str, **operands: Tensor) -> NoReturn:
    """Raise ConfigError that names each operand's dtype, shape and strides beside what is allowed.

    Launchers test all operands by one condition, which is cheap, and only then say what they are.
    """
    found = (f"{name} {t.dtype} {list(t.shape)} {t.stride()}" for name, t in operands.items())
    raise ConfigError.of(f"operands of {what} (dtype, shape, strides)", ", ".join(found), allowed)
