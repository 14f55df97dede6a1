"""What layers that communicate share: deep copies, and the check of an input's dtype and device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = ["Form", "check_input", "copy_sharing"]

type Form = tuple[torch.dtype, torch.device]


def copy_sharing[Layer](layer: Layer, memo: dict[int, Any], *shared: object) -> Layer:
    """Return the copy for a layer's __deepcopy__: new parameters; the `shared` objects (process
    groups, transports) are not copied."""
    memo.update({id(each): each for each in shared})
    copied = memo[id(layer)] = layer.__new__(type(layer))
    copied.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return copied


def check_input(name: str, x: Tensor, parameter: Tensor) -> Form | None:
    """Refuse an input that a layer's parameters cannot be multiplied with.

    Args:
        name: of the input, for the message.
        x: the input.
        parameter: one of the layer's.

    Returns:
        dtype and device of x, which need no other look while the parameters stay as they are; None
        under autocast, which takes any floating dtype.

    Raises:
        ConfigError: x is on another device or, without autocast, of another dtype.
    """
    if x.device != parameter.device:
        allowed = f"{parameter.device}, where the layer's parameters are"
        raise ConfigError(f"{name}: found a tensor on {x.device}, allowed: {allowed}")
    autocast = torch.is_autocast_enabled(x.device.type)
    if x.dtype != parameter.dtype and not (autocast and x.is_floating_point()):
        allowed = f"{parameter.dtype}, as the layer's parameters, or any under torch.autocast"
        raise ConfigError(f"{name}: found {x.dtype}, allowed: {allowed}")
    return None if autocast else (x.dtype, x.device)
