"""Combine of the decode-time MoE all-to-all over peer pointers: a send half and a receive half.

See low_latency/dispatch.py for the protocol, the generations and the shapes.

Reference: megatron_fluid.low_latency.reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.flags import INTERPRETED
from megatron_fluid.kernels.low_latency.signals import (
    every_thread,
    fence,
    peer_address,
    peer_addresses,
    publish,
    signal_all,
    wait_all,
)

__all__ = ["combine_kernel"]

if INTERPRETED:

    @triton.jit
    def _rounded_product(a, b):
        return a * b

else:

    @triton.jit
    def _rounded_product(a, b):
        """a * b rounded by itself: one fma with the sum behind it would have other bits than the
        collectives' sums."""
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


_INTEGERS = [
    *("m", "rank", "timeout_ns", "operation", "weights_operation", "out_stride"),
    *("y_expert_stride", "y_row_stride"),
]


@triton.jit(do_not_specialize=_INTEGERS)
def combine_kernel(
    out,  # [m, H], rows `out_stride` units of 16 bytes apart
    indices,  # [m, K]
    weights,  # fp32 [m, K] (EXCHANGE)
    expert_y,  # [L, R, H], strides in units of 8 elements
    bound_m,
    entry_row,  # int32 [D * C * K], left by dispatch_kernel
    dispatched,  # this rank's dispatch region, int32 words: token counts, weights
    sums,  # this rank's combine region
    sum_addresses,  # int64 [W]
    received_weights,  # fp32 [2, W, C, K] (EXCHANGE)
    weight_addresses,  # int64 [W] (EXCHANGE)
    received_rows,  # [2, SMALL, K, H] (EXCHANGE)
    row_addresses,  # int64 [W] (EXCHANGE)
    flags, flag_addresses, weight_flags, weight_flag_addresses, counters, errors, abort, m, rank,
    timeout_ns, operation, weights_operation, out_stride, y_expert_stride, y_row_stride,
    C: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    CK: tl.constexpr, L: tl.constexpr, R: tl.constexpr, H: tl.constexpr, PITCH: tl.constexpr,
    PARITY_WORDS: tl.constexpr, F: tl.constexpr, WORDS: tl.constexpr, FLAG_STRIDE: tl.constexpr,
    WEIGHT_WORDS: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, EXCHANGE: tl.constexpr,
    HAS_BOUND: tl.constexpr, ACCUMULATE: tl.constexpr, SEND: tl.constexpr,
):  # fmt: skip
    """Return every token's expert rows to its owner, weighted and summed.

    F programs send: pieces (block of H, token, source) in turn. m * ceil(H / BLOCK) programs
    receive: a token's block of H each. Without EXCHANGE the weights came with the dispatch. With it
    they are sent to the expert ranks first, except for sources of at most SMALL tokens: their
    expert rows are sent unweighted, one by one, which takes less time than an exchange.
    """
    W: tl.constexpr = D * P
    IDS_AT: tl.constexpr = D * C * PITCH
    WEIGHTS_AT: tl.constexpr = IDS_AT + D * C * K
    COUNTS_AT: tl.constexpr = WEIGHTS_AT + D * C * K
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    dtype = expert_y.dtype.element_ty
    pid = tl.program_id(0)
    if HAS_BOUND:
        m = tl.minimum(m.to(tl.int64), tl.load(bound_m).to(tl.int64)).to(tl.int32)
    arrived = dispatched + (tl.load(counters + 1) & 1) * PARITY_WORDS
    if SEND:
        # counters[3] is what the receive half finished last; buffers alternate as in the dispatch.
        generation = tl.load(counters + 3) + 1
        parity = generation & 1
        token_weights = (arrived + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
        # Once a wait of this rank has failed, what was dispatched may be anything: nothing is sent.
        sound = every_thread(tl.load(abort) == 0)
        if EXCHANGE and SMALL < C:
            # Program d < W sends this rank's weights to rank d, then all programs wait for the
            # weights of the sources that send theirs: those that dispatched more than SMALL tokens,
            # however few are combined. No rank waits before it has sent.
            if (pid < W) & (tl.load(arrived + COUNTS_AT + rank) > SMALL):
                base = tl.load(weight_addresses + pid).to(tl.pointer_type(tl.float32))
                o = tl.arange(0, CK)
                to = base + (parity * W + rank) * (C * K) + o
                tl.store(to, tl.load(weights + o, mask=o < m * K), mask=o < m * K)
                fence()
                publish(tl.load(weight_flag_addresses + pid) + rank * 4, generation)
            peer = tl.arange(0, WEIGHT_WORDS)
            many = tl.load(arrived + COUNTS_AT + peer, mask=peer < W, other=0) > SMALL
            if (tl.max(many.to(tl.int32), 0) > 0) & sound:
                sound = wait_all(
                    weight_flags, many, generation, errors, abort, weights_operation, timeout_ns, 1,
                    WEIGHT_WORDS, 1,
                )  # fmt: skip
        if EXCHANGE:
            token_weights = received_weights + parity * (W * C * K)
        # The expert rows of a token on this rank: weight and sum them, store the sum at its owner.
        piece = tl.where(sound, pid, D * C * BLOCKS)
        while piece < D * C * BLOCKS:
            source = (piece + rank) % D
            i = piece // D % C
            o = piece // (D * C) * BLOCK + tl.arange(0, BLOCK)
            # Loads of one kind stand together, so that they are in flight together.
            brought = tl.load(arrived + COUNTS_AT + source * P)
            entry = (source * C + i) * K
            rows = ()
            last = tl.full((), -1, tl.int32)
            for k in tl.static_range(K):
                expert = tl.load(arrived + IDS_AT + entry + k)
                row = tl.load(entry_row + entry + k)
                row = tl.where((expert >= rank * L) & (expert < rank * L + L), row, -1)
                rows = rows + (row,)  # type: ignore[assignment]
                last = tl.maximum(last, row)
            sum_buffers = peer_addresses(sum_addresses + source * P, 0, P)
            if EXCHANGE:
                row_buffers = peer_addresses(row_addresses + source * P, 0, P)
            if (i < brought) & (last >= 0):
                # With the exchange, weights lie by rank; all ranks of the source's group sent the
                # same, so take its first.
                weight_at = (source * P * C + i) * K if EXCHANGE else entry
                values = ()
                token_weight = ()
                for k in tl.static_range(K):
                    at_y = (rows[k] // R).to(tl.int64) * y_expert_stride * 8
                    at_y += (rows[k] % R).to(tl.int64) * y_row_stride * 8
                    values = values + (
                        tl.load(expert_y + at_y + o, mask=(o < H) & (rows[k] >= 0), other=0.0),
                    )  # type: ignore[assignment]
                    token_weight = token_weight + (tl.load(token_weights + weight_at + k),)  # type: ignore[assignment]
                direct = EXCHANGE & (brought <= SMALL)
                total = tl.zeros((BLOCK,), tl.float32)
                for k in tl.static_range(K):
                    total += tl.where(rows[k] >= 0, token_weight[k], 0.0) * values[k].to(tl.float32)
                    if EXCHANGE:
                        at = ((parity * SMALL + i) * K + k).to(tl.int64) * H + o
                        for s in tl.static_range(P):
                            base = peer_address(row_buffers, row_addresses + source * P, 0, s, P)
                            to = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16) + at
                            tl.store(to, values[k], mask=(o < H) & (rows[k] >= 0) & direct)
                # Only this rank writes slot [parity, this rank, token] of the owner's buffer.
                slot = (parity * W + rank).to(tl.int64) * C + i
                for s in tl.static_range(P):
                    base = peer_address(sum_buffers, sum_addresses + source * P, 0, s, P)
                    to = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16) + slot * H + o
                    tl.store(to, total.to(dtype), mask=(o < H) & (not direct))
            piece += F
        # One flag a program at every rank: it publishes all that the program has stored.
        if sound:
            signal_all(flag_addresses, rank, rank * F + pid, generation, W)
    else:
        generation = tl.load(counters + 2)
        # Local loads come before the wait, to overlap with it.
        i = pid // BLOCKS
        o = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        kk = tl.arange(0, KP)
        ids = tl.load(indices + i * K + kk, mask=(kk < K) & (i < m), other=-1)
        # Nothing comes back for a token that the dispatch did not send.
        brought = tl.load(arrived + COUNTS_AT + rank)
        ours = (ids >= 0) & (ids < W * L) & (i < brought)
        there = tl.where(ours, ids.to(tl.int32) // L, -1)
        direct = False
        if EXCHANGE:
            direct = brought <= SMALL
            known = ()
            token_weight = ()
            for k in tl.static_range(K):
                is_known = tl.sum((there >= 0) & (kk == k), 0) > 0
                known = known + (is_known,)  # type: ignore[assignment]
                weight = tl.load(weights + i * K + k, mask=is_known, other=0.0)
                token_weight = token_weight + (weight,)  # type: ignore[assignment]
        due = tl.arange(0, WORDS) < W * F
        sound = wait_all(
            flags, due, generation, errors, abort, operation, timeout_ns, F, WORDS, FLAG_STRIDE
        )
        # What has not arrived is not added in silence: a sum that begins with NaN stays NaN.
        nothing = tl.where(sound & (tl.load(abort) == 0), 0.0, float("nan"))
        # Add what the ranks sent, in rank order (or the single rows of a small source, by k).
        parity = generation & 1
        if i < m:
            total = tl.zeros((BLOCK,), tl.float32) + nothing
            if EXCHANGE:  # noqa: SIM102  (Triton evaluates both sides of `and`)
                if direct:
                    at = ((parity * SMALL + i) * K).to(tl.int64) * H + o
                    for k in tl.static_range(K):
                        inside = (o < H) & known[k]
                        row = tl.load(received_rows + at + k * H, mask=inside, other=0.0)
                        total += _rounded_product(row.to(tl.float32), token_weight[k])
            for d in tl.static_range(W):
                needed = (tl.max((there == d).to(tl.int32), 0) > 0) & (not direct)
                slot = (parity * W + d).to(tl.int64) * C + i
                total += tl.load(sums + slot * H + o, mask=(o < H) & needed, other=0.0).to(
                    tl.float32
                )
            unit: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
            to = out + i.to(tl.int64) * out_stride * unit + o
            if ACCUMULATE:
                total += tl.load(to, mask=o < H, other=0.0).to(tl.float32)
            tl.store(to, total.to(out.dtype.element_ty), mask=o < H)
    if pid == 0:
        tl.store(counters + (2 if SEND else 3), generation)
