"""Launching a Triton kernel without Triton's argument binding, which takes longer on the host than these kernels on the
device: the driver is called directly, through ctypes, with a parameter block that is packed once a call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fluid.errors import ConfigError, FluidError

__all__ = ["FastLaunch", "OwnTensors", "address", "as_words", "compile_only"]


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's memory begins."""
    return None if tensor is None else tensor.data_ptr()


def as_words(tensor: Tensor | None) -> Tensor | None:
    """A view of rows of bytes as int32."""
    return None if tensor is None else tensor.view(torch.int32)


_compile_only = False


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches inside compile their kernel, which leaves it in Triton's cache, and start nothing."""
    global _compile_only
    _compile_only = True
    try:
        yield
    finally:
        _compile_only = False


class OwnTensors:
    """Tensors that a caller passes on every launch: their addresses are read once."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.addresses = tuple(t.data_ptr() for t in tensors)


class FastLaunch:
    """One specialisation of a Triton kernel, compiled on its first call and then started through the driver.

    The kernel takes the call's tensors, then the caller's own tensors, then integers, then constexprs, and marks every
    integer `do_not_specialize`. While `cold`, the call's tensors are passed as tensors, typed as the kernel wants them;
    after that as addresses. The caller vouches that later tensors have the same types and are None in the same places,
    and that no integer is negative. Addresses must be multiples of 16, except that of `bound_m`, a single word.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], num_warps: int) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._num_warps = num_warps
        self._names = getattr(kernel, "jit_func", kernel).arg_names
        self._bound = self._names.index("bound_m") if "bound_m" in self._names else -1
        self._compiled: Any = None
        self._direct: _DriverLaunch | None = None
        self.cold = True

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | int | None],
        own: OwnTensors,
        integers: Sequence[int],
    ) -> None:
        """Start `programs` programs on the current stream."""
        bits = 0
        for index, tensor in enumerate(tensors):
            if tensor is not None and index != self._bound:
                bits |= tensor.data_ptr() if isinstance(tensor, Tensor) else tensor
        if bits & 15:
            self._refuse(tensors)
        if _compile_only:
            self._kernel.warmup(
                *tensors, *own.tensors, *integers, grid=(programs,), **self._constants, num_warps=self._num_warps
            )
            return
        if self.cold:
            compiled = self._kernel[(programs,)](
                *tensors, *own.tensors, *integers, **self._constants, num_warps=self._num_warps
            )
            if not triton.knobs.runtime.interpret:
                present = sum(t is not None for t in tensors)
                self._direct = _DriverLaunch.of(compiled, self._num_warps, present, own, len(integers))
                self._compiled, self.cold = compiled, False
            return
        direct = self._direct
        if direct is not None:
            direct(programs, [t for t in tensors if t is not None], integers)
            return
        compiled = self._compiled
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *tensors, *own.addresses, *integers, *self._constants.values(),
        )  # fmt: skip

    def _refuse(self, tensors: Sequence[Tensor | int | None]) -> None:
        for index, tensor in enumerate(tensors):
            found = tensor.data_ptr() if isinstance(tensor, Tensor) else tensor or 0
            if index != self._bound and found % 16:
                raise ConfigError.of(
                    f"address of {self._names[index]}", f"{found % 16} above a multiple of 16", "a multiple of 16"
                )


class _DriverLaunch:
    """cuLaunchKernel with a reusable parameter block: 8-byte slots of the call's tensors, integers, own tensors, scratch."""

    def __init__(
        self, function: int, num_warps: int, shared: int, own: OwnTensors, tensors: int, integers: int
    ) -> None:
        self._device = torch.cuda.current_device()
        varying, fixed, scratch = tensors + integers, len(own.addresses), 2
        self._block = (ctypes.c_uint64 * (varying + fixed + scratch))()
        self._pack = struct.Struct(f"={varying}Q").pack_into
        struct.pack_into(f"={fixed}Q", self._block, varying * 8, *own.addresses)
        # The kernel's order is tensors, own tensors, integers, then two scratch pointers that it does not use.
        order = [*range(tensors), *range(varying, varying + fixed), *range(tensors, varying)]
        order += range(varying + fixed, varying + fixed + scratch)
        base = ctypes.addressof(self._block)
        self._parameters = (ctypes.c_void_p * len(order))(*[base + 8 * slot for slot in order])
        self._function = ctypes.c_void_p(function)
        self._threads, self._shared = 32 * num_warps, shared
        self._launch = _driver().cuLaunchKernel

    @classmethod
    def of(cls, compiled: Any, num_warps: int, tensors: int, own: OwnTensors, integers: int) -> _DriverLaunch | None:
        """None where the compiled kernel does not take exactly the parameters expected (another Triton release)."""
        metadata = compiled.metadata
        types = [t for t in compiled.src.signature.values() if t != "constexpr"]
        widths = [8 if t.startswith("*") or t.endswith("64") else 4 for t in types]
        if len(types) != tensors + len(own.addresses) + integers or any(
            not t.startswith("*") for t in types[: tensors + len(own.addresses)]
        ):
            return None
        plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid and not metadata.launch_pdl
        if not plain or metadata.shared > 48 << 10 or getattr(metadata, "global_scratch_size", 0):
            return None
        if getattr(metadata, "profile_scratch_size", 0) or _parameter_widths(compiled.function) != [*widths, 8, 8]:
            return None
        return cls(compiled.function, num_warps, metadata.shared, own, tensors, integers)

    def __call__(self, programs: int, tensors: Sequence[Any], integers: Sequence[int]) -> None:
        self._pack(self._block, 0, *tensors, *integers)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        status = self._launch(
            self._function, programs, 1, 1, self._threads, 1, 1, self._shared, stream, self._parameters, None
        )
        if status:
            raise FluidError(f"cuLaunchKernel failed with CUDA driver error {status}")


_library: ctypes.CDLL | None = None


def _driver() -> ctypes.CDLL:
    global _library
    if _library is None:
        library = ctypes.CDLL("libcuda.so.1")
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        library.cuLaunchKernel.restype = ctypes.c_int
        _library = library
    return _library


def _parameter_widths(function: int) -> list[int]:
    """Bytes of each parameter of a kernel, as the driver sees them; none where it cannot tell (before CUDA 12.4)."""
    info = getattr(_driver(), "cuFuncGetParamInfo", None)
    widths: list[int] = []
    if info is None:
        return widths
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while len(widths) < 256:
        index = ctypes.c_size_t(len(widths))
        if info(ctypes.c_void_p(function), index, ctypes.byref(offset), ctypes.byref(size)):
            break
        widths.append(size.value)
    return widths
