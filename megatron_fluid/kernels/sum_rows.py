"""A token's rows, each times its probability, summed in fp32 in the order of its choices.

Reference: ``sum(probs[:, k, None] * z[rows[:, k]].float() for k in range(K))``
(tests/unit/kernels/test_sum_rows.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launcher, power_of_two

__all__ = ["sum_rows", "sum_rows_kernel"]


@triton.jit
def sum_rows_kernel(
    z, rows, probs, out,
    H: tl.constexpr, K: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, H] from z [R, H], rows int64 [T, K], probs fp32 [T, K]. Grid (T, H / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(rows + token * K + choice)
        part = tl.load(z + row * H + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_PROBS:
            part *= tl.load(probs + token * K + choice)
        total += part
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=inside)


_launch = Launcher(sum_rows_kernel, 4)


def sum_rows(z: Tensor, rows: Tensor, probs: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` [T, H].

    Args:
        z: bf16, fp16 or fp32, contiguous. [R, H]
        rows: row of each choice, int64, contiguous. [T, K]
        probs: fp32, contiguous; None means 1. [T, K]
        out: of z's dtype, contiguous.
    """
    tokens, h = out.shape
    block, has_probs = min(2048, power_of_two(h)), probs is not None
    arguments = (z, rows, rows if probs is None else probs, out)
    constants = {"H": h, "K": rows.shape[1], "HAS_PROBS": has_probs, "BLOCK": block}
    _launch(tokens, arguments, triton.cdiv(h, block), **constants)
