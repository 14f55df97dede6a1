"""CUDA devices: properties, looked up once; the current stream at little cost to the host, and what
captures it; a wait for all streams."""

from __future__ import annotations

import functools

import torch

from megatron_fluid.cuda import driver_api

__all__ = [
    "capturing",
    "current_capture",
    "current_stream",
    "has_grouped_gemm",
    "is_hopper",
    "multiprocessors",
    "synchronize",
]

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream() -> torch.cuda.Stream:
    """Return torch.cuda.current_stream(), which reads the environment and makes an object on every
    call; here each object is made once."""
    key = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream()
    return stream


def capturing() -> bool:
    """Return whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_capture() -> tuple[int, int] | None:
    """What captures the current stream: (number of the capture, the stream), or None.

    The driver gives each capture of the process a number of its own.
    """
    if not capturing():
        return None
    stream = current_stream().cuda_stream
    # Later releases of CUDA return more behind these.
    _, number, *_ = driver_api.call("cuStreamGetCaptureInfo", driver_api.streams[stream])
    return int(number), stream


def synchronize(device: torch.device) -> None:
    """Wait until all streams of a CUDA device are idle; nothing on a CPU.

    Constructors end with it: they fill tensors on the current stream, and the first use may be on
    another one.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
