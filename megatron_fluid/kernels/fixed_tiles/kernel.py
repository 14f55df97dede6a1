"""Products of expert rows with their experts' matrices in tiles of one size: a Triton kernel for
the GPUs, dtypes and layouts that kernels/grouped_gemm does not take.

Every element is a sum over the depth in steps of BK, in fp32 and in one order, whatever the tile
and the rows beside it. So a row has the same bits in any batch.

Reference: fixed_tile_matmul on a CPU (launch.py).

Shapes: N expert rows, El local experts, widths in, out.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fixed_tile_kernel"]


@triton.jit(do_not_specialize=["N"])
def fixed_tile_kernel(
    x,  # [N, IN]
    first,  # the matrix [in, out] of expert 0
    apart,  # int64 [El]: elements from `first` to each expert's matrix
    offsets,  # int32 [El]: end of each expert's rows
    out,  # [N, OUT] out
    N,
    IN: tl.constexpr, OUT: tl.constexpr, STEP_IN: tl.constexpr, STEP_OUT: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[n] = x[n] @ the matrix of n's expert; rows from offsets[-1] on are not written. Grid
    (ceil(N / BM), ceil(OUT / BN)). STEP_IN, STEP_OUT: strides of a matrix. EP: E rounded up to a
    power of two.

    A tile may hold rows of several experts: it is computed once for each, and of each only that
    expert's rows are stored.
    """
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    expert = tl.arange(0, EP)
    ends = tl.load(offsets + expert, mask=expert < E, other=2147483647)
    last_row = tl.minimum(tl.program_id(0) * BM + BM, N) - 1
    e = tl.sum((ends <= tl.program_id(0) * BM).to(tl.int32), 0)
    last = tl.minimum(tl.sum((ends <= last_row).to(tl.int32), 0), E - 1)
    while e <= last:
        start = tl.load(offsets + e - 1, mask=e > 0, other=0)
        mine = (n >= start) & (n < tl.minimum(tl.load(offsets + e), N))
        matrix = first + tl.load(apart + e)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, IN, BK):
            depth = k + tl.arange(0, BK)
            rows = tl.load(
                x + n.to(tl.int64)[:, None] * IN + depth[None, :],
                mask=mine[:, None] & (depth < IN)[None, :],
                other=0.0,
            )
            weights = tl.load(
                matrix + depth.to(tl.int64)[:, None] * STEP_IN + column[None, :] * STEP_OUT,
                mask=(depth < IN)[:, None] & (column < OUT)[None, :],
                other=0.0,
            )
            total = tl.dot(rows, weights, total, input_precision="ieee")
        tl.store(
            out + n.to(tl.int64)[:, None] * OUT + column[None, :],
            total.to(out.dtype.element_ty),
            mask=mine[:, None] & (column < OUT)[None, :],
        )
        e += 1
