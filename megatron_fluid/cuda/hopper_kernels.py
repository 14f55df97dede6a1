"""The kernels for Hopper GPUs that Triton cannot express: CUDA sources compiled on the machine they
run on, and started by the CUDA driver. Each kernel is a compilation of its own.

A source of megatron_fluid/kernels includes sm90.cuh and wgmma.h; the latter is generated here.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.cuda import driver_api, kernel_build
from megatron_fluid.cuda.nvrtc import Unit
from megatron_fluid.cuda.tensor_maps import BOXES, TensorMaps

__all__ = [
    "FP8_GROUPED",
    "FP8_WEIGHT_GRADS",
    "FUSED",
    "GROUPED",
    "HopperKernels",
    "HopperModule",
    "Operands",
    "Source",
    "has_grouped_gemm",
    "hopper_module",
    "is_hopper",
    "kernel_unit",
    "multiprocessors",
    "wgmma_header",
]

SOURCES = Path(__file__).resolve().parents[1] / "kernels"


@dataclass(frozen=True, eq=False)
class Source:
    """A CUDA source of megatron_fluid/kernels.

    Attributes:
        kernels: names, and the template arguments that make each.
    """

    file: str
    kernels: Mapping[str, str]

    @property
    def path(self) -> Path:
        return SOURCES / self.file


GROUPED = Source(
    "grouped_gemm_sm90.cu",
    {
        "grouped_forward": "FORWARD",
        "grouped_backward": "BACKWARD",
        "sent_forward": "FORWARD,true",
        "sent_backward": "BACKWARD,true",
        "grouped_wide": "WIDE",
        "grouped_gated": "GATED",
        "grouped_weights": "WEIGHTS",
        "grouped_long_sums": "LONG_SUMS",
        "grouped_sums": "SUMS",
    },
)
FUSED = Source(
    "fused_gemm_sm90.cu",
    {
        "gather_forward": "FORWARD,false",
        "gather_backward": "BACKWARD,false",
        "scatter_forward": "FORWARD,true",
        "scatter_backward": "BACKWARD,true",
    },
)
FP8_GROUPED = Source("fp8_grouped_gemm_sm90.cu", {"fp8_grouped": "FORWARD"})
FP8_WEIGHT_GRADS = Source(
    "fp8_weight_grads_sm90.cu", {"fp8_weights": "false", "fp8_weight_sums": "true"}
)
HEADER = SOURCES / "sm90.cuh"
WIDTHS = (*range(32, 129, 32), 136, *range(144, 257, 16))  # N of the wgmma instructions
_ARCHITECTURE = "sm_90a"
# As sm90.cuh lays them out: bytes of shared memory and threads of a block, result maps, counters.
_DYNAMIC_SHARED, _THREADS, _RESULTS, _COUNTERS = 225 * 1024, 384, 2, 1 << 16
_STREAMS = 1024  # counters for launches outside graphs
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NUMBERS = struct.Struct("=10Q").pack_into


@functools.cache
def is_hopper(index: int) -> bool:
    """Whether CUDA device `index` runs code for sm_90a: of compute capability 9.0 exactly."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) == (9, 0)


@functools.cache
def has_grouped_gemm(index: int) -> bool:
    """Whether torch has a grouped GEMM for CUDA device `index`."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)


@functools.cache
def multiprocessors(index: int) -> int:
    """SMs of CUDA device `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def wgmma_header(fp8: bool = False) -> str:
    """Return wgmma.h: wgmma<N, A transposed, B transposed>(d, a, b) for d += a b, and start for
    d = a b, for each N of WIDTHS. fp8: of e4m3, which neither operand may be transposed."""
    parts = ['#ifdef HALF_FLOATS\n#define TYPE "f16"\n#else\n#define TYPE "bf16"\n#endif\n']
    parts += [_instruction(name, width, fp8) for width in WIDTHS for name in ("wgmma", "start")]
    for name in ("wgmma", "start"):
        cases = "".join(
            f"  if constexpr (W == {width}) {name}_{width}<TA, TB>(d, a, b);\n" for width in WIDTHS
        )
        known = " || ".join(f"W == {width}" for width in WIDTHS)
        parts.append(
            "template <int W, int TA, int TB>\n"
            f"__device__ __forceinline__ void {name}(float (&d)[W / 2], unsigned long long a, "
            f"unsigned long long b) {{\n"
            f'  static_assert({known}, "a width that wgmma.h has no instruction '
            f'for");\n{cases}}}\n'
        )
    parts.append("""
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT, int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
  if (LEFT == 0) {  // no sum is read before
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
  }
}
""")
    return "".join(parts)


def _instruction(name: str, width: int, fp8: bool) -> str:
    count, constraint, add = width // 2, ("+f" if name == "wgmma" else "=f"), int(name == "wgmma")
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"{constraint}"(d[{i}])' for i in range(count))
    kind = "k32.f32.e4m3.e4m3 " if fp8 else 'k16.f32." TYPE "." TYPE " '
    turns = "" if fp8 else f", %{count + 2}, %{count + 3}"
    immediates = "" if fp8 else ', "n"(TA), "n"(TB)'
    return (
        "template <int TA, int TB>\n"
        f"__device__ __forceinline__ void {name}_{width}(float (&d)[{count}], unsigned long long "
        f"a, unsigned long long b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}{kind}'
        f"{{{registers}}}, "
        f'%{count}, %{count + 1}, {add}, 1, 1{turns};"\n'
        f'    : {sums} : "l"(a), "l"(b){immediates});\n}}\n'
    )


def kernel_unit(source: Source, name: str, dtype: torch.dtype) -> Unit:
    """Return what is compiled for kernel `name` of `source` and operands of `dtype`: 16-bit floats,
    or e4m3."""
    wgmma = wgmma_header(dtype == torch.float8_e4m3fn)
    headers = (("sm90.cuh", HEADER.read_bytes()), ("wgmma.h", wgmma.encode()))
    options = [f"--gpu-architecture={_ARCHITECTURE}", "-std=c++17", "-default-device"]
    options += [f"-DENTRY={name}", f"-DENTRY_MODE={source.kernels[name]}"]
    options += ["-DHALF_FLOATS"] if dtype == torch.float16 else []
    return Unit(name, source.path.read_bytes(), headers, tuple(options))


class _Functions(dict[str, ctypes.c_void_p]):
    """The driver's functions by name, each loaded when it is first asked for."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        super().__init__()
        self.source, self.dtype = source, dtype

    def __missing__(self, name: str) -> ctypes.c_void_p:
        code = kernel_build.machine_code(kernel_unit(self.source, name, self.dtype))
        # The first use may be inside a graph capture, which forbids loading otherwise.
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        exchange = driver_api.library().cuThreadExchangeStreamCaptureMode
        driver_api.check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            found = self[name] = _load(code, name)
        finally:
            exchange(ctypes.byref(mode))
        return found


class HopperKernels:
    """The kernels of a source for one dtype on the current device; they run in clusters of two
    blocks of `threads` threads."""

    threads = _THREADS

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        library = driver_api.library()
        self._device = torch.cuda.current_device()
        driver_api.check(
            library.cuCtxSetCurrent(driver_api.primary_context(self._device)), "cuCtxSetCurrent"
        )
        self._functions = _Functions(source, dtype)
        self._counters: dict[int, int] = {}
        self._captured = itertools.count()
        self._cu_launch, self._stream = driver_api.entry("cuLaunchKernel"), ctypes.c_void_p()
        self._number = ctypes.c_int()  # of a launch's counter
        # The main thread and autograd's may start a kernel at the same time: all that is mutable
        # here belongs to one of them.
        self._lock = threading.Lock()

    def prepare(self, names: Iterable[str] | None = None) -> None:
        """Compile and load the kernels `names`, by default all of the source."""
        source, dtype = self._functions.source, self._functions.dtype
        wanted = tuple(source.kernels if names is None else names)
        kernel_build.start(kernel_unit(source, name, dtype) for name in wanted)
        with self._lock:
            for name in wanted:
                self._functions[name]

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

    def _start(
        self, name: str, programs: int, stream: int, parameters: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """Start `programs` // 2 clusters of kernel `name`."""
        grid = max(1, programs // 2) * 2
        self._stream.value = stream
        arguments = (
            self._functions[name], grid, 1, 1, self.threads, 1, 1, _DYNAMIC_SHARED, self._stream,
            parameters, None,
        )  # fmt: skip
        status = self._cu_launch(*arguments)
        if status:
            driver_api.retry_with_context(
                status, "cuLaunchKernel", self._device, self._cu_launch, *arguments
            )

    def start(self, name: str, programs: int, addresses: Sequence[int]) -> None:
        """Start `programs` // 2 clusters of kernel `name` on the current stream, with the
        parameters at `addresses` and, behind them, the number of this launch's counter.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            self._number.value = self._counter(stream)
            whole = (*addresses, ctypes.addressof(self._number))
            self._start(name, programs, stream, (ctypes.c_void_p * len(whole))(*whole))


# A tensor with the rows, and the columns if not 64, of its boxes.
_Boxed = tuple[Tensor, int] | tuple[Tensor, int, int]


class Operands(NamedTuple):
    """What a kernel of grouped_gemm_sm90.cu reads and writes by TMA.

    Attributes:
        own: what each block of a cluster reads a part of: the weights, or left.
        both: what both blocks read: all tokens, by BOXES, or right with the rows of its boxes.
        results: what is written by TMA, None for nothing; the gated kernel writes its own result
            and the activation's, in boxes of 64 rows, or of 32 if it is `wide`.
    """

    own: TensorMaps | _Boxed
    both: Tensor | tuple[Tensor, int]
    results: tuple[_Boxed | None, ...]


class HopperModule(HopperKernels):
    """The kernels of grouped_gemm_sm90.cu."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(GROUPED, dtype)
        self._own, self._both = TensorMaps(1), TensorMaps(len(BOXES))
        self._results = TensorMaps(_RESULTS)
        self._numbers = (ctypes.c_uint64 * 10)()
        base = ctypes.addressof(self._numbers)
        maps = (0, self._both.address, self._results.address)
        self._parameters = (ctypes.c_void_p * 13)(*maps, *[base + 8 * i for i in range(10)])

    def launch(
        self,
        name: str,
        maps: Operands,
        pointers: tuple[int, int, int, int],
        sizes: tuple[int, int, int, int],
        programs: int,
        keep: int = True,
    ) -> None:
        """Start `programs` // 2 clusters of kernel `name` on the current stream.

        The arguments are those of the source's ENTRY; `pointers`: out, act, ends, extra.
        """
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.launch(name, maps, pointers, sizes, programs, keep)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            own, both, results = maps
            if isinstance(own, TensorMaps):
                self._parameters[0] = own.address
            else:
                self._own.fill(0, *own)
                self._parameters[0] = self._own.address
            if isinstance(both, Tensor):
                self._both.fill_boxes(0, both)
            else:
                self._both.fill(0, *both)
            for index, result in enumerate(results):
                if result is not None:
                    self._results.fill(index, *result)
            _NUMBERS(self._numbers, 0, *pointers, self._counter(stream), *sizes, keep)
            self._start(name, programs, stream, self._parameters)


def _load(code: bytes, name: str) -> ctypes.c_void_p:
    library, module, function = driver_api.library(), ctypes.c_void_p(), ctypes.c_void_p()
    driver_api.check(library.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
    status = library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    driver_api.check(status, f"cuModuleGetFunction of {name}")
    status = library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, _DYNAMIC_SHARED)
    driver_api.check(status, f"cuFuncSetAttribute of {name}")
    return function


@functools.cache
def hopper_module(dtype: torch.dtype, device: int) -> HopperModule:
    """Return the kernels for `dtype` on CUDA device `device`, one object a process.

    A kernel's first use on a machine compiles it, which takes seconds.
    """
    with torch.cuda.device(device):
        return HopperModule(dtype)
