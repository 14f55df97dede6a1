"""CUDA streams: the current one at little cost to the host, what captures it, and a wait for all of
them."""

from __future__ import annotations

import torch

from megatron_fluid.cuda import driver_api

__all__ = ["capturing", "current_capture", "current_stream", "synchronize"]

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
