"""Rows of experts that lie further apart than 32 bits can count."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["far_experts"]


def far_experts(local: int, rows: int, hidden: int) -> Tensor:
    """bf16 zeros [local, rows, hidden], experts 2**32 words apart, which is 0 in 32 bits. Only
    pages written take memory."""
    stride = 2 << 32
    unreserved = getattr(mmap, "MAP_NORESERVE", 0)
    size = 2 * ((local - 1) * stride + rows * hidden)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    return torch.frombuffer(pages, dtype=torch.bfloat16).as_strided(
        (local, rows, hidden), (stride, hidden, 1)
    )
