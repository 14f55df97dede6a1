"""fp8 rows turned for the products of weight gradients: from a scale for 1 x 128 features to one
for 128 places of one feature, in one pass.

Both scales are powers of two, so that a value keeps its digits unless it becomes an e4m3 denormal:
where it is less than 2^-13 of the largest one of its 128 places. What becomes of zeros, denormals,
infinities and NaN: kernels/fp8_casts. A NaN spreads over its feature's 128 places.

Reference: `turn_rows` of tests/support/fp8_reference.py. The layout:
kernels/fp8_weight_grads.

Shapes: N expert rows, W their width, El local experts, P places, S pitch of the rows' scales.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launcher, power_of_two
from megatron_fluid.kernels.flags import INTERPRETED
from megatron_fluid.kernels.fp8_casts.quantize import block_scale, magnitude, to_e4m3
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.kernels.fp8_weight_grads.launch import TurnedRows, blocks_of
from megatron_fluid.kernels.operands import refuse

__all__ = ["turn_rows", "turn_rows_kernel"]

_MOST_EXPERTS = 1024
# Measured: docs/tuning_notes.md#fp8-experts
_FEATURES, _WARPS = 64, 4  # of a program
# Blocks whose programs are neighbours: they read whole rows together and write this many times 128
# bytes of a feature, so that pages of the memory that are open serve more than one program.
_NEIGHBOURS = 4
# Bytes that a thread loads at once, so that a warp has one row: with 16 a feature's places are
# spread over more threads, and finding their largest takes more instructions than the cast.
_STEP = 4


@triton.jit
def _restored(x, scales, row, last, column, row_bytes):
    """fp32 [rows, columns], zeros behind the last row."""
    inside = row < last
    at = row.to(tl.int64)[:, None] * row_bytes + column[None, :]
    value = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    return value * tl.load(scales + row, mask=inside, other=0.0)[:, None]


@triton.jit
def _larger(a, b):
    """The larger magnitude, NaN where one is NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bits(value, ROUND: tl.constexpr):
    """The cast's bytes, int32."""
    return to_e4m3(value, ROUND).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _four(a, b, c, d, ROUND: tl.constexpr):
    """The casts of four values as the bytes of an int32, a's the lowest."""
    if ROUND:
        low = _bits(a, ROUND) | (_bits(b, ROUND) << 8)
        return low | (_bits(c, ROUND) << 16) | (_bits(d, ROUND) << 24)
    # Triton casts neighbours of one tensor in pairs, and would take the pairs apart again.
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["apart", "pitch", "blocks"])
def turn_rows_kernel(
    x,  # e4m3 [>= N, W], rows STEP * `apart` bytes apart
    scales,  # fp32 [W / 128, S]
    offsets,  # int32 [El]
    out,  # int32 [W, P / 4]: e4m3 of four places each
    out_scales,  # fp32 [P / 128, W]
    apart,
    pitch,
    blocks,  # P / 128
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    STEP: tl.constexpr, NEIGHBOURS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Grid (P / 128 rounded up to NEIGHBOURS times WIDTH / FEATURES): a program has one block of
    places. It finds the block's expert itself, and ends where the block is in no use."""
    place_in = tl.program_id(0) % (NEIGHBOURS * (WIDTH // FEATURES))
    block = tl.program_id(0) // (NEIGHBOURS * (WIDTH // FEATURES)) * NEIGHBOURS
    block += place_in % NEIGHBOURS
    part = place_in // NEIGHBOURS
    expert = tl.arange(0, PADDED)
    ends = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
    begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    own = (ends - begins + 127) >> 7
    behind = tl.cumsum(own, 0)  # blocks of the experts up to each
    ahead = block - (behind - own)
    mine = (ahead >= 0) & (ahead < own)  # of one expert, or of none
    first = tl.sum(tl.where(mine, begins + ahead * 128, 0), 0)
    last = tl.sum(tl.where(mine, ends, 0), 0)
    if last == 0:
        return
    column = part * FEATURES + tl.arange(0, FEATURES)
    scales += (part * FEATURES // 128) * pitch.to(tl.int64)
    row_bytes = apart.to(tl.int64) * STEP
    # Four places of a feature are one word, so that a transpose moves words and not bytes.
    word = tl.arange(0, 32)
    row = first + 4 * word
    a = _restored(x, scales, row, last, column, row_bytes)
    b = _restored(x, scales, row + 1, last, column, row_bytes)
    c = _restored(x, scales, row + 2, last, column, row_bytes)
    d = _restored(x, scales, row + 3, last, column, row_bytes)
    # Of floats, whose magnitude is no operation of its own; bits then, since tl.max drops NaN.
    largest = _larger(_larger(a, b), _larger(c, d))
    scale, inverse = block_scale(tl.max(magnitude(largest), 0))
    inverse = inverse[None, :]
    bits = _four(a * inverse, b * inverse, c * inverse, d * inverse, ROUND)
    place = block * 32 + word
    at = column.to(tl.int64)[:, None] * (blocks * 32) + place[None, :]
    tl.store(out + at, tl.trans(bits))
    tl.store(out_scales + block.to(tl.int64) * WIDTH + column, scale)


_turn = Launcher(turn_rows_kernel, _WARPS)


def turn_rows(x: Fp8Rows, offsets: Tensor) -> TurnedRows:
    """The rows of every expert, turned. Blocks behind the last one in use are not written.

    x: [N, W], its values dense or with rows further apart. offsets: int32 [El] on the device; the
    rows of expert e end at offsets[e].

    Raises:
        ConfigError: dtypes, shapes or strides that do not fit.
    """
    values, scales = x
    rows, width = values.shape
    experts = offsets.shape[0]
    fits = (
        values.dtype == torch.float8_e4m3fn
        and width % 128 == 0
        and (not rows or values.stride(1) == 1)
        and scales.shape[0] == width // 128
        and scales.shape[1] >= rows
        and scales.is_contiguous()
        and offsets.dtype == torch.int32
        and experts <= _MOST_EXPERTS
    )
    if not fits:
        allowed = (
            "torch.float8_e4m3fn rows [N, W] with contiguous features, dense scales [W / 128, N or "
            f"more], torch.int32 offsets of at most {_MOST_EXPERTS} experts; W a multiple of 128"
        )
        refuse("turn_rows", allowed, rows=values, scales=scales, offsets=offsets)
    blocks = blocks_of(rows, experts)
    out = values.new_empty((width, 128 * blocks))
    out_scales = scales.new_empty((blocks, width))
    if not blocks:
        return TurnedRows(out, out_scales)
    step = math.gcd(values.stride(0), _STEP)
    given = (values, scales, offsets, out.view(torch.int32), out_scales)
    sizes = (values.stride(0) // step, scales.shape[1], blocks)
    constants = {"WIDTH": width, "FEATURES": _FEATURES, "EXPERTS": experts}
    constants |= {"PADDED": power_of_two(experts), "STEP": step, "NEIGHBOURS": _NEIGHBOURS}
    programs = -(-blocks // _NEIGHBOURS) * _NEIGHBOURS * (width // _FEATURES)
    _turn(programs, (*given, *sizes), **constants, ROUND=INTERPRETED)
    return TurnedRows(out, out_scales)
