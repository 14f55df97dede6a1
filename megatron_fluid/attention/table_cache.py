"""Tables on a device that are made once for a layout, and outlive every CUDA graph that reads
them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_fluid.errors import FluidError

__all__ = ["cached_tables", "capturing", "keep"]

Tables = TypeVar("Tables")

_captured: dict[int, object] = {}
"""What captures have read, by identity. A graph has its addresses, and this process may replay it
as long as it runs."""


def capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep(tables: object) -> None:
    """A capture reads these tables: they stay as long as this process."""
    _captured[id(tables)] = tables


def cached_tables(maxsize: int) -> Callable[[Callable[..., Tables]], Callable[..., Tables]]:
    """``functools.lru_cache`` for functions that make tensors: usable under autograd wherever they
    were made, never evicted once a CUDA-graph capture has read them.

    Raises (the decorated function):
        FluidError: tables have to be made inside a capture, which would fill them at a replay only.
    """

    def decorate(make: Callable[..., Tables]) -> Callable[..., Tables]:
        @functools.lru_cache(maxsize)
        def cached(*key: object) -> Tables:
            if capturing():
                raise FluidError(
                    f"{make.__name__}: run attention once at this size before a CUDA-graph capture"
                )
            with torch.inference_mode(False), torch.no_grad():
                return make(*key)

        @functools.wraps(make)
        def get(*key: object) -> Tables:
            tables = cached(*key)
            if capturing():
                keep(tables)
            return tables

        return get

    return decorate
