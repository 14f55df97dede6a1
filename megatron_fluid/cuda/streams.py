"""CUDA streams: the current one at little cost to the host, and a wait for all of them."""

from __future__ import annotations

import torch

__all__ = ["current_stream", "synchronize"]

_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream() -> torch.cuda.Stream:
    """Return torch.cuda.current_stream(), which reads the environment and makes an object on every
    call; here each object is made once."""
    found = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    stream = _streams.get(found)
    if stream is None:
        stream = _streams[found] = torch.cuda.current_stream()
    return stream


def synchronize(device: torch.device) -> None:
    """Wait until all streams of a CUDA device are idle; nothing on a CPU.

    Constructors end with it: they fill tensors on the current stream, and the first use may be on
    another one.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
