"""Rotary position embedding on strided heads, in place or from one layout into another.

Reference: ``megatron_fluid.attention.packed._turn`` on a CPU tensor.

One program turns a block of (position, batch, head) rows. It reads both members of every pair
before it writes either, so source and target may be the same memory. For D = 4, dim = 4, not
interleaved, a row [a0 a1 b0 b1] becomes [a0 cos0 - b0 sin0, a1 cos1 - b1 sin1, b0 cos0 + a0 sin0,
b1 cos1 + a1 sin1].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import power_of_two

__all__ = ["rotate_heads"]


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    source, target, cos, sin, rows, batch, heads, half, dim, s0, s1, s2, t0, t1, t2,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head = row % heads
    position = row // heads
    entry = position % batch
    position = position // batch
    read = source + position * s0 + entry * s1 + head * s2
    write = target + position * t0 + entry * t1 + head * t2
    pair = tl.arange(0, HALF)
    live = inside[:, None] & (pair < half)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    a = tl.load(read[:, None] + first[None, :], mask=live, other=0.0)
    b = tl.load(read[:, None] + second[None, :], mask=live, other=0.0)
    c = tl.load(cos + position[:, None] * half + pair[None, :], mask=live, other=0.0)
    s = tl.load(sin + position[:, None] * half + pair[None, :], mask=live, other=0.0)
    wide_a, wide_b = a.to(c.dtype), b.to(c.dtype)
    if INVERSE:
        s = -s
    tl.store(write[:, None] + first[None, :], (wide_a * c - wide_b * s).to(a.dtype), mask=live)
    tl.store(write[:, None] + second[None, :], (wide_b * c + wide_a * s).to(a.dtype), mask=live)
    if APART and REST > 0:
        column = 2 * half + tl.arange(0, REST)
        kept = inside[:, None] & (column < dim)[None, :]
        tl.store(
            write[:, None] + column[None, :],
            tl.load(read[:, None] + column[None, :], mask=kept),
            mask=kept,
        )


def rotate_heads(
    source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> None:
    """target = source with the first 2 * cos.shape[1] dimensions of each head rotated by its
    position's angles.

    Args:
        source, target: [S, B, h, D] of one dtype on a GPU, unit last stride, any others; the same
            memory or disjoint.
        cos, sin: [S, dim / 2], contiguous, float32 or float64.
        interleaved: pairs are neighbours instead of half the rotated dimensions apart.
        inverse: rotate by the negative angles (the gradient).
    """
    length, batch, heads, dim = source.shape
    if source.shape != target.shape or source.stride(3) != 1 or target.stride(3) != 1:
        raise ValueError(
            f"source {tuple(source.shape)} and target {tuple(target.shape)} must agree and have a "
            "unit last stride"
        )
    half = cos.shape[1]
    rows = length * batch * heads
    if rows == 0:
        return
    block = 16
    rest = dim - 2 * half
    with torch.cuda.device(source.device):
        _rotate[(triton.cdiv(rows, block),)](
            source, target, cos, sin, rows, batch, heads, half, dim, *source.stride()[:3],
            *target.stride()[:3], INTERLEAVED=interleaved, INVERSE=inverse,
            APART=source.data_ptr() != target.data_ptr(), ROWS=block, HALF=power_of_two(half),
            REST=power_of_two(rest) if rest else 0, num_warps=4,
        )  # fmt: skip
