"""A stand-in for cuda.bindings.driver, with the types of the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_fluid.cuda import driver_api

__all__ = ["FakeDriver", "driver_in_place", "word"]


class FakeDriver:
    """The driver's functions, which give `answers` or nothing, and its types."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.real = driver
        self.answers: dict[str, Callable[..., Any]] = {
            "cuDeviceGet": lambda number: (number,),
            "cuDevicePrimaryCtxRetain": lambda device: (driver.CUcontext(0xC0DE + int(device)),),
        }
        self.contexts_set = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(self.real, name)  # a type
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        assert hasattr(self.real, name), f"cuda.bindings has no {name}"
        self.contexts_set += name == "cuCtxSetCurrent"
        answer = self.answers.get(name)
        return (self.real.CUresult(0), *(() if answer is None else answer(*arguments)))


def word(address: int, width: int = 8) -> int:
    """The unsigned integer of so many bytes at `address`."""
    kind = ctypes.c_uint64 if width == 8 else ctypes.c_uint32
    return int(kind.from_address(address).value)


@contextmanager
def driver_in_place(fake: FakeDriver) -> Iterator[FakeDriver]:
    """`fake` is the driver inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_api, "driver", lambda: fake)
        driver_api.primary_context.cache_clear()
        driver_api.streams.clear()
        try:
            yield fake
        finally:
            driver_api.primary_context.cache_clear()
            driver_api.streams.clear()
