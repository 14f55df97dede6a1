"""A CPU in the place of the copy engines of a GPU, for all ranks in one process."""

import ctypes
from typing import Any

from megatron_fluid.attention.exchange.buffers import HeadBuffers
from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.errors import FluidError


def head_buffers(workspace: Workspace, transport: str = "auto") -> HeadBuffers:
    return HeadBuffers(workspace, transport, SimulatedDriver())  # type: ignore[arg-type]


class SimulatedStream:
    """A stream in name only."""

    cuda_stream = 0


class SimulatedDriver:
    """A CPU in the place of a device: every call is done when it returns."""

    def stream(self, high_priority: bool) -> SimulatedStream:
        return SimulatedStream()

    def current(self) -> int:
        return 0

    def use(self, stream: object) -> None:
        pass

    def event(self) -> Any:
        return 0

    def record(self, event: Any, stream: int) -> None:
        pass

    def wait(self, event: Any, stream: int) -> None:
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
