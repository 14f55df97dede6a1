"""Calls of the CUDA driver, against a library that keeps a current context per thread as the real
one does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_fluid.cuda import driver_api
from megatron_fluid.cuda.copy_engine import CudaDriver, _Copy2D
from megatron_fluid.errors import FluidError

CONTEXT = 0xC0DE  # the primary context of device 1
INVALID_VALUE, INVALID_CONTEXT = 1, 201
HERE, EVENT, STREAM = 0x7F1234567890, 0x7F2234567890, 0x7F3234567890  # as handles and addresses are


class _Function:
    """An exported function, whose types may be declared."""

    def __init__(self, body: Callable[..., int]) -> None:
        self.body = body
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        """Without types an integer is cut to C's int; a real call does so without a word."""
        untyped = arguments[len(self.argtypes or ()) :]
        assert all(not isinstance(a, int) or -(1 << 31) <= a < 1 << 31 for a in untyped)
        return self.body(*arguments)


class _Library:
    """Every call but those about contexts needs a current one, is written down, and fails where
    `broken` says so."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.made_current = 0
        self.broken: dict[str, int] = {}

    def __getattr__(self, name: str) -> _Function:
        special = {
            "cuDeviceGet": self._device,
            "cuDevicePrimaryCtxRetain": self._retain,
            "cuCtxSetCurrent": self._set_current,
            "cuGetErrorName": self._error_name,
        }
        return _Function(special.get(name, lambda *arguments: self._in_context(name, arguments)))

    def __getitem__(self, name: str) -> _Function:
        return getattr(self, name)

    def _in_context(self, name: str, arguments: tuple[Any, ...]) -> int:
        if getattr(self.thread, "context", None) != CONTEXT:
            return INVALID_CONTEXT
        if name in self.broken:
            return self.broken[name]
        if name == "cuEventCreate":
            arguments[0]._obj.value = 7
            arguments = arguments[1:]
        self.calls.append((name, arguments))
        return 0

    def _device(self, number: Any, ordinal: int) -> int:
        number._obj.value = ordinal
        return 0

    def _retain(self, context: Any, number: Any) -> int:
        assert number.value == 1
        context._obj.value = CONTEXT
        return self.broken.get("cuDevicePrimaryCtxRetain", 0)

    def _set_current(self, context: Any) -> int:
        self.made_current += 1
        if "cuCtxSetCurrent" not in self.broken:
            self.thread.context = context.value
        return self.broken.get("cuCtxSetCurrent", 0)

    def _error_name(self, status: int, name: Any) -> int:
        name._obj.value = {
            INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
            INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
        }[status]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Library]:
    fake = _Library()
    monkeypatch.setattr(driver_api, "library", lambda: fake)
    driver_api.primary_context.cache_clear()
    yield fake
    driver_api.primary_context.cache_clear()


CALLS: dict[str, tuple[Callable[[CudaDriver], object], tuple[str, tuple[Any, ...]]]] = {
    "event": (lambda driver: driver.event(), ("cuEventCreate", (2,))),
    "record": (lambda driver: driver.record(EVENT, STREAM), ("cuEventRecord", (EVENT, STREAM))),
    "wait": (lambda driver: driver.wait(EVENT, STREAM), ("cuStreamWaitEvent", (STREAM, EVENT, 0))),
    "copy": (
        lambda driver: driver.copy(HERE, HERE + 9, 3, STREAM),
        ("cuMemcpyAsync", (HERE, HERE + 9, 3, STREAM)),
    ),
    "write": (
        lambda driver: driver.write(HERE, -1, STREAM),
        ("cuStreamWriteValue32_v2", (STREAM, HERE, 0xFFFFFFFF, 0)),
    ),
    "wait_value": (
        lambda driver: driver.wait_value(HERE, 5, STREAM),
        ("cuStreamWaitValue32_v2", (STREAM, HERE, 5, 0)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_without_a_context_gets_the_primary_one_and_the_call_is_made_once(
    library: _Library, name: str
) -> None:
    call, expected = CALLS[name]
    driver = CudaDriver(torch.device("cuda", 1))
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            call(driver)
            call(driver)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failures
    assert library.calls == [expected] * 2
    assert library.made_current == 1, (
        "the second call found the context that the first one made current"
    )


def test_a_block_of_rows_is_copied_with_its_pitch_and_a_whole_one_as_it_lies(
    library: _Library,
) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = CONTEXT
    driver.copy_block(100, 200, 64, 16, 3, 40)
    ((name, (address, stream)),) = library.calls
    found = _Copy2D.from_address(address)
    assert (name, stream) == ("cuMemcpy2DAsync_v2", 40)
    assert (
        found.destination_address,
        found.destination_pitch,
        found.source_address,
        found.source_pitch,
    ) == (100, 64, 200, 64)
    assert (found.width, found.height, found.source_type, found.destination_type) == (16, 3, 4, 4)
    library.calls.clear()
    driver.copy_block(100, 200, 64, 64, 3, 40)
    driver.copy_block(100, 200, 64, 16, 1, 40)
    assert library.calls == [
        ("cuMemcpyAsync", (100, 200, 192, 40)),
        ("cuMemcpyAsync", (100, 200, 16, 40)),
    ]
    assert ctypes.sizeof(_Copy2D) == 128  # CUDA_MEMCPY2D of a 64-bit machine


@pytest.mark.parametrize("name", CALLS)
def test_any_other_error_is_raised_at_once(library: _Library, name: str) -> None:
    call, (function, _) = CALLS[name]
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = CONTEXT
    library.broken[function] = INVALID_VALUE
    with pytest.raises(
        FluidError, match=rf"{function.removesuffix('_v2')}: CUDA_ERROR_INVALID_VALUE \(1\)"
    ):
        call(driver)
    assert library.made_current == 0


def test_a_context_that_does_not_help_is_not_tried_twice(library: _Library) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = CONTEXT
    library.broken["cuEventRecord"] = INVALID_CONTEXT
    with pytest.raises(FluidError, match="cuEventRecord: CUDA_ERROR_INVALID_CONTEXT"):
        driver.record(7, 40)
    assert library.made_current == 1


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_context_that_cannot_be_had_is_named(library: _Library, function: str) -> None:
    library.broken[function] = INVALID_VALUE
    with pytest.raises(FluidError, match=f"{function}: CUDA_ERROR_INVALID_VALUE"):
        CudaDriver(torch.device("cuda", 1)).record(7, 40)
