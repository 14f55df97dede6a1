"""Activation times probability in one Triton kernel, forward and backward, for rows on a GPU.

The plain form is activation_forward and activation_backward of moe/experts.py, which call this
where it fits. Built on the kernels of kernels/activation.py.

Legend: n rows, F1 width of fc1's output, F width of fc2's input.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

__all__ = ["can_fuse", "fused_activation_backward", "fused_activation_forward"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_fuse(name: str, h: Tensor, probs: Tensor | None) -> bool:
    """Whether the kernels take this activation (by name) of h [n, F1]."""
    if not h.is_cuda or h.dtype not in _DTYPES or not h.is_contiguous() or not _have_triton():
        return False
    if probs is not None and (probs.dtype != torch.float32 or not probs.is_contiguous()):
        return False
    from megatron_fluid.kernels.activation import ACTIVATIONS

    return name in ACTIVATIONS


def _shape(name: str, h: Tensor) -> tuple[int, bool, int]:
    from megatron_fluid.kernels.activation import ACTIVATIONS

    code, gated = ACTIVATIONS[name]
    return code, gated, h.shape[1] // 2 if gated else h.shape[1]


def _count(h: Tensor) -> Tensor:
    return torch.full((1,), h.shape[0], dtype=torch.int32, device=h.device)


def fused_activation_forward(name: str, h: Tensor, probs: Tensor | None) -> Tensor:
    """a = act(h) * p: h [n, F1], probs fp32 [n] or None -> a [n, F] in h's dtype"""
    from megatron_fluid.cuda.triton_launch import power_of_two
    from megatron_fluid.kernels.activation import activation_kernel

    code, gated, width = _shape(name, h)
    out = h.new_empty((h.shape[0], width))
    if h.shape[0]:
        probs = torch.ones(h.shape[0], device=h.device) if probs is None else probs
        block = min(1024, power_of_two(width))
        columns = -(-width // block)
        grid = (max(1, min(h.shape[0], _processors(h.device) * 16 // columns)), columns)
        activation_kernel[grid](
            h, probs, out, _count(h), F=width, CODE=code, GATED=gated, BLOCK=block, num_warps=4
        )  # fmt: skip
    return out


def fused_activation_backward(
    name: str, h: Tensor, da: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward: da [n, F] -> dh [n, F1], a [n, F] again, dprobs fp32 [n] or None"""
    from megatron_fluid.kernels.activation import activation_backward_kernel, backward_program

    code, gated, width = _shape(name, h)
    dh, a = torch.empty_like(h), torch.empty_like(da)
    scale = torch.ones(h.shape[0], device=h.device) if probs is None else probs
    dprobs = torch.empty_like(scale)
    if h.shape[0]:
        block, warps, _ = backward_program(width)
        activation_backward_kernel[(h.shape[0],)](
            h,
            scale,
            da.contiguous(),
            dh,
            a,
            dprobs,
            _count(h),
            F=width,
            CODE=code,
            GATED=gated,
            BLOCK=block,
            num_warps=warps,
        )
    return dh, a, None if probs is None else dprobs
