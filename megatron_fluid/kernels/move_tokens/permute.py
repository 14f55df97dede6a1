"""Tokens into expert order and back, on one rank, planned on the device without a host read.

`count_choices_kernel` and `sort_choices_kernel` sort the choices (t, k) stably by expert with
prefix sums, so that the order of rows is fixed and no atomic decides it. `permute_kernel` copies
each token to its experts' rows; `unpermute_kernel` sums a token's rows in fp32, by k. The backward
runs the last two the other way round with the same plan.

    top-2 of 3 tokens, 4 experts       rows (token):  1 | 0 2 | 0 1 | 2
    ids = [[1, 2], [2, 0], [1, 3]]     offsets:       1   3     5     6
                                       inverse:       [[1, 3], [4, 0], [2, 5]]

Reference: plan_reference of tests/support/kernel_references.py, of one rank.

Shapes: T tokens, K top-k, E experts, H hidden, N rows, NB = ceil(T / BT) blocks of tokens. ids are
-1 where dropped.
"""

# mypy: disable-error-code="assignment, attr-defined, var-annotated"
# Triton's tuples grow in loops that are unrolled, which Python's types do not tell.

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.move_tokens.kernel import inside, sum_pieces
from megatron_fluid.kernels.routing_plan.kernel import count_blocks, count_choices, rows_of_choices

__all__ = ["count_choices_kernel", "permute_kernel", "sort_choices_kernel", "unpermute_kernel"]


@triton.jit(do_not_specialize=["T"])
def count_choices_kernel(
    ids,  # [T, K] any integer
    counts,  # int32 [NB, E] out
    T,
    K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Choices of each expert in each block of BT tokens. Grid (NB,). EP: E rounded up to a power of
    two."""
    block = tl.program_id(0)
    t = block * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    hits = count_choices(ids, t, t < T, 0, K, EP)
    tl.store(counts + block * E + expert, tl.sum(hits, 0), mask=expert < E)


@triton.jit(do_not_specialize=["T", "NB"])
def sort_choices_kernel(
    ids,  # [T, K] any integer
    probs,  # [T, K], any float type
    counts,  # int32 [NB, E], of count_choices_kernel
    offsets,  # int32 [E] out: rows up to and including each expert
    inverse,  # int32 [T, K] out: row of each choice, -1 where dropped
    row_prob,  # fp32 [T * K], N of them out
    T, NB,
    K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr,
    RB: tl.constexpr,
):  # fmt: skip
    """Grid (NB,). KP: K rounded up to a power of two; RB: blocks whose counts are read at a
    time."""
    pid = tl.program_id(0)
    expert = tl.arange(0, EP)
    everything, before = count_blocks(counts, pid, NB, True, E, EP, RB)
    ends = tl.cumsum(everything, 0)
    if pid == 0:
        tl.store(offsets + expert, ends, mask=expert < E)

    # The row of each choice: behind the experts, blocks and tokens before.
    t = pid * BT + tl.arange(0, BT)
    hits = count_choices(ids, t, t < T, 0, K, EP)
    k = tl.arange(0, KP)
    room = (t < T)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    chosen = tl.load(ids + at, mask=room, other=-1).to(tl.int32)
    kept = (chosen >= 0) & (chosen < E)
    row = rows_of_choices(hits, ends - everything + before, chosen, kept, KP)
    tl.store(inverse + at, tl.where(kept, row, -1), mask=room)
    prob = tl.load(probs + at, mask=room, other=0.0).to(tl.float32)
    tl.store(row_prob + row, prob, mask=kept)


@triton.jit(do_not_specialize=["T"])
def permute_kernel(
    x,  # [T, H]
    inverse,  # int32 [T, K]
    out,  # [N, H] out
    T,
    H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Copy each token to the rows of its experts: read once, written K times. Grid (ceil(T /
    ROWS),); one warp a token, UNROLL pieces of BLOCK columns in flight."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = ()
    for k in tl.static_range(K):
        rows = rows + (tl.load(inverse + t * K + k, mask=t < T, other=-1),)
    line = x + t.to(tl.int64)[:, None] * H
    for h in range(0, H, BLOCK * UNROLL):
        values = ()
        for u in tl.static_range(UNROLL):
            column = h + u * BLOCK + tl.arange(0, BLOCK)
            mask = (t < T)[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
            values = values + (tl.load(line + column[None, :], mask=mask),)
        for k in tl.static_range(K):
            target = out + rows[k].to(tl.int64)[:, None] * H
            for u in tl.static_range(UNROLL):
                column = h + u * BLOCK + tl.arange(0, BLOCK)
                mask = (rows[k] >= 0)[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                tl.store(target + column[None, :], values[u], mask=mask)


@triton.jit(do_not_specialize=["T"])
def unpermute_kernel(
    y,  # [N, H]
    inverse,  # int32 [T, K]
    out,  # [T, H] out
    row_grad,  # fp32 [N]: gradient of the probability of each row (HAS_GRAD)
    grads,  # [T, K] out, any float type: the same by choice, 0 where dropped (HAS_GRAD)
    T,
    HAS_GRAD: tl.constexpr, H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum each token's rows. Grid (ceil(T / ROWS),); one warp a token, four of its rows in UNROLL
    pieces of BLOCK columns in flight before they are added."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = t < T
    rows = ()
    for k in tl.static_range(K):
        rows = rows + (tl.load(inverse + t * K + k, mask=real, other=-1),)
    if HAS_GRAD:
        for k in tl.static_range(K):
            owed = tl.load(row_grad + rows[k], mask=rows[k] >= 0, other=0.0)
            tl.store(grads + t * K + k, owed.to(grads.dtype.element_ty), mask=real)
    line = out + t.to(tl.int64)[:, None] * H
    for h in range(0, H, BLOCK * UNROLL):
        totals = sum_pieces(y, rows, h, K, H, ROWS, BLOCK, UNROLL)
        for u in tl.static_range(UNROLL):
            column = h + u * BLOCK + tl.arange(0, BLOCK)
            mask = real[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
            tl.store(line + column[None, :], totals[u].to(out.dtype.element_ty), mask=mask)
