"""Grouped GEMMs over expert rows, persistent, with TMA loads: for activations and their gradients, for weight gradients,
and for a gated fc1 with its activation.

`grouped_matmul_kernel` is for what torch._grouped_mm wastes: that one works in pairs of 128-row tiles, so an expert with
513 rows costs as much as one with 768. Here the last tile of an expert has 64 rows where they suffice.
`grouped_gated_kernel` computes gate and up side by side and the activation on the way out, which spares a pass over memory.
`grouped_weight_grad_kernel` adds products straight to fp32 gradients (Megatron's main_grad), all experts in one launch.

Oracles: tests/unit/test_grouped_gemm.py, an expert at a time by torch.

Shapes: N expert rows in all, El local experts, M rows of an expert, A, B, K, J widths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.activation import value_and_slope
from megatron_fluid.kernels.flags import INTERPRETED

__all__ = ["grouped_gated_kernel", "grouped_matmul_kernel", "grouped_weight_grad_kernel"]


if INTERPRETED:

    def _bound(value):
        # The interpreter's scalars are arrays of one element, of which NumPy makes no index.
        return int(value.handle.data.item())
else:

    @triton.jit
    def _bound(value):
        return value


@triton.jit
def _product(x, w, expert, row, column, K: tl.constexpr, M, BJ: tl.constexpr, BK: tl.constexpr, OUT_IN: tl.constexpr):
    """x[row : row + M] @ the matrix of `expert`, columns [column, column + BJ): fp32 [M, BJ]."""
    total = tl.zeros((M, BJ), tl.float32)
    for k in range(0, K, BK):
        left = x.load([row, k])
        if OUT_IN:
            right = w.load([expert, column, k]).reshape(BJ, BK).T
        else:
            right = w.load([expert, k, column]).reshape(BK, BJ)
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _store_rows(out, total, row, end, column, J: tl.constexpr, M: tl.constexpr, BJ: tl.constexpr):
    r = row + tl.arange(0, M)
    c = column + tl.arange(0, BJ)
    if J % BJ == 0:
        mask = (r < end)[:, None]
    else:
        mask = (r < end)[:, None] & (c < J)[None, :]
    tl.store(out + r.to(tl.int64)[:, None] * J + c[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _place(local, start, down, across: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, GROUP: tl.constexpr):
    """(row, column) of tile `local` of an expert with down * across tiles.

    GROUP tiles of rows take turns along one strip of weights, so that both stay in the L2 cache.
    """
    strip = local // (GROUP * across)
    height = tl.minimum(down - strip * GROUP, GROUP)
    inside = local - strip * GROUP * across
    return start + (strip * GROUP + inside % height) * BM, (inside // height) * BJ


@triton.jit
def grouped_matmul_kernel(
    x,  # descriptor of [N, K], block [BM, BK]
    x_half,  # the same, block [BM // 2, BK]
    w,  # descriptor of [El, J, K] (OUT_IN), block [1, BJ, BK]; or of [El, K, J], block [1, BK, BJ]
    out,  # [N, J]
    offsets,  # int32 [El]
    K: tl.constexpr,
    J: tl.constexpr,
    EL: tl.constexpr,
    OUT_IN: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[rows of e] = x[rows of e] @ w[e].T (OUT_IN) or @ w[e]. Any grid: programs stride over tiles."""
    across: tl.constexpr = (J + BJ - 1) // BJ
    tile = tl.program_id(0)
    first = 0
    start = 0
    for expert in range(EL):
        end = tl.load(offsets + expert)
        down = tl.cdiv(end - start, BM)
        while tile < first + down * across:
            row, column = _place(tile - first, start, down, across, BM, BJ, GROUP)
            if end - row <= BM // 2:
                _store_rows(
                    out, _product(x_half, w, expert, row, column, K, BM // 2, BJ, BK, OUT_IN),
                    row, end, column, J, BM // 2, BJ,
                )  # fmt: skip
            else:
                _store_rows(
                    out, _product(x, w, expert, row, column, K, BM, BJ, BK, OUT_IN), row, end, column, J, BM, BJ
                )
            tile += tl.num_programs(0)
        first += down * across
        start = end


@triton.jit
def _gated_tile(
    x, w, h, prob, out, expert, row, end, column,
    K: tl.constexpr, F: tl.constexpr, M: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr,
    CODE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    gate = tl.zeros((M, BF), tl.float32)
    up = tl.zeros((M, BF), tl.float32)
    for k in range(0, K, BK):
        left = x.load([row, k])
        gate = tl.dot(left, w.load([expert, column, k]).reshape(BF, BK).T, gate)
        up = tl.dot(left, w.load([expert, F + column, k]).reshape(BF, BK).T, up)
    # Rounded as a separate fc1 would have left them, so that both ways agree.
    gate = gate.to(out.dtype.element_ty)
    up = up.to(out.dtype.element_ty)
    r = row + tl.arange(0, M)
    c = column + tl.arange(0, BF)
    if F % BF == 0:
        mask = (r < end)[:, None]
    else:
        mask = (r < end)[:, None] & (c < F)[None, :]
    line = r.to(tl.int64)[:, None]
    if KEEP:
        place = h + line * (2 * F) + c[None, :]
        tl.store(place, gate, mask=mask)
        tl.store(place + F, up, mask=mask)
    value, _ = value_and_slope(gate.to(tl.float32), CODE)
    value *= up.to(tl.float32)
    value *= tl.load(prob + r, mask=r < end, other=0.0)[:, None]
    tl.store(out + line * F + c[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped_gated_kernel(
    x,  # descriptor of [N, K], block [BM, BK]
    x_half,  # the same, block [BM // 2, BK]
    w,  # descriptor of [El, 2F, K], gate first, block [1, BF, BK]
    h,  # [N, 2F] out: x @ w.T (KEEP)
    prob,  # fp32 [N]
    out,  # [N, F]: act(gate) * up * prob
    offsets,  # int32 [El]
    K: tl.constexpr,
    F: tl.constexpr,
    EL: tl.constexpr,
    CODE: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """fc1 of a gated expert and its activation (megatron_fluid.kernels.activation) times the probability. Any grid."""
    across: tl.constexpr = (F + BF - 1) // BF
    tile = tl.program_id(0)
    first = 0
    start = 0
    for expert in range(EL):
        end = tl.load(offsets + expert)
        down = tl.cdiv(end - start, BM)
        while tile < first + down * across:
            row, column = _place(tile - first, start, down, across, BM, BF, GROUP)
            if end - row <= BM // 2:
                _gated_tile(
                    x_half, w, h, prob, out, expert, row, end, column, K, F, BM // 2, BF, BK, CODE, KEEP
                )  # fmt: skip
            else:
                _gated_tile(x, w, h, prob, out, expert, row, end, column, K, F, BM, BF, BK, CODE, KEEP)
            tile += tl.num_programs(0)
        first += down * across
        start = end


@triton.jit
def grouped_weight_grad_kernel(
    left,  # descriptor of [N, A], block [BN, BA]
    right,  # descriptor of [N, B], block [BN, BB]
    outputs,  # int64 [El]: where the matrix [A, B] of each expert begins, on a 16-byte boundary
    like,  # any tensor of the outputs' dtype
    offsets,  # int32 [El]
    A: tl.constexpr,
    B: tl.constexpr,
    EL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BA: tl.constexpr,
    BB: tl.constexpr,
    BN: tl.constexpr,
):
    """outputs[e] (+)= left[rows of e].T @ right[rows of e], summed in fp32. Any grid. An expert without rows is left as
    it is (ACCUMULATE), or zeroed."""
    down: tl.constexpr = (A + BA - 1) // BA
    across: tl.constexpr = (B + BB - 1) // BB
    tile = tl.program_id(0)
    while tile < EL * down * across:
        expert = tile // (down * across)
        inside = tile % (down * across)
        a, b = (inside % down) * BA, (inside // down) * BB
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        total = tl.zeros((BA, BB), tl.float32)
        whole = start + (end - start) // BN * BN
        for row in range(_bound(start), _bound(whole), BN):
            total = tl.dot(left.load([row, a]).T, right.load([row, b]), total)
        if whole < end:  # rows after the last belong to the next expert
            real = (whole + tl.arange(0, BN) < end)[:, None]
            l_rest = tl.where(real, left.load([whole, a]), 0.0).to(left.dtype)
            r_rest = tl.where(real, right.load([whole, b]), 0.0).to(right.dtype)
            total = tl.dot(l_rest.T, r_rest, total)
        if (end > start) | (not ACCUMULATE):
            base = tl.multiple_of(tl.load(outputs + expert).to(like.dtype), 16)
            # In two halves: both the sum and what it is added to would not fit into registers.
            halves = tl.split(tl.permute(tl.reshape(total, (BA, 2, BB // 2)), (0, 2, 1)))
            for half in tl.static_range(2):
                i = a + tl.arange(0, BA)
                j = b + half * (BB // 2) + tl.arange(0, BB // 2)
                place = base + i.to(tl.int64)[:, None] * B + j[None, :]
                mask = (i < A)[:, None] & (j < B)[None, :]
                value = halves[half]
                if ACCUMULATE:
                    value += tl.load(place, mask=mask, other=0.0).to(tl.float32)
                tl.store(place, value.to(like.dtype.element_ty), mask=mask)
        tile += tl.num_programs(0)
