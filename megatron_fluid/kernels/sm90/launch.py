"""The CUDA kernels for Hopper GPUs that Triton cannot express: compiled on the machine they run on,
and started by the CUDA driver. Each kernel is a compilation of its own.

A source includes sm90.cuh, which includes multiply.cuh and wgmma.h, which wgmma.py generates.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import torch

from megatron_fluid.cuda import driver_api, kernel_build
from megatron_fluid.cuda.devices import multiprocessors
from megatron_fluid.cuda.tensor_maps import BOXES, TensorMaps, View
from megatron_fluid.kernels.sm90.wgmma import wgmma_header

__all__ = ["HEADER", "HopperKernels", "Maps", "Source", "hopper_kernels"]

_FOLDER = files("megatron_fluid.kernels.sm90")
HEADER = _FOLDER / "sm90.cuh"
_HEADERS = (HEADER, _FOLDER / "multiply.cuh")
_ARCHITECTURE = "sm_90a"
# As sm90.cuh lays them out: bytes of shared memory of a block, result maps, counters.
_DYNAMIC_SHARED, _RESULTS, _COUNTERS = 225 * 1024, 2, 1 << 16
_STREAMS = 1024  # counters for launches outside graphs


@dataclass(frozen=True, eq=False)
class Source:
    """A CUDA source. Its kernels run in clusters of two blocks.

    Attributes:
        path: the file.
        kernels: names, and the template arguments that make each.
        threads: of a block.
        numbers: parameters behind the tensor maps: pointers and integers.
    """

    path: Traversable
    kernels: Mapping[str, str]
    threads: int = 384
    numbers: int = 0

    def unit(self, name: str, dtype: torch.dtype) -> kernel_build.Unit:
        """Return what is compiled for kernel `name` and operands of `dtype`: 16-bit floats, or
        e4m3."""
        wgmma = wgmma_header(dtype == torch.float8_e4m3fn).encode()
        headers = (*((path.name, path.read_bytes()) for path in _HEADERS), ("wgmma.h", wgmma))
        options = [f"--gpu-architecture={_ARCHITECTURE}", "-std=c++17", "-default-device"]
        options += [f"-DENTRY={name}", f"-DENTRY_MODE={self.kernels[name]}"]
        options += ["-DHALF_FLOATS"] if dtype == torch.float16 else []
        return kernel_build.Unit(name, self.path.read_bytes(), headers, tuple(options))

    def compile_ahead(self, names: Iterable[str], dtype: torch.dtype) -> None:
        """Begin to compile kernels in the background. Returns at once; the first use waits for the
        rest."""
        kernel_build.start([self.unit(name, dtype) for name in names])


# What both blocks of a cluster read by TMA a part of each, what both read whole, and what is
# written, None for nothing.
type Maps = tuple[View, View, Sequence[View | None]]


class _Functions(dict[str, Any]):
    """The driver's functions by name, each loaded when it is first asked for."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        super().__init__()
        self.source, self.dtype = source, dtype

    def __missing__(self, name: str) -> Any:
        code = kernel_build.machine_code(self.source.unit(name, self.dtype))
        # The first use may be inside a graph capture, which forbids loading otherwise.
        with driver_api.relaxed_capture():
            module = driver_api.call("cuModuleLoadData", code)
            found = driver_api.call("cuModuleGetFunction", module, name.encode())
            shared = driver_api.driver().CUfunction_attribute
            shared = shared.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver_api.call("cuFuncSetAttribute", found, shared, _DYNAMIC_SHARED)
        self[name] = found
        return found


class HopperKernels:
    """The kernels of a source for one dtype on the current device."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._device = torch.cuda.current_device()
        driver_api.make_context_current(self._device)
        self._functions = _Functions(source, dtype)
        self._threads = source.threads
        self._counters: dict[int, int] = {}
        self._captured = itertools.count()
        self._cu_launch = driver_api.driver().cuLaunchKernel
        # The parameters of a launch: maps, numbers, and the number of its counter.
        self._maps = TensorMaps(1 + len(BOXES) + _RESULTS)
        count = source.numbers + 1
        self._numbers = (ctypes.c_uint64 * count)()
        self._pack = struct.Struct(f"={count}Q").pack_into
        maps, numbers = self._maps.address, ctypes.addressof(self._numbers)
        maps_at = [maps + 128 * index for index in (0, 1, 1 + len(BOXES))]
        self._parameters = _pointers(*maps_at, *[numbers + 8 * index for index in range(count)])
        # The main thread and autograd's may start a kernel at the same time: all that is mutable
        # here belongs to one of them.
        self._lock = threading.Lock()

    def prepare(self, names: Iterable[str] | None = None) -> None:
        """Compile and load the kernels `names`, by default all of the source."""
        source = self._functions.source
        wanted = tuple(source.kernels if names is None else names)
        source.compile_ahead(wanted, self._functions.dtype)
        with self._lock:
            for name in wanted:
                self._functions[name]

    def launch(self, name: str, maps: Maps, numbers: Sequence[int]) -> None:
        """Start kernel `name` on all SMs, on the current stream, with the parameters of its
        source's ENTRY: maps and numbers, of which the last, the counter, is added here."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.launch(name, maps, numbers)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        own, both, results = maps
        with self._lock:
            fill = self._maps.fill
            fill(0, own)
            fill(1, both)
            for index, result in enumerate(results, 1 + len(BOXES)):
                if result is not None:
                    fill(index, result)
            self._pack(self._numbers, 0, *numbers, self._counter(stream))
            self._start(name, multiprocessors(self._device), stream, self._parameters)

    def start(self, name: str, programs: int, addresses: Sequence[int]) -> None:
        """Start kernel `name` on the current stream with the parameters at `addresses` and, behind
        them, the number of this launch's counter."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            self._numbers[0] = self._counter(stream)
            numbers = ctypes.addressof(self._numbers)
            self._start(name, programs, stream, _pointers(*addresses, numbers))

    def _counter(self, stream: int) -> int:
        """Return the number of a counter that no concurrent launch uses.

        Each stream has its own. In a graph, which may be replayed on any stream, each launch has
        its own.
        """
        if torch.cuda.is_current_stream_capturing():
            return _STREAMS + next(self._captured) % (_COUNTERS - _STREAMS)
        found = self._counters.get(stream)
        if found is None:
            found = self._counters[stream] = len(self._counters) % _STREAMS
        return found

    def _start(self, name: str, programs: int, stream: int, parameters: ctypes.Array[Any]) -> None:
        """programs: blocks, at least 2 are started."""
        arguments = (
            self._functions[name], max(1, programs // 2) * 2, 1, 1, self._threads, 1, 1,
            _DYNAMIC_SHARED, driver_api.streams[stream], ctypes.addressof(parameters), 0,
        )  # fmt: skip
        status = self._cu_launch(*arguments)[0]
        if status:
            driver_api.retry_with_context(status, self._device, "cuLaunchKernel", *arguments)


def _pointers(*addresses: int) -> ctypes.Array[Any]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


@functools.cache
def hopper_kernels(source: Source, dtype: torch.dtype, device: int) -> HopperKernels:
    """Return the kernels of `source` for `dtype` on CUDA device `device`, one object a process.

    A kernel's first use on a machine compiles it, which takes seconds.
    """
    with torch.cuda.device(device):
        return HopperKernels(source, dtype)
