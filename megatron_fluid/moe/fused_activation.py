"""Activation times probability in one Triton kernel, forward and backward.

The plain form is activation_forward and activation_backward of moe/experts.py, which call this
where it fits. Built on the kernels of kernels/activation.

Legend: n rows, F1 width of fc1's output, F width of fc2's input.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, aligned, power_of_two
from megatron_fluid.kernels.activation.kernel import (
    ACTIVATIONS,
    activation_backward_kernel,
    activation_kernel,
    backward_program,
)
from megatron_fluid.moe.activations import RowBiases, Variant

__all__ = ["can_fuse", "fused_activation_backward", "fused_activation_forward"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = Variant()
# Name, variant, F, dtypes of h and of a bias.
type _Key = tuple[str, Variant, int, torch.dtype, torch.dtype | None]
_forward_launches: dict[_Key, Launch] = {}
_backward_launches: dict[_Key, tuple[Launch, int]] = {}


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_fuse(name: str, h: Tensor, probs: Tensor | None) -> bool:
    """Whether the kernels take this activation (by name) of h [n, F1]."""
    if probs is not None and not (probs.is_contiguous() and probs.dtype == torch.float32):
        return False
    return h.is_contiguous() and h.dtype in _DTYPES and name in ACTIVATIONS


def _constants(
    name: str, variant: Variant, width: int, block: int, bias: RowBiases | None
) -> dict[str, object]:
    code, gated = ACTIVATIONS[name]
    constants: dict[str, object] = {"bias": None, "experts": None} if bias is None else {}
    constants |= {"F": width, "CODE": code, "GATED": gated, "BLOCK": block}
    extra = {"LIMIT": float(variant.limit or 0.0), "OFFSET": float(variant.offset)}
    return constants | extra | {"INTERLEAVE": variant.interleave}


def _key(name: str, variant: Variant, width: int, h: Tensor, bias: RowBiases | None) -> _Key:
    return name, variant, width, h.dtype, None if bias is None else bias.table.dtype


def _given(bias: RowBiases | None) -> tuple[Tensor, ...]:
    """The arguments of a launch that a bias is."""
    return () if bias is None else (aligned(bias.table), bias.experts)


def _count(h: Tensor) -> Tensor:
    return torch.full((1,), h.shape[0], dtype=torch.int32, device=h.device)


def _ones(h: Tensor) -> Tensor:
    return torch.ones(h.shape[0], device=h.device)


def fused_activation_forward(
    name: str,
    h: Tensor,
    probs: Tensor | None,
    count: Tensor | None = None,
    variant: Variant = _PLAIN,
    bias: RowBiases | None = None,
) -> Tensor:
    """a = act(h + bias) * p: h [n, F1], probs fp32 [n] or longer, None for ones -> a [n, F] in h's
    dtype. The first `count` rows are written (int32 [1], on the device); all without it."""
    width = h.shape[1] // 2 if ACTIVATIONS[name][1] else h.shape[1]
    out = h.new_empty((h.shape[0], width))
    if not h.shape[0]:
        return out
    block = min(1024, power_of_two(width))
    columns = -(-width // block)
    key = _key(name, variant, width, h, bias)
    launch = _forward_launches.get(key)
    if launch is None:
        constants = _constants(name, variant, width, block, bias)
        launch = Launch(activation_kernel, 4, constants)
        _forward_launches[key] = launch
    grid = (max(1, _num_sms(h.device) * 16 // columns), columns)
    probs = _ones(h) if probs is None else probs
    launch(grid, (h, probs, out, _count(h) if count is None else count, *_given(bias)))
    return out


def fused_activation_backward(
    name: str,
    h: Tensor,
    da: Tensor,
    probs: Tensor | None,
    count: Tensor | None = None,
    *,
    bounded: bool = False,
    consume: bool = False,
    variant: Variant = _PLAIN,
    bias: RowBiases | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward: da [n, F] -> dh [n, F1], a [n, F], dprobs fp32 [n].

    a takes da's memory, and dh that of h with `consume`. bounded: most of the n rows may be empty,
    so programs fill the SMs in place of one program a row.
    """
    rows, width = da.shape
    dh = h if consume else torch.empty_like(h)
    dprobs = torch.empty(rows, dtype=torch.float32, device=h.device)
    if not rows:
        return dh, da, None if probs is None else dprobs
    key = _key(name, variant, width, h, bias)
    found = _backward_launches.get(key)
    if found is None:
        block, warps, resident = backward_program(width)
        constants = _constants(name, variant, width, block, bias)
        launch = Launch(activation_backward_kernel, warps, constants)
        found = _backward_launches[key] = launch, resident
    launch, resident = found
    programs = min(rows, _num_sms(h.device) * resident) if bounded else rows
    count = _count(h) if count is None else count
    weights = _ones(h) if probs is None else probs
    launch((programs, 1), (h, weights, da, dh, da, dprobs, count, *_given(bias)))
    return dh, da, None if probs is None else dprobs
