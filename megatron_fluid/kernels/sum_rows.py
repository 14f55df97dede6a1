"""A token's rows, each times a number, summed in fp32 in the order of its choices.

Oracle: ``sum(probs[:, k, None] * z[rows[:, k]].float() for k in range(K))``
(tests/unit/kernels/test_sum_rows.py).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch

__all__ = ["sum_rows", "sum_rows_kernel"]


@triton.jit
def sum_rows_kernel(
    z, rows, probs, out, h, K: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr
):
    """out [T, h] from z [R, h], rows int64 [T, K], probs fp32 [T, K]. Grid (T, h / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < h
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(rows + token * K + choice)
        part = tl.load(z + row * h + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_PROBS:
            part *= tl.load(probs + token * K + choice)
        total += part
    tl.store(out + token * h + column, total.to(out.dtype.element_ty), mask=inside)


@functools.cache
def _launch(h: int, k: int, has_probs: bool, dtype: torch.dtype, device: torch.device) -> Launch:
    return Launch(
        sum_rows_kernel,
        4,
        {"K": k, "HAS_PROBS": has_probs, "BLOCK": min(2048, triton.next_power_of_2(h))},
    )


def sum_rows(z: Tensor, rows: Tensor, probs: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` [T, H].

    Args:
        z: bf16, fp16 or fp32, contiguous. [R, H]
        rows: row of each choice, int64, contiguous. [T, K]
        probs: fp32, contiguous; None: 1. [T, K]
        out: of z's dtype, contiguous.
    """
    tokens, h = out.shape
    if tokens == 0:
        return
    arguments = (z, rows, rows if probs is None else probs, out, h)
    block = min(2048, triton.next_power_of_2(h))
    grid = (tokens, triton.cdiv(h, block))
    if all(t.data_ptr() % 16 == 0 for t in arguments[:4] if isinstance(t, Tensor)):
        _launch(h, rows.shape[1], probs is not None, z.dtype, z.device)(grid, arguments)
    else:
        sum_rows_kernel[grid](*arguments, rows.shape[1], probs is not None, block, num_warps=4)
