"""A stand-in for cuda.bindings.driver: calls are written down, contexts are kept per thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_fluid.cuda import driver_api

__all__ = ["FakeDriver", "driver_in_place", "word"]

INVALID_CONTEXT = 201


class FakeDriver:
    """The driver's functions and types. `broken` says which functions fail, and with what; if
    `contexts`, all but those about contexts need a current one, that of the device."""

    def __init__(self, contexts: bool = False) -> None:
        from cuda.bindings import driver

        self.real, self.contexts = driver, contexts
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.broken: dict[str, list[int]] = {}
        self.answers: dict[str, Callable[..., Any]] = {}
        self.thread, self.contexts_set = threading.local(), 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(self.real, name)  # a type
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        assert hasattr(self.real, name), f"cuda.bindings has no {name}"
        status = self._status(name)
        if status:
            return (self.real.CUresult(status), *[None] * (name in self.answers))
        if name == "cuCtxSetCurrent":
            self.thread.context = int(arguments[0])
        elif name == "cuDeviceGet":
            return self.real.CUresult(0), arguments[0]
        elif name == "cuDevicePrimaryCtxRetain":
            return self.real.CUresult(0), self.real.CUcontext(0xC0DE + int(arguments[0]))
        else:
            self.calls.append((name, tuple(map(plain, arguments))))
        answer = self.answers.get(name)
        found = () if answer is None else answer(*arguments)
        return (self.real.CUresult(0), *found)

    def _status(self, name: str) -> int:
        if name == "cuCtxSetCurrent":
            self.contexts_set += 1
        if statuses := self.broken.get(name):
            return statuses.pop(0)
        about = name.startswith(("cuCtx", "cuDevice"))
        if self.contexts and not about and not hasattr(self.thread, "context"):
            return INVALID_CONTEXT
        return 0


def plain(argument: Any) -> Any:
    """A handle as the integer that it holds."""
    return int(argument) if hasattr(type(argument), "__int__") else argument


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
