"""The CUDA driver through cuda.bindings, on which torch's CUDA builds depend.

cuda.bindings is imported at the first call: a machine without a GPU has no driver, and torch's CPU
builds bring no cuda.bindings. Its functions convert each handle that is a plain integer, so what
is called for every launch keeps handles as cuda.bindings' objects (`streams`).

The driver works in the calling thread's current context. Autograd's thread of device 0 may have
none: torch sets no device there, since device 0 is current by default. `retry_with_context` repeats
a call that is refused for that reason in the device's primary context, which is torch's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron_fluid.errors import FluidError

__all__ = [
    "NO_CONTEXT",
    "allow_calls_during_capture",
    "call",
    "driver",
    "make_context_current",
    "primary_context",
    "raise_error",
    "relaxed_capture",
    "retry_with_context",
    "streams",
]

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@functools.cache
def driver() -> Any:
    """Return the module cuda.bindings.driver."""
    from cuda.bindings import driver

    return driver


def call(name: str, *arguments: object) -> Any:
    """Call the driver's function `name` and return its result, or a list if it has several.

    Raises:
        FluidError: with the driver's name for the error.
    """
    status, *results = getattr(driver(), name)(*arguments)
    if status:
        raise_error(name, status)
    return results[0] if len(results) == 1 else results or None


def raise_error(what: str, status: Any) -> None:
    """Raise FluidError for `status`, a CUresult or its number."""
    error = driver().CUresult(status)
    raise FluidError(f"{what}: {error.name} ({int(error)})")


@functools.cache
def primary_context(device: int) -> Any:
    """Return CUDA device `device`'s primary context; held as long as the process, as by torch."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


def make_context_current(device: int) -> None:
    """Give this thread CUDA device `device`'s primary context."""
    call("cuCtxSetCurrent", primary_context(device))


def retry_with_context(status: Any, device: int, name: str, *arguments: object) -> Any:
    """Repeat a call that failed with `status` if this thread has no context; return its result.

    Raises:
        FluidError: the call failed for another reason, or fails again.
    """
    if status != NO_CONTEXT:
        raise_error(name, status)
    make_context_current(device)
    return call(name, *arguments)


class _Streams(dict[int, Any]):
    """CUstream objects by their raw handles, each made once."""

    def __missing__(self, stream: int) -> Any:
        made = self[stream] = driver().CUstream(stream)
        return made


streams = _Streams()


def allow_calls_during_capture() -> Any:
    """Let this thread load kernels and query events while a graph is captured. Return the mode
    that was replaced."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return call("cuThreadExchangeStreamCaptureMode", relaxed)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """`allow_calls_during_capture` for the time of a context."""
    before = allow_calls_during_capture()
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
