"""Starting a compiled kernel through the CUDA driver: one ctypes call with a parameter block that
one struct call packs, where Triton's launcher checks and converts every argument anew.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from megatron_fluid.cuda import driver_api

__all__ = ["DriverLaunch", "parameter_bytes"]

# Triton appends this many pointers to every kernel's parameters; null, as no kernel uses them.
_SCRATCH = 2

# How struct packs a parameter into its 8 bytes; an integer that does not fit raises struct.error.
_FORMAT = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q"}
_POINTER = "Q"
# CUlaunchConfig: grid, block, shared memory; stream, attributes (none), their number.
_CONFIG = "7I4xqq8x"


class DriverLaunch:
    """cuLaunchKernelEx of one compiled kernel with a reusable block: a CUlaunchConfig, then the
    parameters at 8 bytes each.

    The kernel's parameters, of Triton's `types`, are `leading` ones of each call, then the fixed
    ones, then the trailing ones of each call.
    """

    def __init__(
        self,
        function: int,
        num_warps: int,
        shared: int,
        types: Sequence[str],
        leading: int,
        fixed: Sequence[int],
    ) -> None:
        self._device = torch.cuda.current_device()
        varying = len(types) - len(fixed)
        called = (*types[:leading], *types[leading + len(fixed) :])
        pack = struct.Struct(f"={_CONFIG}{''.join(_FORMAT.get(t, _POINTER) for t in called)}")
        self._pack = pack.pack_into
        self._block = (ctypes.c_int64 * (pack.size // 8 + len(fixed) + _SCRATCH))()
        struct.pack_into(f"={len(fixed)}q", self._block, pack.size, *fixed)
        # What varies comes first in the block, so that one call packs it; the array of addresses
        # holds the kernel's order.
        order = [*range(leading), *range(varying, varying + len(fixed)), *range(leading, varying)]
        order += range(varying + len(fixed), varying + len(fixed) + _SCRATCH)
        config = ctypes.addressof(self._block)
        first = config + struct.calcsize(f"={_CONFIG}")
        self._addresses = (ctypes.c_void_p * len(order))(*[first + 8 * index for index in order])
        self._threads, self._shared = 32 * num_warps, shared
        # The main thread and autograd's may start the same kernel: the block belongs to one.
        self._lock = threading.Lock()
        self._start = driver_api.entry("cuLaunchKernelEx")
        self._arguments = ctypes.c_void_p(config), ctypes.c_void_p(function), self._addresses, None

    @classmethod
    def of(
        cls,
        compiled: Any,
        num_warps: int,
        leading: int,
        fixed: Sequence[int],
        trailing: int = 0,
        pointers: int = 0,
    ) -> DriverLaunch | None:
        """The launch of what Triton's first launch returned.

        None where the kernel does not take exactly these parameters, the first `pointers` as
        pointers, the others as pointers or integers (another Triton release), or wants more than a
        plain launch.
        """
        metadata = compiled.metadata
        types = [t for t in compiled.src.signature.values() if t != "constexpr"]
        if len(types) != leading + len(fixed) + trailing or any(t[0] not in "*iu" for t in types):
            return None
        if any(t[0] != "*" for t in types[:pointers]):
            return None
        if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
            return None
        if metadata.shared > 48 << 10 or getattr(metadata, "global_scratch_size", 0):
            return None
        if getattr(metadata, "profile_scratch_size", 0):
            return None
        if _parameter_widths(compiled.function) != parameter_bytes(types):
            return None
        return cls(compiled.function, num_warps, metadata.shared, types, leading, fixed)

    def __call__(
        self, columns: int, rows: int, values: Sequence[int], stream: int | None = None
    ) -> None:
        """Start columns * rows programs on a raw stream; None means the current one.

        `values`: the leading parameters, then the trailing ones.
        """
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
        block, threads, shared = self._block, self._threads, self._shared
        with self._lock:
            self._pack(block, 0, columns, rows, 1, threads, 1, 1, shared, stream, 0, *values)
            status = self._start(*self._arguments)
            if status:
                driver_api.retry_with_context(
                    status, "cuLaunchKernelEx", self._device, self._start, *self._arguments
                )


def parameter_bytes(types: Sequence[str]) -> list[int]:
    """Bytes of each parameter of a kernel that Triton compiled for parameters of these types."""
    return [8 if t.startswith("*") or t.endswith("64") else 4 for t in types] + [8] * _SCRATCH


def _parameter_widths(function: int) -> list[int]:
    """Bytes of each parameter of a kernel, as the driver sees them; none where it cannot say
    (before CUDA 12.4)."""
    info = getattr(driver_api.library(), "cuFuncGetParamInfo", None)
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
