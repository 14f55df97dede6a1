"""The signal-wait GEMM: one GEMM over the row blocks of all ranks that waits for the flag of each
block it reads, or signals each block it has written.

C = A B with A in W blocks of m rows, block r from rank r, or C in W blocks of m rows, block r for
rank r. The kernel is persistent and takes tiles in order, block after block:

- gather: the own block first, read in place, then those of rank - 1, rank - 2 and so on, in the
  order in which ranks push to their neighbours. Before a tile of a block a program waits until the
  flag of its source has reached ``value`` (bounded, see `megatron_fluid.kernels.flags.wait`). If it
  does not, this tile and those after it become NaN.
- scatter: the block of rank + 1 first, the own block last, written in place. After each tile the
  counter of its block goes up by one with release at system scope: whoever sees the last count may
  copy the block.

Example, W = 2, m = 128, one tile a block, rank 0, gather: tile 0 multiplies the own rows; tile 1
waits for flags[1], multiplies rank 1's.

Reference: ``torch.cat(blocks).double() @ b.double()`` (tests/unit/tensor_parallel/test_forms.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.flags import INTERPRETED, wait

__all__ = ["flagged_gemm_kernel"]

# The interpreter multiplies the bits of bf16 as if they were integers.
_IN_FP32 = tl.constexpr(INTERPRETED)


@triton.jit(do_not_specialize=["value"])
def flagged_gemm_kernel(
    own, blocks, b, bias, c, c_own, flags, done, errors, abort, value, m, n, stride_bk, stride_bn,
    rank, operation, timeout_ns,
    W: tl.constexpr, GATHER: tl.constexpr, HAS_BIAS: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Any grid (P,). bf16 or fp16, products summed in fp32.

    gather: A block r at ``blocks`` [W, m, K], but the own at ``own`` [m, K]; C [W m, n] at ``c``.
    scatter: A [W m, K] at ``blocks``; C block r at ``c`` [W, m, n], but the own at ``c_own`` [m,
    n]. B is K x n by its strides; bias [n]. K is a constant: a model has few, and the loop over it
    is what the compiler pipelines. flags int32 [W] by source, done int32 [W] by block.
    """
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    per_block = tiles_m * tiles_n
    tile = tl.program_id(0)
    sound = tl.load(abort) == 0
    while tile < W * per_block:
        step = tile // per_block
        # Which block, and (gather) wait for its rows: the copy engines of the peers write them and
        # then raise the flag.
        if GATHER:
            block = (rank + W - step) % W
            if step > 0:
                sound = sound & wait(
                    flags + block, value, errors, abort, operation, block, step, timeout_ns
                )
        else:
            block = (rank + 1 + step) % W
        # Neighbouring programs share rows of A and columns of B: GROUP row tiles at a time, column
        # by column.
        within = tile % per_block
        group = within // (GROUP * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP, GROUP)
        row = (group * GROUP + (within % (GROUP * tiles_n)) % height) * BM + tl.arange(0, BM)
        column = ((within % (GROUP * tiles_n)) // height) * BN + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        first = tl.multiple_of(block.to(tl.int64) * m * K, 16 if K % 16 == 0 else 1)
        a_block = blocks + first
        if GATHER:
            a_block = tl.where(block == rank, own, a_block)
        # Rows and columns past the edge read the last one; what comes of them is not stored.
        a_rows = tl.minimum(row, m - 1)
        a = a_block + a_rows[:, None].to(tl.int64) * K + depth[None, :]
        b_columns = column % n
        b_tile = (
            b
            + depth[:, None].to(tl.int64) * stride_bk
            + b_columns[None, :].to(tl.int64) * stride_bn
        )
        # What has not arrived is not multiplied in silence: a sum that begins with NaN stays NaN.
        total = tl.zeros((BM, BN), dtype=tl.float32)
        if GATHER:
            total += tl.where(sound, 0.0, float("nan"))
        for start in tl.range(0, K, BK, num_stages=STAGES):
            if K % BK == 0:
                left = tl.load(a)
                right = tl.load(b_tile)
            else:
                left = tl.load(a, mask=depth[None, :] < K - start, other=0.0)
                right = tl.load(b_tile, mask=depth[:, None] < K - start, other=0.0)
            if _IN_FP32:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total)
            a += BK
            b_tile += BK * stride_bk
        inside = (row[:, None] < m) & (column[None, :] < n)
        if HAS_BIAS:
            total += tl.load(bias + b_columns)[None, :].to(tl.float32)
        c_block = c + block.to(tl.int64) * m * n
        if not GATHER:
            c_block = tl.where(block == rank, c_own, c_block)
        where = c_block + row[:, None].to(tl.int64) * n + column[None, :]
        tl.store(where, total.to(c.dtype.element_ty), mask=inside)
        if not GATHER:
            # All threads' parts of the tile precede the one thread's release.
            tl.debug_barrier()
            tl.atomic_add(done + block, 1, sem="release", scope="sys")
        tile += tl.num_programs(0)
