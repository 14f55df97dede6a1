"""Deep copies of layers that communicate: new parameters, shared process groups."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["copy_sharing"]


def copy_sharing[Layer](layer: Layer, memo: dict[int, Any], *shared: object) -> Layer:
    """Return the copy for a layer's __deepcopy__; the `shared` objects (process groups, transports)
    are not copied."""
    memo.update({id(each): each for each in shared})
    copied = memo[id(layer)] = layer.__new__(type(layer))
    copied.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return copied
