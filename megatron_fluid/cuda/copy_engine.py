"""Copies, events and flags of CUDA streams by direct calls of the driver, which cost a fraction of
torch's host time.

Streams and memory are plain integers here: raw handles and addresses. The caller keeps the tensors
alive until a stream that their allocator knows has waited for the copies.

`SimulatedDriver` stands in on a CPU: it does everything at once and in program order, for all ranks
in one process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from megatron_fluid.cuda import driver_api
from megatron_fluid.errors import FluidError

__all__ = ["CudaDriver", "Driver", "SimulatedDriver", "SimulatedStream"]

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32) (found - wanted) >= 0
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: an address says whose memory it is


_SIDE = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("address", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _SIDE),
        *((f"destination_{name}", kind) for name, kind in _SIDE),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Stream(Protocol):
    @property
    def cuda_stream(self) -> int: ...


class Driver(Protocol):
    """What the overlapped backends need of a device."""

    def stream(self, high_priority: bool) -> _Stream:
        """Return a new stream."""

    def current(self) -> int:
        """Return the raw handle of torch's current stream."""

    def use(self, stream: _Stream | None) -> None:
        """Make `stream` torch's current one; None restores the one before the first `use`."""

    def event(self) -> int:
        """Return a new event without timing; it lives as long as the process."""

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int, stream: int) -> None:
        """`stream` waits for what `event` last recorded."""

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses that this device can reach; nothing if nbytes is 0."""

    def copy_block(
        self, destination: int, source: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy `rows` rows of `width` bytes that begin `pitch` bytes apart on both sides."""

    def write(self, address: int, value: int, stream: int) -> None:
        """Store an int32 once all earlier work of `stream` is visible to every device."""

    def wait_value(self, address: int, value: int, stream: int) -> None:
        """`stream` waits until the int32 at `address` has reached `value`.

        Nothing bounds this wait: only for words that this device's own kernels advance.
        """

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""


class CudaDriver:
    """One CUDA device. An error raises FluidError with the driver's name for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._before: torch.cuda.Stream | None = None
        pointer, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
        self._copy = driver_api.entry("cuMemcpyAsync", pointer, pointer, size, pointer)
        self._copy_2d = driver_api.entry("cuMemcpy2DAsync_v2", pointer, pointer)
        self._block = _Copy2D(source_type=_UNIFIED, destination_type=_UNIFIED)
        self._block_address = ctypes.addressof(self._block)
        self._create = driver_api.entry("cuEventCreate", ctypes.POINTER(pointer), ctypes.c_uint)
        self._record = driver_api.entry("cuEventRecord", pointer, pointer)
        self._wait = driver_api.entry("cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        value = (pointer, pointer, word, ctypes.c_uint)
        self._write = driver_api.entry("cuStreamWriteValue32_v2", *value)
        self._wait_value = driver_api.entry("cuStreamWaitValue32_v2", *value)
        driver_api.primary_context(self._index)  # raises here if there is none

    def _retry(
        self, status: int, what: str, function: Callable[..., int], *arguments: object
    ) -> None:
        driver_api.retry_with_context(status, what, self._index, function, *arguments)

    def stream(self, high_priority: bool) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1 if high_priority else 0)

    def current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)

    def use(self, stream: _Stream | None) -> None:
        if self._before is None:
            self._before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._before if stream is None else stream)  # type: ignore[arg-type]
        if stream is None:
            self._before = None

    def event(self) -> int:
        handle = ctypes.c_void_p()
        status = self._create(ctypes.byref(handle), _NO_TIMING)
        if status:
            self._retry(status, "cuEventCreate", self._create, ctypes.byref(handle), _NO_TIMING)
        assert handle.value is not None
        return handle.value

    def record(self, event: int, stream: int) -> None:
        status = self._record(event, stream)
        if status:
            self._retry(status, "cuEventRecord", self._record, event, stream)

    def wait(self, event: int, stream: int) -> None:
        status = self._wait(stream, event, 0)
        if status:
            self._retry(status, "cuStreamWaitEvent", self._wait, stream, event, 0)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        if not nbytes:
            return
        status = self._copy(destination, source, nbytes, stream)
        if status:
            self._retry(status, "cuMemcpyAsync", self._copy, destination, source, nbytes, stream)

    def copy_block(
        self, destination: int, source: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        if width == pitch or rows == 1:
            self.copy(destination, source, width * rows, stream)
            return
        block = self._block  # the call reads it before it returns
        block.source_address, block.destination_address = source, destination
        block.source_pitch = block.destination_pitch = pitch
        block.width, block.height = width, rows
        status = self._copy_2d(self._block_address, stream)
        if status:
            self._retry(status, "cuMemcpy2DAsync", self._copy_2d, self._block_address, stream)

    def write(self, address: int, value: int, stream: int) -> None:
        word = value & 0xFFFFFFFF
        status = self._write(stream, address, word, 0)
        if status:
            self._retry(status, "cuStreamWriteValue32", self._write, stream, address, word, 0)

    def wait_value(self, address: int, value: int, stream: int) -> None:
        word = value & 0xFFFFFFFF
        status = self._wait_value(stream, address, word, _AT_LEAST)
        if status:
            wanted = (stream, address, word, _AT_LEAST)
            self._retry(status, "cuStreamWaitValue32", self._wait_value, *wanted)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class SimulatedStream:
    """A stream in name only."""

    cuda_stream = 0


class SimulatedDriver:
    """A CPU in the place of a device: every call is done when it returns."""

    def stream(self, high_priority: bool) -> SimulatedStream:
        return SimulatedStream()

    def current(self) -> int:
        return 0

    def use(self, stream: _Stream | None) -> None:
        pass

    def event(self) -> int:
        return 0

    def record(self, event: int, stream: int) -> None:
        pass

    def wait(self, event: int, stream: int) -> None:
        pass

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def copy_block(
        self, destination: int, source: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(destination + row * pitch, source + row * pitch, width)

    def write(self, address: int, value: int, stream: int) -> None:
        ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF

    def wait_value(self, address: int, value: int, stream: int) -> None:
        found = ctypes.c_int32.from_address(address).value
        if ctypes.c_int32((found - value) & 0xFFFFFFFF).value < 0:
            raise FluidError(f"flag at {address:#x}: found {found}, would wait for {value} forever")

    def capturing(self) -> bool:
        return False
