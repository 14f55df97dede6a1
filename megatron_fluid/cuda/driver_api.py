"""The CUDA driver's library by ctypes: loaded once, with errors by name.

The driver works in the calling thread's current context. Autograd's thread of device 0 may have
none: torch sets no device there, since device 0 is current by default. `retry_with_context` repeats
a call that is refused for that reason in the device's primary context, which is torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from megatron_fluid.errors import FluidError

__all__ = ["check", "entry", "library", "primary_context", "retry_with_context"]

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def entry(name: str, *argtypes: object) -> Callable[..., int]:
    """Return the driver's function `name`; a caller's argtypes do not change another caller's.

    Converting by argtypes can take longer than the call: callers that keep ready-made ctypes
    arguments give none. ctypes then takes a plain integer for a C int.
    """
    function = library()[name]
    function.argtypes = argtypes or None  # type: ignore[assignment]
    return function


def check(status: int, what: str) -> None:
    """Raise FluidError with the driver's name for `status`, unless `what` succeeded."""
    if status:
        name = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(name))
        raise FluidError(f"{what}: {(name.value or b'unknown error').decode()} ({status})")


@functools.cache
def primary_context(device: int) -> ctypes.c_void_p:
    """Return CUDA device `device`'s primary context; held as long as the process, as by torch."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    check(library().cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
    check(
        library().cuDevicePrimaryCtxRetain(ctypes.byref(context), number),
        "cuDevicePrimaryCtxRetain",
    )
    return context


def retry_with_context(
    status: int, what: str, device: int, function: Callable[..., int], *arguments: object
) -> None:
    """Repeat a call that failed with `status` if this thread has no context, else raise
    FluidError."""
    if status == _NO_CONTEXT:
        check(library().cuCtxSetCurrent(primary_context(device)), "cuCtxSetCurrent")
        status = function(*arguments)
    check(status, what)
