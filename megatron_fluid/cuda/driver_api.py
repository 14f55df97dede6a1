"""The CUDA driver's library by ctypes: loaded once, its errors by name, a context for threads that
have none.

The driver works in the calling thread's current context. Autograd's thread of device 0 may have
none: torch does not set a device that is current by default, so that ours may be its first call. A
call that is refused for that is repeated in the device's primary context, which is torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from megatron_fluid.errors import FluidError

__all__ = ["again", "check", "entry", "library", "primary_context"]

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def entry(name: str, *argtypes: object) -> Callable[..., int]:
    """The driver's function `name`, for this caller alone: converting by argtypes can take longer
    than the call, and who keeps ready-made arguments gives none; integers are then taken for C's
    int.
    """
    function = library()[name]
    function.argtypes = argtypes or None  # type: ignore[assignment]
    return function


def check(status: int, what: str) -> None:
    """Raise FluidError with the driver's name for what `what` answered, unless that is success."""
    if status:
        name = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(name))
        raise FluidError(f"{what}: {(name.value or b'unknown error').decode()} ({status})")


@functools.cache
def primary_context(device: int) -> ctypes.c_void_p:
    """Of CUDA device `device`; held as long as the process, as torch never lets go of it either."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    check(library().cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
    check(
        library().cuDevicePrimaryCtxRetain(ctypes.byref(context), number),
        "cuDevicePrimaryCtxRetain",
    )
    return context


def again(
    status: int, what: str, device: int, function: Callable[..., int], *arguments: object
) -> None:
    """What to do with a call that was refused: repeat it if this thread has no context, else raise
    FluidError."""
    if status == _NO_CONTEXT:
        check(library().cuCtxSetCurrent(primary_context(device)), "cuCtxSetCurrent")
        status = function(*arguments)
    check(status, what)
