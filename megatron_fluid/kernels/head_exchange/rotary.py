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

from megatron_fluid.cuda.triton_launch import Launcher, power_of_two
from megatron_fluid.kernels.head_exchange.launch import load_head, pieces, store_head, turned

__all__ = ["rotate_heads", "rotate_heads_kernel"]

_ROWS = 16  # of one program
_STRIDES = ["s_s", "s_b", "s_h", "t_s", "t_b", "t_h"]


@triton.jit(do_not_specialize=["rows", "batch", "heads", *_STRIDES])
def rotate_heads_kernel(
    source, target, cos, sin,
    rows,  # positions * batch * heads
    batch, heads,
    s_s,  # strides of position, batch entry and head, in units of VEC elements
    s_b, s_h, t_s, t_b, t_h,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, APART: tl.constexpr, VEC: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Turn ROWS rows. Grid (blocks of rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head = row % heads
    position = row // heads
    entry = position % batch
    position = position // batch
    read = source + (position * s_s + entry * s_b + head * s_h)[:, None] * VEC
    write = target + (position * t_s + entry * t_b + head * t_h)[:, None] * VEC
    parts = pieces(inside, D, HALF, HALF_P, REST_P, INTERLEAVED)
    a, b, r = load_head(read, parts, D if APART else 2 * HALF, HALF)
    angle = position[:, None] * HALF + tl.arange(0, HALF_P)[None, :]
    c = tl.load(cos + angle, mask=parts[3], other=0.0)
    s = tl.load(sin + angle, mask=parts[3], other=0.0)
    if INVERSE:
        s = -s
    x, y = turned(a.to(c.dtype), b.to(c.dtype), c, s)
    store_head(write, (x, y, r), parts, D if APART else 2 * HALF, HALF)


_rotate = Launcher(rotate_heads_kernel, 4)


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
    if source.is_cuda and source.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(source.device):
            rotate_heads(source, target, cos, sin, interleaved, inverse)
        return
    length, batch, heads, dim = source.shape
    (*read, last), (*write, target_last) = source.stride(), target.stride()
    if source.shape != target.shape or last != 1 or target_last != 1:
        raise ValueError(
            f"source {tuple(source.shape)} and target {tuple(target.shape)} must agree and have a "
            "unit last stride"
        )
    rows, half = length * batch * heads, cos.shape[1]
    # What the compiler may move at once: it is not told what divides a stride.
    vector = 16 // source.element_size()
    if any(stride % vector for stride in (*read, *write)):
        vector = 1
    _rotate(
        -(-rows // _ROWS),
        (source, target, cos, sin, rows, batch, heads, *(s // vector for s in (*read, *write))),
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        APART=source.data_ptr() != target.data_ptr(),
        VEC=vector,
        D=dim,
        HALF=half,
        HALF_P=power_of_two(half),
        REST_P=power_of_two(dim - 2 * half),
        ROWS=_ROWS,
    )
