"""Tokens in fp8 as rows of bytes that a transport moves like any others: cast once, before they are
dispatched, they travel in half of bf16's bytes.

A packed row holds H e4m3 values, then their H / 128 fp32 scales, then zeros up to a multiple of 128
bytes. It is passed on as packed_width(H) numbers of bf16, which nothing computes with. The numbers
are those of kernels/fp8_casts: a row is cast on its own, so that casting and then copying it
gives the bits of copying and then casting it.

    H = 256:  256 bytes of values | 2 scales | 120 bytes of zeros     [T, 192] as bf16

Reference: pack_rows of tests/support/fp8_reference.py.

Shapes: T tokens, N expert rows, H a width that is a multiple of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launcher
from megatron_fluid.kernels.flags import INTERPRETED
from megatron_fluid.kernels.fp8_casts.quantize import cast_blocks
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.kernels.operands import refuse

__all__ = ["pack_rows", "packed_width", "unpack_rows"]

_ROWS, _BLOCKS = 8, 4  # of a program that casts, as in kernels/fp8_casts
_SCALE_ROWS, _SCALE_BLOCKS = 64, 16  # of one that turns scales


def packed_width(width: int) -> int:
    """Numbers of bf16 in a packed row of `width` values: a byte for
    each, and four for each 128 of them, up to a multiple of 128 bytes."""
    return -(-(width + width // 32) // 128) * 64


@triton.jit(do_not_specialize=["T"])
def pack_rows_kernel(
    x,  # [T, WIDTH]
    out,  # e4m3 [T, PITCH]
    scales,  # the same memory, fp32 [T, PITCH / 4]
    T,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / ROWS), ceil(WIDTH / 128 / BLOCKS))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < T)[:, None] & (block < WIDTH // 128)[None, :]
    line = row.to(tl.int64)
    at = line[:, None, None] * WIDTH + column[None, :, :]
    value = tl.load(x + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    cast, scale = cast_blocks(value, ROUND)
    at = line[:, None, None] * PITCH + column[None, :, :]
    tl.store(out + at, cast, mask=inside[:, :, None])
    first = line * (PITCH // 4) + WIDTH // 4
    tl.store(scales + first[:, None] + block[None, :], scale, mask=inside)
    if tl.program_id(1) == 0:
        spare = WIDTH // 128 + tl.arange(0, 32)
        behind = (row < T)[:, None] & (spare < (PITCH - WIDTH) // 4)[None, :]
        zeros = tl.zeros((ROWS, 32), tl.float32)
        tl.store(scales + first[:, None] + spare[None, :], zeros, mask=behind)


@triton.jit(do_not_specialize=["N"])
def unpack_scales_kernel(
    packed,  # fp32 [N, PITCH / 4]
    scales,  # fp32 [WIDTH / 128, N] out
    N,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / ROWS), ceil(WIDTH / 128 / BLOCKS))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (row < N)[:, None] & (block < WIDTH // 128)[None, :]
    first = row.to(tl.int64) * (PITCH // 4) + WIDTH // 4
    found = tl.load(packed + first[:, None] + block[None, :], mask=inside, other=0.0)
    tl.store(scales + block.to(tl.int64)[None, :] * N + row[:, None], found, mask=inside)


_pack = Launcher(pack_rows_kernel, 4)
_unpack_scales = Launcher(unpack_scales_kernel, 4)


def pack_rows(x: Tensor) -> Tensor:
    """x [T, H], cast with a scale for each 1 x 128: bf16 [T, packed_width(H)] that hold it.

    Raises:
        ConfigError: x is not dense, or its width no multiple of 128.
    """
    if x.dim() != 2 or x.shape[1] % 128 or not x.is_contiguous():
        refuse("pack_rows", "dense [T, a multiple of 128]", tokens=x)
    rows, width = x.shape
    out = x.new_empty((rows, packed_width(width)), dtype=torch.bfloat16)
    given = (x, out.view(torch.float8_e4m3fn), out.view(torch.float32), rows)
    constants = {"WIDTH": width, "PITCH": 2 * out.shape[1], "ROWS": _ROWS, "BLOCKS": _BLOCKS}
    columns = -(-width // (128 * _BLOCKS))
    _pack(-(-rows // _ROWS), given, columns, **constants, ROUND=INTERPRETED)
    return out


def unpack_rows(packed: Tensor, width: int) -> Fp8Rows:
    """The rows [N, width] that `packed` [N, packed_width(width)] holds, their values where they lie
    in it.

    Raises:
        ConfigError: `packed` is not dense, or not such rows.
    """
    rows, pitch = packed.shape[0], 2 * packed_width(width)
    fits = packed.dtype == torch.bfloat16 and packed.shape == (rows, pitch // 2)
    if not fits or not packed.is_contiguous():
        refuse("unpack_rows", f"dense torch.bfloat16 [N, {pitch // 2}]", packed=packed)
    scales = packed.new_empty((width // 128, rows), dtype=torch.float32)
    constants = {"WIDTH": width, "PITCH": pitch, "ROWS": _SCALE_ROWS, "BLOCKS": _SCALE_BLOCKS}
    columns = -(-width // (128 * _SCALE_BLOCKS))
    given = (packed.view(torch.float32), scales, rows)
    _unpack_scales(-(-rows // _SCALE_ROWS), given, columns, **constants)
    return Fp8Rows(packed.view(torch.float8_e4m3fn)[:, :width], scales)
