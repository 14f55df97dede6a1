"""Decode-time MoE all-to-all over peer pointers: dispatch and combine, each a send half and a
receive half.

A token's row crosses the wire once per destination rank, together with its expert ids; the receiver
finds every expert's rows by a prefix sum over those ids, so slots are in (source, token, k) order
on every run, without atomics and without any count exchanged first. Combine sums a rank's experts
first, in fp32 and by k, and sends one row per (token, rank); the token's owner sums the ranks in
rank order.

Each half is a kernel that ends (SEND says which half a launch is): nothing holds an SM while bytes
are in flight, and no program waits for a peer before it has sent.

Signals: program p of a send stores generation g into word `rank * F + p` of every peer's region
after its last data store (CTA barrier, one system fence, relaxed stores); the receiver loads all W
* F words with acquire until all have reached g. Waits are bounded: after `timeout_ns` the record
goes into the error words and the kernel ends.

Generations: `counters` int32 [8] holds, for an operation, what was sent (S) and what was received
(R). A send works on generation R + 1 and writes S; a receive works on S and writes R. Buffers
alternate by the generation's parity: a rank that sends g has received g - 1 from everybody, so
everybody has finished reading g - 2.

Reference: megatron_fluid.low_latency.reference.

Shapes: C token capacity of a source, D sources (data-parallel groups), P ranks of a group
(dp_size), W = D * P ranks, K top-k, L local experts, R rows an expert can hold, H hidden. Rows are
moved as 32-bit words. Addresses are int64.

Memory of one parity of the dispatch region, in 32-bit words: rows [D * C, PITCH] (payload, then
scales), expert ids [D * C, K], weights fp32 [D * C, K], token counts [W]. Of the combine region:
rows [W, C, H] of the expert output's type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.low_latency_signals import (
    fence,
    peer_address,
    peer_addresses,
    publish,
    signal_all,
    wait_all,
)

__all__ = ["combine_kernel", "dispatch_kernel", "quantize_block"]


@triton.jit
def _packed_place(
    mine,
    e,
    rank,
    alignment,
    IDS_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    SCAN: tl.constexpr,
):
    """(first row, row after the padding) of local expert e where experts lie one after another."""
    rows = tl.zeros((LP,), tl.int32)
    for base in range(0, D * C, SCAN):
        token = base + tl.arange(0, SCAN)
        kk = tl.arange(0, KP)
        inside = (token < D * C)[:, None] & (kk < K)[None, :]
        at = mine + IDS_AT + token[:, None] * K + kk[None, :]
        local = tl.load(at, mask=inside, other=-1) - rank * L
        for back in tl.static_range(1, K):  # an expert named twice counts once
            earlier = tl.load(at - back, mask=inside & (kk >= back)[None, :], other=-1) - rank * L
            local = tl.where((earlier == local) & (kk >= back)[None, :], -1, local)
        tokens = tl.load(mine + COUNTS_AT + token // C * P, mask=token < D * C, other=0)
        here = inside & (local >= 0) & (local < L) & (token % C < tokens)[:, None]
        here = tl.reshape(here, (SCAN * KP,))
        rows += tl.histogram(tl.where(here, tl.reshape(local, (SCAN * KP,)), 0), LP, mask=here)
    padded = (rows + alignment - 1) // alignment * alignment
    expert = tl.arange(0, LP)
    first = tl.sum(tl.where(expert < e, padded, 0), 0)
    return first, first + tl.sum(tl.where(expert == e, padded, 0), 0)


@triton.jit
def quantize_block(row, h, HW: tl.constexpr, BLOCK: tl.constexpr):
    """Elements [4 h, 4 h + 4 BLOCK) of a row of 4 HW: (fp8 e4m3 [4 BLOCK], fp32 [BLOCK / 32]), one
    scale per 128."""
    q = h * 4 + tl.arange(0, BLOCK * 4)
    value = tl.reshape(
        tl.load(row + q, mask=q < HW * 4, other=0.0).to(tl.float32), (BLOCK // 32, 128)
    )
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-4)
    scaled = value * (448.0 / largest)[:, None]
    return tl.reshape(scaled.to(tl.float8e4nv), (BLOCK * 4,)), largest / 448.0


_PLAIN_DISPATCH = [
    "m",
    "rank",
    "timeout_ns",
    "operation",
    "x_stride",
    "x_scale_stride",
    "out_expert_stride",
    "out_row_stride",
    "out_scale_expert_stride",
    "out_scale_row_stride",
    "alignment",
]
_PLAIN_COMBINE = [
    "m",
    "rank",
    "timeout_ns",
    "operation",
    "weights_operation",
    "out_stride",
    "y_expert_stride",
    "y_row_stride",
]


@triton.jit(do_not_specialize=_PLAIN_DISPATCH)
def dispatch_kernel(
    x,  # int32 [m, HW] (QUANTIZE: bf16 or fp16 [m, 4 HW]), rows `x_stride` 16-byte units apart
    x_scale,  # int32 [m, SW], rows `x_scale_stride` words apart
    indices,  # [m, K] expert ids; outside [0, W * L) masks the entry
    weights,  # fp32 [m, K] (HAS_WEIGHTS)
    bound_m,  # int32 [1] (HAS_BOUND): at most this many tokens count
    out_counts,  # int32 [L]
    out_x,  # int32 [L, R, HW], strides in 16-byte units
    out_scale,  # int32 [L, R, SW]
    out_offsets,  # int32 [L] (PACKED): the row after each expert's last, padding counted
    # int32 [D * C * K]: row (expert * R + slot, or packed) of each entry of this rank's experts
    entry_row,
    region,  # this rank's region, int32 words
    region_addresses,  # int64 [W]
    flags,
    flag_addresses,
    counters,
    errors,
    abort,
    m,
    rank,
    timeout_ns,
    operation,
    x_stride,
    x_scale_stride,
    out_expert_stride,
    out_row_stride,
    out_scale_expert_stride,
    out_scale_row_stride,
    alignment,
    C: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    HW: tl.constexpr,
    SW: tl.constexpr,
    SWP: tl.constexpr,
    SCALE_AT: tl.constexpr,
    PITCH: tl.constexpr,
    PARITY_WORDS: tl.constexpr,
    F: tl.constexpr,
    WORDS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    LP: tl.constexpr,
    PACKED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    SEND: tl.constexpr,
):
    """Move every token to the ranks of its experts, and lay it out by expert.

    F programs send (program p the tokens p, p + F, ... of this rank's share); L * SPLIT programs
    receive (expert e, rows j, j + SPLIT, ...). An expert that a token names twice receives it once,
    and the weights add.
    """
    W: tl.constexpr = D * P
    IDS_AT: tl.constexpr = D * C * PITCH
    WEIGHTS_AT: tl.constexpr = IDS_AT + D * C * K
    COUNTS_AT: tl.constexpr = WEIGHTS_AT + D * C * K
    pid = tl.program_id(0)
    if SEND:
        generation = tl.load(counters + 1) + 1
        regions = peer_addresses(region_addresses, rank, W)
        parity = (generation & 1) * PARITY_WORDS
        share = rank % P
        source = rank // P
        if HAS_BOUND:
            m = tl.minimum(m, tl.load(bound_m).to(tl.int32))
        kk = tl.arange(0, KP)
        sw = tl.arange(0, SWP)
        i = pid * P + share
        while i < m:
            ids = tl.load(indices + i * K + kk, mask=kk < K, other=-1)
            # Compared before they are cut to 32 bits.
            ids = tl.where((ids >= 0) & (ids < W * L), ids.to(tl.int32), -1)
            there = tl.where(ids >= 0, ids // L, -1)
            row = source * C + i
            if SW > 0 and not QUANTIZE:
                scale = tl.load(x_scale + i.to(tl.int64) * x_scale_stride + sw, mask=sw < SW)
            if HAS_WEIGHTS:
                weight = tl.load(weights + i * K + kk, mask=kk < K)
            for h in tl.static_range(0, HW, BLOCK):
                o = h + tl.arange(0, BLOCK)
                if QUANTIZE:
                    value, scale = quantize_block(x + i.to(tl.int64) * x_stride * 8, h, HW, BLOCK)
                else:
                    value = tl.load(x + i.to(tl.int64) * x_stride * 4 + o, mask=o < HW)
                for n in tl.static_range(W):
                    needed = tl.max((there == (rank + n) % W).to(tl.int32), 0) > 0
                    base = peer_address(regions, region_addresses, rank, n, W).to(
                        tl.pointer_type(tl.int32)
                    )
                    base = tl.multiple_of(base, 16) + parity
                    if h == 0:
                        tl.store(base + IDS_AT + row * K + kk, ids, mask=kk < K)
                        if HAS_WEIGHTS:
                            to = (base + WEIGHTS_AT + row * K).to(tl.pointer_type(tl.float32))
                            tl.store(to + kk, weight, mask=kk < K)
                        if SW > 0 and not QUANTIZE:
                            to = base + row.to(tl.int64) * PITCH + SCALE_AT
                            tl.store(to + sw, scale, mask=(sw < SW) & needed)
                    to = base + row.to(tl.int64) * PITCH
                    if QUANTIZE:
                        q = h * 4 + tl.arange(0, BLOCK * 4)
                        tl.store(
                            to.to(tl.pointer_type(tl.float8e4nv)) + q,
                            value,
                            mask=(q < HW * 4) & needed,
                        )
                        g = h // 32 + tl.arange(0, BLOCK // 32)
                        at_scale = (to + SCALE_AT).to(tl.pointer_type(tl.float32))
                        tl.store(at_scale + g, scale, mask=(g < SW) & needed)
                    else:
                        tl.store(to + o, value, mask=(o < HW) & needed)
            i += F * P
        if pid == 0:
            for n in tl.static_range(W):
                base = (
                    peer_address(regions, region_addresses, rank, n, W).to(
                        tl.pointer_type(tl.int32)
                    )
                    + parity
                )
                tl.store(base + COUNTS_AT + rank, m)
        signal_all(flag_addresses, rank, rank * F + pid, generation, W)
    else:
        generation = tl.load(counters)
        due = tl.arange(0, WORDS) < W * F
        wait_all(
            flags, due, generation, errors, abort, operation, timeout_ns, F, WORDS, FLAG_STRIDE
        )
        mine = region + (generation & 1) * PARITY_WORDS
        if pid < L * SPLIT:
            e = pid // SPLIT
            j = pid % SPLIT
            first_row = e * R
            if PACKED:
                first_row, end = _packed_place(
                    mine, e, rank, alignment, IDS_AT, COUNTS_AT, C, D, P, K, KP, L, LP, SCAN
                )
                if j == 0:
                    tl.store(out_offsets + e, end)
            count = tl.full((), 0, tl.int32)
            for base in range(0, D * C, SCAN):
                token = base + tl.arange(0, SCAN)
                kk = tl.arange(0, KP)
                ids = tl.load(
                    mine + IDS_AT + token[:, None] * K + kk[None, :],
                    mask=(token < D * C)[:, None] & (kk < K)[None, :],
                    other=-1,
                )
                tokens = tl.load(mine + COUNTS_AT + token // C * P, mask=token < D * C, other=0)
                named = (ids == rank * L + e) & (token % C < tokens)[:, None]
                hit = tl.max(named.to(tl.int32), 1)
                slot = tl.cumsum(hit, 0) - hit + count
                end = count + tl.sum(hit, 0)
                row = first_row + slot
                tl.store(
                    entry_row + token[:, None] * K + kk[None, :],
                    tl.broadcast_to(row[:, None], (SCAN, KP)),
                    mask=named & (slot % SPLIT == j)[:, None],
                )
                slot = tl.where(hit > 0, slot, -1)
                first = j + tl.maximum(count - j + SPLIT - 1, 0) // SPLIT * SPLIT
                while first < end:
                    wanted = first + tl.arange(0, ROWS) * SPLIT
                    inside = wanted < end
                    chosen = wanted[:, None] == slot[None, :]
                    source = tl.sum(tl.where(chosen, token[None, :], 0), 1)
                    source_row = mine + source.to(tl.int64) * PITCH
                    at_expert = first_row if PACKED else 0
                    out_row = out_x + (at_expert + wanted).to(tl.int64) * out_row_stride * 4
                    if not PACKED:
                        out_row += e.to(tl.int64) * out_expert_stride * 4
                    for h in tl.static_range(0, HW, BLOCK):
                        o = h + tl.arange(0, BLOCK)
                        mask = inside[:, None] & (o < HW)[None, :]
                        value = tl.load(source_row[:, None] + o[None, :], mask=mask)
                        tl.store(out_row[:, None] + o[None, :], value, mask=mask)
                    if SW > 0:
                        sw = tl.arange(0, SWP)
                        mask = inside[:, None] & (sw < SW)[None, :]
                        scale = tl.load(source_row[:, None] + SCALE_AT + sw[None, :], mask=mask)
                        out_row = (
                            out_scale + (at_expert + wanted).to(tl.int64) * out_scale_row_stride
                        )
                        if not PACKED:
                            out_row += e.to(tl.int64) * out_scale_expert_stride
                        tl.store(out_row[:, None] + sw[None, :], scale, mask=mask)
                    first += ROWS * SPLIT
                count = end
            if j == 0:
                tl.store(out_counts + e, count)
    if pid == 0:  # for the other half, in another launch
        tl.store(counters + (0 if SEND else 1), generation)


@triton.jit(do_not_specialize=_PLAIN_COMBINE)
def combine_kernel(
    out,  # [m, H], rows `out_stride` units of 8 elements apart
    indices,  # [m, K]
    weights,  # fp32 [m, K] (EXCHANGE)
    expert_y,  # [L, R, H], strides in units of 8 elements
    bound_m,
    entry_row,  # int32 [D * C * K], left by dispatch_kernel
    dispatched,  # this rank's dispatch region, int32 words: token counts, weights
    inbox,  # this rank's combine region
    inbox_addresses,  # int64 [W]
    weight_inbox,  # fp32 [2, W, C, K] (EXCHANGE)
    weight_addresses,  # int64 [W] (EXCHANGE)
    row_inbox,  # [2, SMALL, K, H] (EXCHANGE)
    row_addresses,  # int64 [W] (EXCHANGE)
    flags,
    flag_addresses,
    weight_flags,
    weight_flag_addresses,
    counters,
    errors,
    abort,
    m,
    rank,
    timeout_ns,
    operation,
    weights_operation,
    out_stride,
    y_expert_stride,
    y_row_stride,
    C: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    CK: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    H: tl.constexpr,
    PITCH: tl.constexpr,
    PARITY_WORDS: tl.constexpr,
    F: tl.constexpr,
    WORDS: tl.constexpr,
    FLAG_STRIDE: tl.constexpr,
    WEIGHT_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
    EXCHANGE: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SEND: tl.constexpr,
):
    """Bring every token's expert rows home, weighted and summed.

    F programs send: pieces (block of H, token, source) in turn. m * ceil(H / BLOCK) programs
    receive: a token's block of H each. Without EXCHANGE the weights came with the dispatch. With it
    they are sent to the expert ranks first, except for sources of at most SMALL tokens: their
    expert rows are sent unweighted, one by one, which is sooner than an exchange.
    """
    W: tl.constexpr = D * P
    IDS_AT: tl.constexpr = D * C * PITCH
    WEIGHTS_AT: tl.constexpr = IDS_AT + D * C * K
    COUNTS_AT: tl.constexpr = WEIGHTS_AT + D * C * K
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    dtype = expert_y.dtype.element_ty
    pid = tl.program_id(0)
    if HAS_BOUND:
        m = tl.minimum(m, tl.load(bound_m).to(tl.int32))
    arrived = dispatched + (tl.load(counters + 1) & 1) * PARITY_WORDS
    if SEND:
        generation = tl.load(counters + 3) + 1
        half = generation & 1
        token_weights = (arrived + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
        if EXCHANGE:
            if (pid < W) & (m > SMALL):
                base = tl.load(weight_addresses + pid).to(tl.pointer_type(tl.float32))
                o = tl.arange(0, CK)
                to = base + (half * W + rank) * (C * K) + o
                tl.store(to, tl.load(weights + o, mask=o < m * K), mask=o < m * K)
                fence()
                publish(tl.load(weight_flag_addresses + pid) + rank * 4, generation)
            peer = tl.arange(0, WEIGHT_WORDS)
            many = tl.load(arrived + COUNTS_AT + peer, mask=peer < W, other=0) > SMALL
            if tl.max(many.to(tl.int32), 0) > 0:
                wait_all(
                    weight_flags,
                    many,
                    generation,
                    errors,
                    abort,
                    weights_operation,
                    timeout_ns,
                    1,
                    WEIGHT_WORDS,
                    1,
                )
            token_weights = weight_inbox + half * (W * C * K)
        piece = pid
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
            inboxes = peer_addresses(inbox_addresses + source * P, 0, P)
            if EXCHANGE:
                row_inboxes = peer_addresses(row_addresses + source * P, 0, P)
            if (i < brought) & (last >= 0):
                # With the exchange, the weights lie by rank; the first rank of the source's group
                # will do.
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
                        at = ((half * SMALL + i) * K + k).to(tl.int64) * H + o
                        for s in tl.static_range(P):
                            base = peer_address(row_inboxes, row_addresses + source * P, 0, s, P)
                            to = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16) + at
                            tl.store(to, values[k], mask=(o < H) & (rows[k] >= 0) & direct)
                slot = (half * W + rank).to(tl.int64) * C + i
                for s in tl.static_range(P):
                    base = peer_address(inboxes, inbox_addresses + source * P, 0, s, P)
                    to = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16) + slot * H + o
                    tl.store(to, total.to(dtype), mask=(o < H) & (not direct))
            piece += F
        signal_all(flag_addresses, rank, rank * F + pid, generation, W)
    else:
        generation = tl.load(counters + 2)
        # What does not come from peers is loaded before the wait for them.
        i = pid // BLOCKS
        o = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        kk = tl.arange(0, KP)
        ids = tl.load(indices + i * K + kk, mask=(kk < K) & (i < m), other=-1)
        there = tl.where((ids >= 0) & (ids < W * L), ids.to(tl.int32) // L, -1)
        direct = False
        if EXCHANGE:
            direct = tl.load(arrived + COUNTS_AT + rank) <= SMALL
            row_weight = tl.load(
                weights + i * K + kk, mask=(kk < K) & (i < m) & (there >= 0), other=0.0
            )
        due = tl.arange(0, WORDS) < W * F
        wait_all(
            flags, due, generation, errors, abort, operation, timeout_ns, F, WORDS, FLAG_STRIDE
        )
        half = generation & 1
        if i < m:
            total = tl.zeros((BLOCK,), tl.float32)
            if EXCHANGE:  # noqa: SIM102  (Triton evaluates both sides of `and`)
                if direct:
                    at = ((half * SMALL + i) * K + kk).to(tl.int64)[:, None] * H + o[None, :]
                    value = tl.load(
                        row_inbox + at, mask=(there >= 0)[:, None] & (o < H)[None, :], other=0.0
                    )
                    total += tl.sum(row_weight[:, None] * value.to(tl.float32), 0)
            for d in tl.static_range(W):
                needed = (tl.max((there == d).to(tl.int32), 0) > 0) & (not direct)
                slot = (half * W + d).to(tl.int64) * C + i
                total += tl.load(inbox + slot * H + o, mask=(o < H) & needed, other=0.0).to(
                    tl.float32
                )
            to = out + i.to(tl.int64) * out_stride * 8 + o
            if ACCUMULATE:
                total += tl.load(to, mask=o < H, other=0.0).to(tl.float32)
            tl.store(to, total.to(out.dtype.element_ty), mask=o < H)
    if pid == 0:
        tl.store(counters + (2 if SEND else 3), generation)
