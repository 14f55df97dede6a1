"""Starting a compiled Triton kernel through the CUDA driver: one call with a parameter block that
one struct call packs, where Triton's launcher checks and converts every argument again.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_fluid.cuda import driver_api

__all__ = ["DriverLaunch", "direct_launch", "parameter_bytes"]

# Triton appends this many pointers to every kernel's parameters; null, as no kernel uses them.
_SCRATCH = 2

# How struct packs a parameter into its 8 bytes; an integer that does not fit raises struct.error.
_FORMAT = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q"}
_POINTER = "Q"

# (columns, rows, values, stream): starts columns * rows programs on a raw stream, None for the
# current one. values: the leading parameters, then the trailing ones.
type DriverLaunch = Callable[[int, int, Sequence[int], int | None], None]


def direct_launch(
    compiled: Any,
    num_warps: int,
    leading: int,
    fixed: Sequence[int],
    trailing: int = 0,
    pointers: int = 0,
) -> DriverLaunch | None:
    """Return the launch of a kernel that Triton compiled.

    The kernel's parameters are `leading` ones of each call, then the fixed ones, then the
    `trailing` ones of each call. None where the kernel does not take exactly these, the first
    `pointers` as pointers, the others as pointers or integers (another Triton release), or wants
    more than a plain launch.
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
    return _launch(compiled.function, 32 * num_warps, metadata.shared, types, leading, fixed)


def _launch(
    function: int,
    threads: int,
    shared: int,
    types: Sequence[str],
    leading: int,
    fixed: Sequence[int],
) -> DriverLaunch:
    """The launch as a closure, whose variables take less time to read than attributes."""
    device = torch.cuda.current_device()
    varying, count = len(types) - len(fixed), len(types) + _SCRATCH
    called = (*types[:leading], *types[leading + len(fixed) :])
    packer = struct.Struct("=" + "".join(_FORMAT.get(t, _POINTER) for t in called))
    # The parameters, what varies first, so that one call packs it; behind them their addresses, in
    # the kernel's order.
    block = (ctypes.c_int64 * (2 * count))()
    order = [*range(leading), *range(varying, len(types)), *range(leading, varying)]
    order += range(len(types), count)
    first = ctypes.addressof(block)
    block[varying : len(types)] = list(fixed)
    block[count:] = [first + 8 * index for index in order]
    addresses = first + 8 * count
    pack, streams, raw_stream = (
        packer.pack_into,
        driver_api.streams,
        torch._C._cuda_getCurrentRawStream,
    )
    cu_launch = driver_api.driver().cuLaunchKernel
    handle = driver_api.driver().CUfunction(function)
    # The main thread and autograd's may start the same kernel: the block belongs to one.
    lock = threading.Lock()

    def launch(columns: int, rows: int, values: Sequence[int], stream: int | None = None) -> None:
        if stream is None:
            stream = raw_stream(device)
        with lock:
            pack(block, 0, *values)
            on = streams[stream]
            status = cu_launch(handle, columns, rows, 1, threads, 1, 1, shared, on, addresses, 0)[0]
            if status:
                shape = (columns, rows, 1, threads, 1, 1, shared)
                driver_api.retry_with_context(
                    status, device, "cuLaunchKernel", handle, *shape, on, addresses, 0
                )

    return launch


def parameter_bytes(types: Sequence[str]) -> list[int]:
    """Bytes of each parameter of a kernel that Triton compiled for parameters of these types."""
    return [8 if t.startswith("*") or t.endswith("64") else 4 for t in types] + [8] * _SCRATCH


def _parameter_widths(function: int) -> list[int]:
    """Bytes of each parameter of a kernel, as the driver sees them; none where it cannot say
    (before CUDA 12.4)."""
    driver, widths = driver_api.driver(), list[int]()
    handle = driver.CUfunction(function)
    with contextlib.suppress(RuntimeError):  # the driver lacks the function
        while len(widths) < 256:
            status, _, width = driver.cuFuncGetParamInfo(handle, len(widths))
            if status:
                break
            widths.append(width)
    return widths
