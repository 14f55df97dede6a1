"""Biases of experts over rows that are sorted by expert: added to rows, multiplied with rows, and
their gradients, which are sums of rows. The row count stays on the device.

Sums have a fixed order, which depends on an expert's own rows alone: sum_chunks_kernel adds up
chunks of CHUNK rows, and sum_partials_kernel an expert's chunks one after the other. What a chunk
is, the program finds from the offsets, and so the grid follows from the tensors' sizes:

    CHUNK = 4, offsets 5, 5, 14        slot:     0    1    2     3    4     5
    begin // CHUNK + e: 0, 2, 3        rows of:  0..3 4    none  5..8 9..12 13

Expert e's first slot is begin // CHUNK + e: behind the slots of those before it, and none is taken
twice, since n rows from `begin` on have at most (begin + n) // CHUNK - begin // CHUNK + 1 chunks.

Reference: a loop over experts (tests/unit/kernels/test_expert_biases.py).

Shapes: N expert rows, El experts, D width of the rows. Rows and biases in bf16, fp16 or fp32, scale
and products in fp32; arithmetic in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launcher, power_of_two

__all__ = [
    "add_biases",
    "add_biases_kernel",
    "add_products",
    "add_products_kernel",
    "sum_by_expert",
    "sum_chunks_kernel",
    "sum_partials_kernel",
]

# Rows of a chunk: its partial sums are 1/128 of the bytes of bf16 rows, and an expert that has most
# of the rows is still many programs.
_CHUNK = 256


@triton.jit
def add_biases_kernel(
    y,  # [>= N, D], changed in place
    bias,  # [El, D]
    experts,  # int32 [>= N]: whose rows they are
    rows,  # int32 scalar: N
    scale,  # fp32 [>= N]; None for ones
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y += bias[expert] * scale, rounded once. Grid (N or more,)."""
    i = tl.program_id(0)
    if i < tl.load(rows):
        line = y + i.to(tl.int64) * D
        own = bias + tl.load(experts + i).to(tl.int64) * D
        for first in range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(own + column, mask=column < D, other=0.0).to(tl.float32)
            if scale is not None:
                value *= tl.load(scale + i)
            value += tl.load(line + column, mask=column < D, other=0.0).to(tl.float32)
            tl.store(line + column, value.to(y.dtype.element_ty), mask=column < D)


@triton.jit
def add_products_kernel(
    x,  # [>= N, D]
    bias,  # [El, D]
    experts,  # int32 [>= N]: whose rows they are
    products,  # fp32 [>= N], changed in place
    rows,  # int32 scalar: N
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """products += sum over D of x * bias[expert]. Grid (N or more,): one program owns a row, so
    that it is summed in a fixed order."""
    i = tl.program_id(0)
    if i < tl.load(rows):
        line = x + i.to(tl.int64) * D
        own = bias + tl.load(experts + i).to(tl.int64) * D
        partial = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(line + column, mask=column < D, other=0.0).to(tl.float32)
            partial += value * tl.load(own + column, mask=column < D, other=0.0).to(tl.float32)
        tl.store(products + i, tl.load(products + i) + tl.sum(partial, 0))


@triton.jit
def sum_chunks_kernel(
    x,  # [>= N, D]
    offsets,  # int32 [El]: end of each expert's rows
    partials,  # fp32 [slots, D] out; slots without rows stay as they are
    scale,  # fp32 [>= N]; None for ones
    D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (slots, ceil(D / BLOCK)), slots as sum_by_expert has them. EP: El rounded up to a power
    of two; ROWS: how many a program reads at a time."""
    slot = tl.program_id(0)
    expert = tl.arange(0, EP)
    begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    e = tl.sum(((begins // CHUNK + expert <= slot) & (expert < E)).to(tl.int32), 0) - 1
    begin = tl.load(offsets + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets + e)
    first = begin + (slot - begin // CHUNK - e) * CHUNK
    last = tl.minimum(first + CHUNK, end)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if first < last:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        i = first
        while i < last:
            row = i + tl.arange(0, ROWS)
            inside = (row < last)[:, None] & (column < D)[None, :]
            at = row.to(tl.int64)[:, None] * D + column[None, :]
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            if scale is not None:
                value *= tl.load(scale + row, mask=row < last, other=0.0)[:, None]
            total += value
            i += ROWS
        line = partials + slot.to(tl.int64) * D + column
        tl.store(line, tl.sum(total, 0), mask=column < D)


@triton.jit
def sum_partials_kernel(
    partials,  # fp32 [slots, D], of sum_chunks_kernel
    offsets,  # int32 [El]
    sums,  # fp32 [El, D] out; 0 for an expert without rows
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (El, ceil(D / BLOCK)). ROWS: how many a program reads at a time."""
    e = tl.program_id(0)
    begin = tl.load(offsets + e - 1, mask=e > 0, other=0)
    chunks = (tl.load(offsets + e) - begin + CHUNK - 1) // CHUNK
    first = begin // CHUNK + e
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    i = 0
    while i < chunks:
        chunk = i + tl.arange(0, ROWS)
        inside = (chunk < chunks)[:, None] & (column < D)[None, :]
        at = (first + chunk).to(tl.int64)[:, None] * D + column[None, :]
        total += tl.load(partials + at, mask=inside, other=0.0)
        i += ROWS
    tl.store(sums + e.to(tl.int64) * D + column, tl.sum(total, 0), mask=column < D)


_add, _multiply = Launcher(add_biases_kernel, 4), Launcher(add_products_kernel, 4)
_chunks, _partials = Launcher(sum_chunks_kernel, 4), Launcher(sum_partials_kernel, 4)
_ONES = {"scale": None}


def add_biases(
    y: Tensor, bias: Tensor, experts: Tensor, count: Tensor, scale: Tensor | None = None
) -> None:
    """Add bias[expert] * scale to each row of y, in place, rounded once.

    Args:
        y: bf16, fp16 or fp32, contiguous. [N, D]
        bias: one of these dtypes, contiguous. [El, D]
        experts: of each row. int32, [N] or longer
        count: rows that are used, on the device. int32 [1]
        scale: fp32, [N] or longer; None for ones.
    """
    rows, width = y.shape
    constants = {"D": width, "BLOCK": min(1024, power_of_two(width))}
    if scale is None:
        _add(rows, (y, bias, experts, count), **_ONES, **constants)
    else:
        _add(rows, (y, bias, experts, count, scale), **constants)


def add_products(products: Tensor, x: Tensor, bias: Tensor, experts: Tensor, count: Tensor) -> None:
    """Add the product of each row of x with bias[expert] to products fp32 [N], in place.

    Args:
        x: bf16, fp16 or fp32, contiguous. [N, D]
        bias, experts, count: as for add_biases.
    """
    rows, width = x.shape
    constants = {"D": width, "BLOCK": min(1024, power_of_two(width))}
    _multiply(rows, (x, bias, experts, products, count), **constants)


def sum_by_expert(x: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """The sum of each expert's rows, times scale: fp32 [El, D], bitwise repeatable.

    Args:
        x: bf16, fp16 or fp32, contiguous; rows after the last expert's are not read. [N, D]
        offsets: end of each expert's rows. int32 [El]
        scale: fp32, [N] or longer; None for ones.
    """
    (rows, width), experts = x.shape, offsets.shape[0]
    slots = rows // _CHUNK + experts
    partials = torch.empty(slots, width, dtype=torch.float32, device=x.device)
    block = min(256, power_of_two(width))
    shape = {"D": width, "E": experts, "EP": power_of_two(experts), "CHUNK": _CHUNK}
    constants = shape | {"ROWS": 16, "BLOCK": block}
    columns = triton.cdiv(width, block)
    if scale is None:
        _chunks(slots, (x, offsets, partials), columns, **_ONES, **constants)
    else:
        _chunks(slots, (x, offsets, partials, scale), columns, **constants)
    sums = torch.empty(experts, width, dtype=torch.float32, device=x.device)
    block = min(128, power_of_two(width))
    constants = {"D": width, "CHUNK": _CHUNK, "ROWS": 16, "BLOCK": block}
    _partials(experts, (partials, offsets, sums), triton.cdiv(width, block), **constants)
    return sums
