"""Properties of CUDA devices, looked up once."""

from __future__ import annotations

import functools

import torch

__all__ = ["has_grouped_gemm", "is_hopper", "multiprocessors"]


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
