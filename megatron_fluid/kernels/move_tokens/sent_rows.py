"""Kernels around the fused GEMM-combine epilogue, in which the experts' GEMM stores its rows at
their tokens' ranks.

The epilogue writes expert row n into row t * K + k of the combine buffer of token t's rank
(kernels/grouped_gemm: sent_matmul), so that rows travel while other tiles are multiplied. More
rows cross the wire than sums would, but nothing waits for them, and no kernel reads them again on
the sending rank; `reduce_kernel` (kernel.py) adds them up. `begin_combine_kernel` runs before
the GEMM and sends the rest of a combine. `send_rows_kernel` sends the rows of any other GEMM.

Reference: reduce_reference of tests/support/kernel_references.py, of all ranks.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, H hidden, N expert rows
of this rank. Rows are of any float type; addresses are int64 [W]. A combine buffer is [C, K, H].
"""

# mypy: disable-error-code="assignment, attr-defined, var-annotated"
# Triton's tuples grow in loops that are unrolled, which Python's types cannot express.

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.flags import advance
from megatron_fluid.kernels.move_tokens.kernel import inside

__all__ = ["begin_combine_kernel", "send_rows_kernel"]


@triton.jit
def begin_combine_kernel(
    inverse,  # int32 [W * C, K]: row, -1 not here, -2 over capacity
    row_grad,  # fp32 [N]: gradient of the probability of each expert row (HAS_GRAD)
    origins,  # int32 [N]: owner << SHIFT | t * K + k
    count,  # int32 [1]: N
    combine_buffer,  # of this rank, for its type
    combine_addresses,
    grad_addresses,  # fp32 [C, K] of every rank
    counter,  # of the region on which reduce_kernel waits
    abort, rank, C,
    HAS_GRAD: tl.constexpr, BOUNDED: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advance the combine's generation, send the gradients of probabilities (HAS_GRAD), and zeros
    for rows over capacity (BOUNDED), whose owners would otherwise add what an earlier combine left.

    Any grid; without those two, one program is enough. KP: K rounded up to a power of two.

    Once a wait of this rank has failed nothing is sent, and since the tables may be those of a plan
    that failed, all rows of the GEMM that follows are turned to slot 0 of this rank's own combine
    buffer.
    """
    pid = tl.program_id(0)
    sound = tl.load(abort) == 0
    if not sound:
        first, rows = pid * 256, tl.load(count)
        while first < rows:
            n = first + tl.arange(0, 256)
            own = tl.zeros((256,), tl.int32) + (rank << SHIFT)
            tl.store(origins + n, own, mask=n < rows)
            first += tl.num_programs(0) * 256
    if pid == 0:
        advance(counter)  # the generation that reduce_kernel's barrier waits for
    if HAS_GRAD or BOUNDED:
        start = pid * ROWS
        limit = tl.where(sound, W * C, 0)
        while start < limit:
            received = start + tl.arange(0, ROWS)
            real = received < W * C
            owner = tl.where(real, received // C, 0)
            slot = (received % C)[:, None] * K + tl.arange(0, KP)[None, :]
            known = real[:, None] & (tl.arange(0, KP) < K)[None, :]
            found = tl.load(
                inverse + received[:, None] * K + tl.arange(0, KP)[None, :], mask=known, other=-1
            )
            # Entry (token, k) of the owner's buffers belongs to the rank of that expert alone.
            if HAS_GRAD:
                owed = tl.load(row_grad + found, mask=found >= 0, other=0.0)
                grads = tl.load(grad_addresses + owner).to(row_grad.dtype)
                tl.store(grads[:, None] + slot, owed, mask=found != -1)
            if BOUNDED:  # noqa: SIM102  (decided at compile time)
                if tl.min(found) == -2:
                    rows = tl.load(combine_addresses + owner).to(combine_buffer.dtype)
                    target = rows[:, None] + slot.to(tl.int64) * H
                    for h in range(0, H, BLOCK):
                        column = h + tl.arange(0, BLOCK)
                        lost = (found == -2)[:, :, None] & (column < H)[None, None, :]
                        zeros = tl.zeros((ROWS, KP, BLOCK), combine_buffer.dtype.element_ty)
                        tl.store(target[:, :, None] + column[None, None, :], zeros, mask=lost)
            start += tl.num_programs(0) * ROWS


@triton.jit
def send_rows_kernel(
    y,  # [N, H]
    origins,  # int32 [N], read as unsigned: owner << SHIFT | t * K + k
    count,  # int32 [1]: N
    combine_addresses, rank,
    SHIFT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Write expert rows into the combine buffers of their tokens' ranks. Any grid; one warp a row,
    UNROLL pieces of BLOCK columns at a time."""
    unit = y.dtype.element_ty.primitive_bitwidth // 8
    own = tl.load(combine_addresses + rank)
    mine = tl.multiple_of(own.to(y.dtype), 16)
    limit = tl.load(count)
    start = tl.program_id(0) * ROWS
    while start < limit:
        n = start + tl.arange(0, ROWS)
        real = n < limit
        # Decode the row's address at its token's rank, relative to this rank's own buffer.
        origin = tl.load(origins + n, mask=real, other=0).to(tl.uint32, bitcast=True)
        combine_buffer = tl.load(
            combine_addresses + (origin >> SHIFT).to(tl.int32), mask=real, other=0
        )
        apart = (combine_buffer - own) // unit + (origin & ((1 << SHIFT) - 1)).to(tl.int64) * H
        # Buffers begin on 16-byte boundaries, and so do rows that are as long.
        target = mine + (tl.multiple_of(apart, 8) if H % 8 == 0 else apart)
        source = y + n.to(tl.int64) * H
        # All loads of a step, then its stores; reduce_kernel's barrier publishes them.
        for h in range(0, H, BLOCK * UNROLL):
            values = ()
            for u in tl.static_range(UNROLL):
                column = h + u * BLOCK + tl.arange(0, BLOCK)
                mask = real[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                values = values + (tl.load(source[:, None] + column[None, :], mask=mask),)
            for u in tl.static_range(UNROLL):
                column = h + u * BLOCK + tl.arange(0, BLOCK)
                mask = real[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                tl.store(target[:, None] + column[None, :], values[u], mask=mask)
        start += tl.num_programs(0) * ROWS
