"""Casts to fp8 e4m3 with a scale for each block, alone and fused with SwiGLU.

The recipe is DeepSeek-V3's, and Transformer Engine's Float8BlockScaling: one scale for 1 x 128 of
activations and gradients and for 128 x 128 of weights. value = e4m3 * scale, and a scale is the
least power of two for which no value of its block exceeds 448. So scaling is exact, and a value is
rounded once, to nearest even.

- A block of zeros has scale 1.
- Scales stay at 2^-126 or above: in a block whose largest value is below 2^-118 what is less than
  2^-136 becomes zero.
- A block with an infinity or a NaN becomes NaN, values and scale: nothing saturates.

What is kept of fc1's output for the backward is no operand of a GEMM, and e4m3 would be too coarse
for it. It is companded to int8, a byte a value, too: value = q * |q| * scale, with the largest
magnitude of 1 x 128 values at q = 127. Steps grow with the square root of the value, so that an
outlier leaves small values their digits. A block below 2^-100 becomes zeros; one with an infinity
or a NaN becomes NaN.

Reference: tests/support/fp8_reference.py.

Shapes: N rows (those from `rows` on are not touched), P pitch of scales, at least N, F ffn, El
experts, J x K matrices. Widths are multiples of 128. Scales of rows are [width / 128, P], so that a
GEMM reads neighbouring rows' side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.activation.kernel import value_and_slope

__all__ = [
    "block_scale",
    "cast_blocks",
    "cast_rows_kernel",
    "cast_weights_kernel",
    "magnitude",
    "restore_rows_kernel",
    "swiglu_backward_cast_kernel",
    "swiglu_cast_kernel",
    "to_e4m3",
]


@triton.jit
def block_scale(largest):
    """(scale, 1 / scale) of blocks from the bits of their largest magnitudes, int32."""
    exponent = largest >> 23
    # 448 is 1.75 * 2^8.
    shift = 135 - exponent - ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    shift = tl.where(largest == 0, 0, tl.minimum(shift, 126))
    nan = exponent == 255
    scale = tl.where(nan, 0x7FC00000, (127 - shift) << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(nan, 0x7FC00000, (127 + shift) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def magnitude(value):
    """The bits of |value|, which order as integers: NaN above infinity above all numbers."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_e4m3(value, ROUND: tl.constexpr):
    """The cast. ROUND: round first, since Triton's interpreter casts wrongly (3.6)."""
    if ROUND:
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (value + 24576.0) - 24576.0  # to multiples of 2^-9
        small = tl.where(small == 0.0, value * 0.0, small)  # zeros keep their sign
        cast = tl.where(tl.abs(value) < 0.015625, small, normal).to(tl.float8e4nv)
        bits = tl.where(value == value, cast.to(tl.int8, bitcast=True), 127)
        return bits.to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return value.to(tl.float8e4nv)


@triton.jit
def cast_blocks(value, ROUND: tl.constexpr):
    """fp32 [R, B, 128] -> e4m3 [R, B, 128], scales fp32 [R, B]."""
    scale, inverse = block_scale(tl.max(magnitude(value), 2))
    return to_e4m3(value * inverse[:, :, None], ROUND), scale


@triton.jit
def _compand(value):
    """fp32 [R, B, 128] -> int8 [R, B, 128], scales fp32 [R, B]: value = q * |q| * scale."""
    bits = tl.max(magnitude(value), 2)
    largest = bits.to(tl.float32, bitcast=True)
    finite = (bits >> 23) != 255
    scale = tl.where(largest < 2.0**-100, 0.0, largest * (1.0 / 16129.0))
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, inverse, 0.0)
    root = tl.sqrt_rn(tl.where(finite[:, :, None], tl.abs(value), 0.0) * inverse[:, :, None])
    # To the nearest integer: fp32 numbers from 2^23 are integers.
    whole = ((root + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.where(value < 0.0, -whole, whole).to(tl.int8), scale


@triton.jit(do_not_specialize=["pitch"])
def cast_rows_kernel(
    x,  # [>= N, WIDTH]
    rows,  # int32 scalar: N
    out,  # e4m3 [>= N, WIDTH]
    scales,  # fp32 [WIDTH / 128, P]
    pitch,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Grid (any, ceil(WIDTH / 128 / BLOCKS))."""
    n = tl.load(rows)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    first = tl.program_id(0) * ROWS
    while first < n:
        row = first + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (block < WIDTH // 128)[None, :]
        at = row.to(tl.int64)[:, None, None] * WIDTH + column[None, :, :]
        value = tl.load(x + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
        cast, scale = cast_blocks(value, ROUND)
        tl.store(out + at, cast, mask=inside[:, :, None])
        tl.store(scales + block.to(tl.int64)[None, :] * pitch + row[:, None], scale, mask=inside)
        first += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["pitch", "apart"])
def restore_rows_kernel(
    x,  # e4m3 [>= N, WIDTH], 128 * `apart` from one row to the next
    scales,  # fp32 [WIDTH / 128, P]
    rows,  # int32 scalar: N
    out,  # bf16 [>= N, WIDTH]: exact, but where a value is below bf16's smallest
    pitch, apart,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """value = e4m3 * scale. Grid as of cast_rows_kernel."""
    n = tl.load(rows)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    first = tl.program_id(0) * ROWS
    while first < n:
        row = first + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (block < WIDTH // 128)[None, :]
        at = row.to(tl.int64)[:, None, None] * WIDTH + column[None, :, :]
        source = row.to(tl.int64)[:, None, None] * apart * 128 + column[None, :, :]
        value = tl.load(x + source, mask=inside[:, :, None], other=0.0).to(tl.float32)
        place = block.to(tl.int64)[None, :] * pitch + row[:, None]
        scale = tl.load(scales + place, mask=inside, other=0.0)
        value *= scale[:, :, None]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside[:, :, None])
        first += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["apart"])
def cast_weights_kernel(
    w,  # [El, J, K], dense matrices, 8 * `apart` elements from one to the next
    out,  # e4m3 [El, J, K]
    turned,  # e4m3 [El, K, J]
    scales,  # fp32 [El, J / 128, K / 128]
    turned_scales,  # fp32 [El, K / 128, J / 128]
    apart,
    J: tl.constexpr, K: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Both layouts in one pass. Grid (El * J / 128, K / 128)."""
    ROW_BLOCKS: tl.constexpr = J // 128
    COLUMN_BLOCKS: tl.constexpr = K // 128
    expert = (tl.program_id(0) // ROW_BLOCKS).to(tl.int64)
    row_block, column_block = tl.program_id(0) % ROW_BLOCKS, tl.program_id(1)
    j = row_block * 128 + tl.arange(0, 128)
    k = column_block * 128 + tl.arange(0, 128)
    value = tl.load(w + expert * apart * 8 + j[:, None] * K + k[None, :]).to(tl.float32)
    scale, inverse = block_scale(tl.max(tl.max(magnitude(value), 1), 0))
    cast = to_e4m3(value * inverse, ROUND)
    tl.store(out + expert * (J * K) + j[:, None] * K + k[None, :], cast)
    tl.store(turned + expert * (J * K) + k[:, None] * J + j[None, :], tl.trans(cast))
    first = expert * (ROW_BLOCKS * COLUMN_BLOCKS)
    tl.store(scales + first + row_block * COLUMN_BLOCKS + column_block, scale)
    tl.store(turned_scales + first + column_block * ROW_BLOCKS + row_block, scale)


@triton.jit(do_not_specialize=["pitch"])
def swiglu_cast_kernel(
    h,  # [>= N, 2F]: gate, up
    prob,  # fp32 [>= N]
    rows,  # int32 scalar: N
    out,  # e4m3 [>= N, F]
    scales,  # fp32 [F / 128, P]
    h_kept,  # int8 [>= N, 2F] (KEEP)
    h_scales,  # fp32 [2F / 128, P] (KEEP)
    pitch,
    F: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up * prob, cast from fp32; with KEEP also h, companded. Grid (any,
    ceil(F / 128 / BLOCKS))."""
    n = tl.load(rows)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    first = tl.program_id(0) * ROWS
    while first < n:
        row = first + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (block < F // 128)[None, :]
        wide = inside[:, :, None]
        wide_row = row.to(tl.int64)[:, None, None]
        h_at = wide_row * (2 * F) + column[None, :, :]
        place = block.to(tl.int64)[None, :] * pitch + row[:, None]
        gate = tl.load(h + h_at, mask=wide, other=0.0).to(tl.float32)
        up = tl.load(h + h_at + F, mask=wide, other=0.0).to(tl.float32)
        if KEEP:
            kept, scale = _compand(gate)
            tl.store(h_kept + h_at, kept, mask=wide)
            tl.store(h_scales + place, scale, mask=inside)
            kept, scale = _compand(up)
            tl.store(h_kept + h_at + F, kept, mask=wide)
            tl.store(h_scales + place + (F // 128) * pitch.to(tl.int64), scale, mask=inside)
        value, _ = value_and_slope(gate, 0)
        p = tl.load(prob + row, mask=row < n, other=0.0)
        cast, scale = cast_blocks(value * up * p[:, None, None], ROUND)
        tl.store(out + wide_row * F + column[None, :, :], cast, mask=wide)
        tl.store(scales + place, scale, mask=inside)
        first += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["pitch"])
def swiglu_backward_cast_kernel(
    h,  # [>= N, 2F], or int8 (KEPT)
    h_scales,  # fp32 [2F / 128, P] (KEPT)
    prob,  # fp32 [>= N]
    da,  # [>= N, F]
    rows,  # int32 scalar: N
    dh,  # bf16 [>= N, 2F] out (not IN_FP8)
    dh_cast,  # e4m3 [>= N, 2F] out
    dh_scales,  # fp32 [2F / 128, P] out
    a,  # bf16 [>= N, F] out (may be da itself; not IN_FP8)
    a_cast,  # e4m3 [>= N, F] out (IN_FP8)
    a_scales,  # fp32 [F / 128, P] out (IN_FP8)
    dprob,  # fp32 [>= N] out
    pitch,
    F: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, KEPT: tl.constexpr,
    IN_FP8: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """dh and the input a of fc2 again, and dprob, summed in a fixed order: dh in both precisions
    and a in bf16, with IN_FP8 both in fp8 alone. Casts are of the fp32 values. Grid (any,)."""
    n = tl.load(rows)
    HALF: tl.constexpr = F // 128
    to_up = HALF * pitch.to(tl.int64)  # from a gate's scale to its up's
    first = tl.program_id(0) * ROWS
    while first < n:
        row = first + tl.arange(0, ROWS)
        p = tl.load(prob + row, mask=row < n, other=0.0)[:, None, None]
        wide_row = row.to(tl.int64)[:, None, None]
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, HALF, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
            inside = (row < n)[:, None] & (block < HALF)[None, :]
            wide = inside[:, :, None]
            at = wide_row * (2 * F) + column[None, :, :]
            place = block.to(tl.int64)[None, :] * pitch + row[:, None]
            gate = tl.load(h + at, mask=wide, other=0.0).to(tl.float32)
            up = tl.load(h + at + F, mask=wide, other=0.0).to(tl.float32)
            if KEPT:
                scale = tl.load(h_scales + place, mask=inside, other=0.0)
                gate *= tl.abs(gate) * scale[:, :, None]
                scale = tl.load(
                    h_scales + place + HALF * pitch.to(tl.int64), mask=inside, other=0.0
                )
                up *= tl.abs(up) * scale[:, :, None]
            out_at = wide_row * F + column[None, :, :]
            grad = tl.load(da + out_at, mask=wide, other=0.0).to(tl.float32)
            value, slope = value_and_slope(gate, 0)
            total += tl.sum(tl.sum(grad * value * up, 2), 1)
            if IN_FP8:
                cast, scale = cast_blocks(value * up * p, ROUND)
                tl.store(a_cast + out_at, cast, mask=wide)
                tl.store(a_scales + place, scale, mask=inside)
            else:
                tl.store(a + out_at, (value * up * p).to(a.dtype.element_ty), mask=wide)
            grad *= p
            d_gate = grad * up * slope
            if not IN_FP8:
                tl.store(dh + at, d_gate.to(dh.dtype.element_ty), mask=wide)
            cast, scale = cast_blocks(d_gate, ROUND)
            tl.store(dh_cast + at, cast, mask=wide)
            tl.store(dh_scales + place, scale, mask=inside)
            d_up = grad * value
            if not IN_FP8:
                tl.store(dh + at + F, d_up.to(dh.dtype.element_ty), mask=wide)
            cast, scale = cast_blocks(d_up, ROUND)
            tl.store(dh_cast + at + F, cast, mask=wide)
            tl.store(dh_scales + place + to_up, scale, mask=inside)
        tl.store(dprob + row, total, mask=row < n)
        first += tl.num_programs(0) * ROWS
