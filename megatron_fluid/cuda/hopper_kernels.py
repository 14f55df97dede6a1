"""CUDA source compiled at first use, for kernels of Hopper GPUs that Triton cannot express; and TMA
tensor maps.

NVRTC, which torch brings along, compiles a source with its headers, sm90.cuh and the generated
wgmma.h; the result is kept under the user's cache folder by the hash of everything it depends on.
Kernels are started by the CUDA driver directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import itertools
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.cuda import driver_api
from megatron_fluid.errors import FluidError

__all__ = [
    "FUSED",
    "GROUPED",
    "HopperKernels",
    "HopperModule",
    "Operands",
    "Source",
    "TensorMaps",
    "compile_source",
    "has_grouped_gemm",
    "hopper_module",
    "is_hopper",
    "multiprocessors",
    "wgmma_header",
]

SOURCES = Path(__file__).resolve().parents[1] / "kernels"


@dataclass(frozen=True)
class Source:
    """A CUDA source of megatron_fluid/kernels, and its kernels."""

    file: str
    kernels: tuple[str, ...]

    @property
    def path(self) -> Path:
        return SOURCES / self.file


GROUPED = Source(
    "grouped_gemm_sm90.cu",
    ("grouped_forward", "grouped_gated", "grouped_backward", "grouped_weights", "grouped_sums"),
)
FUSED = Source(
    "fused_gemm_sm90.cu",
    ("gather_forward", "gather_backward", "scatter_forward", "scatter_backward"),
)
_DYNAMIC_SHARED = 225 * 1024  # of every kernel, as sm90.cuh lays it out
HEADER = SOURCES / "sm90.cuh"
WIDTHS = (*range(32, 129, 32), 136, *range(144, 257, 16))
BOXES = (32, 64, 128)  # of sm90.cuh: rows
_RESULTS = 2  # maps of sm90.cuh's Results
_ARCHITECTURE = "sm_90a"
_THREADS = 384
_COUNTERS, _STREAMS = 1 << 16, 1024  # of sm90.cuh; those of them that streams use
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ELEMENT = {torch.bfloat16: 9, torch.float16: 6}  # CUtensorMapDataType
_SWIZZLE = {64: 3, 32: 2}  # by columns of a box: CU_TENSOR_MAP_SWIZZLE_128B, _64B
_PROMOTE_256B = 3
_NUMBERS = struct.Struct("=11Q").pack_into
_NINE = struct.Struct("=9Q").pack_into


_Box = tuple[ctypes.Array[ctypes.c_uint32], int]  # its sides, innermost first, and the swizzle


def _sides(*sides: int) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(sides))(*sides)


_ONES = _sides(1, 1, 1, 1, 1)
_HALVES_BOX: _Box = _sides(64, 8, 2, 8, 1), _SWIZZLE[64]
_BOXES: dict[tuple[int, int], _Box] = {
    (rows, columns): (_sides(columns, rows, 1), _SWIZZLE[columns])
    for rows, columns in ((32, 64), (64, 64), (128, 64), (64, 32), (32, 32))
}
_TOKEN_BOXES = tuple(_BOXES[rows, 64] for rows in BOXES)


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


def wgmma_header() -> str:
    """wgmma.h: for each width N that is used, wgmma<N, A transposed, B transposed>(d, a, b) for d
    += a b, and start for d = a b."""
    parts = ['#ifdef HALF_FLOATS\n#define TYPE "f16"\n#else\n#define TYPE "bf16"\n#endif\n']
    parts += [_instruction(name, width) for width in WIDTHS for name in ("wgmma", "start")]
    for name in ("wgmma", "start"):
        cases = "".join(
            f"  if constexpr (W == {width}) {name}_{width}<TA, TB>(d, a, b);\n" for width in WIDTHS
        )
        known = " || ".join(f"W == {width}" for width in WIDTHS)
        parts.append(
            "template <int W, int TA, int TB>\n"
            f"__device__ __forceinline__ void {name}(float (&d)[W / 2], unsigned long long a, "
            f"unsigned long long b) {{\n"
            f'  static_assert({known}, "a width that hopper.py has no instruction '
            f'for");\n{cases}}}\n'
        )
    parts.append("""
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
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


def _instruction(name: str, width: int) -> str:
    count, constraint, add = width // 2, ("+f" if name == "wgmma" else "=f"), int(name == "wgmma")
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"{constraint}"(d[{i}])' for i in range(count))
    return (
        "template <int TA, int TB>\n"
        f"__device__ __forceinline__ void {name}_{width}(float (&d)[{count}], unsigned long long "
        f"a, unsigned long long b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}k16.f32." TYPE "." TYPE " '
        f"{{{registers}}}, "
        f'%{count}, %{count + 1}, {add}, 1, 1, %{count + 2}, %{count + 3};"\n'
        f'    : {sums} : "l"(a), "l"(b), "n"(TA), "n"(TB));\n}}\n'
    )


def compile_source(dtype: torch.dtype, source: Source = GROUPED) -> bytes:
    """The machine code of `source` for 16-bit floats of `dtype`, from the cache where it is there.

    Raises:
        FluidError: NVRTC cannot be loaded, or refuses the source.
    """
    text = source.path.read_bytes()
    headers = {"sm90.cuh": HEADER.read_bytes(), "wgmma.h": wgmma_header().encode()}
    options = [f"--gpu-architecture={_ARCHITECTURE}", "-std=c++17", "-default-device"]
    options += ["-DHALF_FLOATS"] if dtype == torch.float16 else []
    library = _nvrtc()
    version = (ctypes.c_int * 2)()
    library.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    key = hashlib.sha256(
        b"\0".join([text, *headers.values(), repr((options, *version)).encode()])
    ).hexdigest()
    kept = _kept(key)
    if kept is None:
        kept = _compile(library, source.file, text, headers, options)
        _keep(key, kept)
    return kept


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron_fluid"


def _kept(key: str) -> bytes | None:
    """What was kept under `key`, if it is there, readable and whole."""
    try:
        content = (_cache_folder() / f"{key}.cubin").read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    checksum, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _keep(key: str, code: bytes) -> None:
    """Several ranks do so at the same time. A folder that cannot be written costs seconds at every
    start, no more."""
    written = None
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            written = file.name
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(written, folder / f"{key}.cubin")
    except (OSError, RuntimeError):
        if written is not None:
            Path(written).unlink(missing_ok=True)


def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    package = (
        "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
    )  # from 13 on without a suffix
    places = [name]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        places += [
            str(f.locate()) for f in importlib.metadata.files(package) or [] if f.name == name
        ]
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise FluidError(f"NVRTC: found no {name}, which comes with torch (pip install {package})")


def _compile(
    library: ctypes.CDLL, file: str, text: bytes, headers: dict[str, bytes], options: list[str]
) -> bytes:
    def check(status: int, what: str) -> None:
        if status:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise FluidError(
                f"NVRTC: {what}: {library.nvrtcGetErrorString(status).decode()}{log()}"
            )

    def log() -> str:
        size = ctypes.c_size_t()
        if not program.value or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
            return ""
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        return "\n" + text.value.decode(errors="replace")

    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*[name.encode() for name in headers])
    arguments = (ctypes.byref(program), text, file.encode(), len(headers), contents, names)
    check(library.nvrtcCreateProgram(*arguments), "nvrtcCreateProgram")
    try:
        flags = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        check(library.nvrtcCompileProgram(program, len(options), flags), f"compiling {file}")
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


class TensorMaps:
    """Memory for `count` TMA tensor maps one behind the other, as a kernel's parameter holds them;
    each may be filled anew.

    A map is of a dense 16-bit tensor of 2 or 3 dimensions, to be read or written in boxes of `rows`
    rows of 64 columns, swizzled by 128 bytes, or of 32, by 64. What lies outside reads as zero and
    is not written. It holds an address, not the tensor.

    Arguments of the driver's function that do not fit a C int are ctypes objects that are kept and
    set: to convert each of its twelve by argtypes took longer than the call.
    """

    def __init__(self, count: int) -> None:
        self._memory = ctypes.create_string_buffer(128 * count + 64)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % 64
        self._places = [ctypes.c_void_p(self.address + 128 * i) for i in range(count)]
        self._numbers = (
            ctypes.c_uint64 * 9
        )()  # up to five sizes, innermost first, and up to four pitches, in bytes
        base = ctypes.addressof(self._numbers)
        self._sizes, self._pitches = ctypes.c_void_p(base), ctypes.c_void_p(base + 40)
        self._tensor = ctypes.c_void_p()
        self._function = driver_api.entry("cuTensorMapEncodeTiled")

    def fill(self, index: int, tensor: Tensor, rows: int, columns: int = 64) -> None:
        """Map `index` becomes that of `tensor`; of `columns`, 64 or 32, as many as a box has."""
        self._describe(tensor)
        self._encode(index, tensor.dtype, 3, _BOXES[rows, columns])

    def fill_boxes(self, index: int, tensor: Tensor) -> None:
        """Map `index` and the two behind it become those of `tensor` by which tokens are loaded."""
        self._describe(tensor)
        for size, box in enumerate(_TOKEN_BOXES):
            self._encode(index + size, tensor.dtype, 3, box)

    def fill_at(
        self, index: int, address: int, shape: tuple[int, int], dtype: torch.dtype, rows: int
    ) -> None:
        """Map `index` becomes that of a dense matrix at `address`."""
        height, width = shape
        _NINE(self._numbers, 0, width, height, 1, 0, 0, width * 2, height * width * 2, 0, 0)
        self._tensor.value = address
        self._encode(index, dtype, 3, _BOXES[rows, 64])

    def fill_halves(self, weights: Tensor) -> None:
        """The first map becomes that of [El, 2F, K], to be read in boxes of 64 of the F rows of
        both halves in turns of 8, and 64
        columns: the rows are looked at as [F / 8, 2 halves, 8]. Its pitches do not grow from
            dimension to dimension, which the driver does
        not ask of plain tiles.
        """
        experts, rows, depth = weights.shape
        expert, row, _ = weights.stride()
        sizes, pitches = (
            (depth, 8, 2, rows // 16, experts),
            (row * 2, rows // 2 * row * 2, 8 * row * 2, expert * 2),
        )
        _NINE(self._numbers, 0, *sizes, *pitches)
        self._tensor.value = weights.data_ptr()
        self._encode(0, weights.dtype, 5, _HALVES_BOX)

    def _describe(self, tensor: Tensor) -> None:
        shape, strides = tensor.shape, tensor.stride()
        if len(shape) == 2:
            (height, width), pitch = shape, strides[0] * 2
            _NINE(self._numbers, 0, width, height, 1, 0, 0, pitch, height * pitch, 0, 0)
        else:
            _NINE(
                self._numbers,
                0,
                shape[2],
                shape[1],
                shape[0],
                0,
                0,
                strides[1] * 2,
                strides[0] * 2,
                0,
                0,
            )
        self._tensor.value = tensor.data_ptr()

    def _encode(self, index: int, dtype: torch.dtype, dimensions: int, box: _Box) -> None:
        sides, swizzle = box
        arguments = (
            self._places[index],
            _ELEMENT[dtype],
            dimensions,
            self._tensor,
            self._sizes,
            self._pitches,
            sides,
            _ONES,
            0,
            swizzle,
            _PROMOTE_256B,
            0,
        )
        status = self._function(*arguments)
        if status:
            sizes, pitches = self._numbers[:dimensions], self._numbers[5 : 4 + dimensions]
            found = f"sizes {sizes}, innermost first, pitches of {pitches} bytes, at {self._tensor.value or 0:#x}"
            what = f"cuTensorMapEncodeTiled of {found}"
            driver_api.retry_with_context(
                status, what, torch.cuda.current_device(), self._function, *arguments
            )


class HopperKernels:
    """The kernels of a source for one dtype on the current device, which run in clusters of two
    blocks."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        library = driver_api.library()
        self._device = torch.cuda.current_device()
        driver_api.check(
            library.cuCtxSetCurrent(driver_api.primary_context(self._device)), "cuCtxSetCurrent"
        )
        # The first use may be inside a graph capture, which forbids loading otherwise.
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        exchange = library.cuThreadExchangeStreamCaptureMode
        driver_api.check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            self._functions = _load(source, dtype)
        finally:
            exchange(ctypes.byref(mode))
        self._counters: dict[int, int] = {}
        self._captured = itertools.count()
        self._cu_launch, self._stream = driver_api.entry("cuLaunchKernel"), ctypes.c_void_p()
        self._number = ctypes.c_int()  # of a launch's counter
        self._lock = (
            threading.Lock()
        )  # of all this: the main thread and autograd's may start a kernel at the same time

    def _counter(self, stream: int) -> int:
        """The number of a counter that no launch has that may run at the same time as this one:
        each stream's own, and in graphs, which may be replayed on any stream, each launch's own."""
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
            self._functions[name],
            grid,
            1,
            1,
            _THREADS,
            1,
            1,
            _DYNAMIC_SHARED,
            self._stream,
            parameters,
            None,
        )
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
            places = (*addresses, ctypes.addressof(self._number))
            self._start(name, programs, stream, (ctypes.c_void_p * len(places))(*places))


_Boxed = (
    tuple[Tensor, int] | tuple[Tensor, int, int]
)  # with the rows, and columns if not 64, of its boxes


class Operands(NamedTuple):
    """What a kernel of grouped_gemm_sm90.cu reads and writes by TMA.

    Attributes:
        own: what the blocks of a cluster each have a part of: the weights, or left.
        both: what they share: all tokens, by BOXES, or right with its boxes' rows.
        results: what is written by TMA, None for nothing; by the gated kernel its own result and
            the activation's, in boxes of 64 rows, or 32 if it is `wide`.
    """

    own: TensorMaps | _Boxed
    both: Tensor | tuple[Tensor, int]
    results: tuple[_Boxed | None, ...]


class HopperModule(HopperKernels):
    """The kernels of grouped_gemm_sm90.cu."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(GROUPED, dtype)
        self._own, self._both, self._results = (
            TensorMaps(1),
            TensorMaps(len(BOXES)),
            TensorMaps(_RESULTS),
        )
        self._numbers = (ctypes.c_uint64 * 11)()
        base = ctypes.addressof(self._numbers)
        addresses = (
            0,
            self._both.address,
            self._results.address,
            *[base + 8 * i for i in range(11)],
        )
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)

    def launch(
        self,
        name: str,
        maps: Operands,
        pointers: tuple[int, int, int, int],
        sizes: tuple[int, int, int, int],
        programs: int,
        keep: int = True,
        wide: bool = False,
    ) -> None:
        """Start `programs` // 2 clusters of kernel `name` on the current stream. The arguments are
        those of the source's KERNEL; `pointers` out, act, ends, extra.
        """
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.launch(name, maps, pointers, sizes, programs, keep, wide)
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
            _NUMBERS(self._numbers, 0, *pointers, self._counter(stream), *sizes, keep, wide)
            self._start(name, programs, stream, self._parameters)


def _load(source: Source, dtype: torch.dtype) -> dict[str, ctypes.c_void_p]:
    library, module, functions = driver_api.library(), ctypes.c_void_p(), {}
    driver_api.check(
        library.cuModuleLoadData(ctypes.byref(module), compile_source(dtype, source)),
        "cuModuleLoadData",
    )
    for name in source.kernels:
        function = functions[name] = ctypes.c_void_p()
        status = library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        driver_api.check(status, f"cuModuleGetFunction of {name}")
        status = library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, _DYNAMIC_SHARED)
        driver_api.check(status, f"cuFuncSetAttribute of {name}")
    return functions


@functools.cache
def hopper_module(dtype: torch.dtype, device: int) -> HopperModule:
    """The kernels for `dtype` on CUDA device `device`, compiled and loaded once, which takes
    seconds the first time ever."""
    with torch.cuda.device(device):
        return HopperModule(dtype)
