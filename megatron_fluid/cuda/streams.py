"""CUDA streams: the current one, at little cost to the host, and what a constructor owes the
streams of later uses."""

from __future__ import annotations

import torch

__all__ = ["current_stream", "settle"]

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream() -> torch.cuda.Stream:
    """torch.cuda.current_stream(), which reads the environment and makes an object on every call,
    each object once."""
    found = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    stream = _streams.get(found)
    if stream is None:
        stream = _streams[found] = torch.cuda.current_stream()
    return stream


def settle(device: torch.device) -> None:
    """Wait until the work of all streams of a CUDA device is done; nothing on a CPU.

    For the end of constructors: what they fill on the stream that is current then may first be used
    on another one.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
