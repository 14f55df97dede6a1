"""Copies, events and flags of CUDA streams by direct calls of the driver, which cost a fraction of
torch's host time.

Streams are raw handles and memory is addresses, both plain integers. The caller keeps the tensors
alive until a stream that their allocator knows has waited for the copies.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from megatron_fluid.cuda import driver_api
from megatron_fluid.cuda.driver_api import streams

__all__ = ["CudaDriver"]

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32) (found - wanted) >= 0
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: an address says whose memory it is
# CUDA_MEMCPY2D: of the source and of the destination x, y, type, host address, device address,
# array and pitch; then bytes of a row and rows.
_BLOCK_COPY = struct.Struct("=QQi4xQQQQQQi4xQQQQQQ")


class CudaDriver:
    """One CUDA device. An error raises FluidError with the driver's name for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._before: torch.cuda.Stream | None = None
        self._driver = driver_api.driver()
        self._block = ctypes.create_string_buffer(_BLOCK_COPY.size)
        self._block_copy = self._driver.CUDA_MEMCPY2D(_ptr=ctypes.addressof(self._block))
        driver_api.primary_context(self._index)  # raises here if there is none

    def _retry(self, status: Any, name: str, *arguments: object) -> None:
        driver_api.retry_with_context(status, self._index, name, *arguments)

    def stream(self, high_priority: bool) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device, priority=-1 if high_priority else 0)

    def current(self) -> int:
        """Return the raw handle of torch's current stream."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def use(self, stream: torch.cuda.Stream | None) -> None:
        """Make `stream` torch's current one; None restores the one before the first `use`."""
        if self._before is None:
            self._before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._before if stream is None else stream)
        if stream is None:
            self._before = None

    def event(self) -> Any:
        """Return a new event without timing; it lives as long as the process."""
        status, event = self._driver.cuEventCreate(_NO_TIMING)
        if status:
            event = driver_api.retry_with_context(status, self._index, "cuEventCreate", _NO_TIMING)
        return event

    def record(self, event: Any, stream: int) -> None:
        on = streams[stream]
        status = self._driver.cuEventRecord(event, on)[0]
        if status:
            self._retry(status, "cuEventRecord", event, on)

    def wait(self, event: Any, stream: int) -> None:
        """`stream` waits for what `event` last recorded."""
        on = streams[stream]
        status = self._driver.cuStreamWaitEvent(on, event, 0)[0]
        if status:
            self._retry(status, "cuStreamWaitEvent", on, event, 0)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses that this device can reach; nothing if nbytes is 0."""
        if not nbytes:
            return
        on = streams[stream]
        status = self._driver.cuMemcpyAsync(destination, source, nbytes, on)[0]
        if status:
            self._retry(status, "cuMemcpyAsync", destination, source, nbytes, on)

    def copy_block(
        self, destination: int, source: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy `rows` rows of `width` bytes that begin `pitch` bytes apart on both sides."""
        if width == pitch or rows == 1:
            self.copy(destination, source, width * rows, stream)
            return
        sides = (0, 0, _UNIFIED, 0, source, 0, pitch, 0, 0, _UNIFIED, 0, destination, 0, pitch)
        _BLOCK_COPY.pack_into(self._block, 0, *sides, width, rows)  # read before the call returns
        on = streams[stream]
        status = self._driver.cuMemcpy2DAsync(self._block_copy, on)[0]
        if status:
            self._retry(status, "cuMemcpy2DAsync", self._block_copy, on)

    def write(self, address: int, value: int, stream: int) -> None:
        """Store an int32 once all earlier work of `stream` is visible to every device."""
        word, on = value & 0xFFFFFFFF, streams[stream]
        status = self._driver.cuStreamWriteValue32(on, address, word, 0)[0]
        if status:
            self._retry(status, "cuStreamWriteValue32", on, address, word, 0)

    def wait_value(self, address: int, value: int, stream: int) -> None:
        """`stream` waits until the int32 at `address` has reached `value`.

        Nothing bounds this wait: only for words that this device's own kernels advance.
        """
        word, on = value & 0xFFFFFFFF, streams[stream]
        status = self._driver.cuStreamWaitValue32(on, address, word, _AT_LEAST)[0]
        if status:
            self._retry(status, "cuStreamWaitValue32", on, address, word, _AT_LEAST)

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()
