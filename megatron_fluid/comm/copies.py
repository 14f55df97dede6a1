"""Deep copies of layers that communicate: parameters anew, and what cannot or need not be copied
shared."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["copy_sharing"]


def copy_sharing[Layer](layer: Layer, memo: dict[int, Any], *shared: object) -> Layer:
    """For a layer's __deepcopy__: its copy, with the same process groups, transports and the like,
    which are `shared`."""
    memo.update({id(each): each for each in shared})
    copied = memo[id(layer)] = layer.__new__(type(layer))
    copied.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return copied
