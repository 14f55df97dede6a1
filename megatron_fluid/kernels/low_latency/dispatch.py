"""Dispatch of the decode-time MoE all-to-all over peer pointers: a send half and a receive half.

low_latency/combine.py has the combine; this text is about both. A token's row crosses the wire once
per destination rank, together with its expert ids. The receiver finds every expert's rows by a
prefix sum over those ids, so slots are in (source, token, k) order on every run, without atomics
and without an exchange of counts. Combine sums a rank's experts first, in fp32 and by k, and sends
one row per (token, rank); the token's owner sums the ranks in rank order.

Each half is a launch of its own (SEND says which): nothing holds an SM while bytes are in flight,
and no program waits for a peer before it has sent.

Signals: program p of a send stores generation g into word `rank * F + p` of every peer's region
after its last data store (CTA barrier, one system fence, relaxed stores); the receiver loads all W
* F words with acquire until all have reached g. Waits are bounded: after `timeout_ns` the record
goes into the error words and the kernel ends.

Generations: `counters` int32 [8] holds, for an operation, what was sent (S) and what was received
(R). A send works on generation R + 1 and writes S; a receive works on S and writes R. Buffers
alternate by the generation's parity (a double buffer): a rank that sends g has received g - 1 from
every rank, so every rank has finished reading g - 2.

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

from megatron_fluid.kernels.low_latency.signals import (
    every_thread,
    peer_address,
    peer_addresses,
    signal_all,
    wait_all,
)

__all__ = ["dispatch_kernel"]


@triton.jit
def _packed_rows(
    mine, e, rank, alignment, sound,
    IDS_AT: tl.constexpr, COUNTS_AT: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """(first row, row after the padding) of local expert e, in rows packed by expert; no
    rows unless `sound`."""
    # Count the rows of every local expert from all sources' ids: each program does so for itself.
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
        tokens = tl.load(mine + COUNTS_AT + token // C * P, mask=(token < D * C) & sound, other=0)
        here = inside & (local >= 0) & (local < L) & (token % C < tokens)[:, None]
        here = tl.reshape(here, (SCAN * KP,))
        rows += tl.histogram(tl.where(here, tl.reshape(local, (SCAN * KP,)), 0), LP, mask=here)
    padded = (rows + alignment - 1) // alignment * alignment
    expert = tl.arange(0, LP)
    first = tl.sum(tl.where(expert < e, padded, 0), 0)
    return first, first + tl.sum(tl.where(expert == e, padded, 0), 0)


_INTEGERS = [
    *("m", "rank", "timeout_ns", "operation", "x_stride", "x_scale_stride", "out_expert_stride"),
    *("out_row_stride", "out_scale_expert_stride", "out_scale_row_stride", "alignment"),
]


@triton.jit(do_not_specialize=_INTEGERS)
def dispatch_kernel(
    x,  # int32 [m, HW], rows `x_stride` 16-byte units apart
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
    flags, flag_addresses, counters, errors, abort, m, rank, timeout_ns, operation, x_stride,
    x_scale_stride, out_expert_stride, out_row_stride, out_scale_expert_stride,
    out_scale_row_stride, alignment,
    C: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, HW: tl.constexpr, SW: tl.constexpr, SWP: tl.constexpr,
    SCALE_AT: tl.constexpr, PITCH: tl.constexpr, PARITY_WORDS: tl.constexpr, F: tl.constexpr,
    WORDS: tl.constexpr, FLAG_STRIDE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, SCAN: tl.constexpr, LP: tl.constexpr, PACKED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_BOUND: tl.constexpr, SEND: tl.constexpr,
):  # fmt: skip
    """Send every token to the ranks of its experts (SEND), or lay received tokens out by expert.

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
        # counters[1] is what the receive half finished last: all ranks have read the parity that
        # this generation overwrites.
        generation = tl.load(counters + 1) + 1
        regions = peer_addresses(region_addresses, rank, W)
        parity = (generation & 1) * PARITY_WORDS
        share = rank % P
        source = rank // P
        if HAS_BOUND:
            m = tl.minimum(m.to(tl.int64), tl.load(bound_m).to(tl.int64)).to(tl.int32)
        # Once a wait of this rank has failed it sends nothing: peers that are late may still read.
        sound = every_thread(tl.load(abort) == 0)
        m = tl.where(sound, m, 0)
        kk = tl.arange(0, KP)
        sw = tl.arange(0, SWP)
        i = pid * P + share
        while i < m:
            ids = tl.load(indices + i * K + kk, mask=kk < K, other=-1)
            # Compared before they are cut to 32 bits; ids go to every rank, rows to those needed.
            ids = tl.where((ids >= 0) & (ids < W * L), ids.to(tl.int32), -1)
            there = tl.where(ids >= 0, ids // L, -1)
            row = source * C + i
            if SW > 0:
                scale = tl.load(x_scale + i.to(tl.int64) * x_scale_stride + sw, mask=sw < SW)
            if HAS_WEIGHTS:
                weight = tl.load(weights + i * K + kk, mask=kk < K)
            for h in tl.static_range(0, HW, BLOCK):
                o = h + tl.arange(0, BLOCK)
                value = tl.load(x + i.to(tl.int64) * x_stride * 4 + o, mask=o < HW)
                for n in tl.static_range(W):
                    needed = tl.max((there == (rank + n) % W).to(tl.int32), 0) > 0
                    base = peer_address(regions, region_addresses, rank, n, W).to(
                        tl.pointer_type(tl.int32)
                    )
                    base = tl.multiple_of(base, 16) + parity
                    # Row source * C + i of a region has this token's rank as its only writer.
                    if h == 0:
                        tl.store(base + IDS_AT + row * K + kk, ids, mask=kk < K)
                        if HAS_WEIGHTS:
                            to = (base + WEIGHTS_AT + row * K).to(tl.pointer_type(tl.float32))
                            tl.store(to + kk, weight, mask=kk < K)
                        if SW > 0:
                            to = base + row.to(tl.int64) * PITCH + SCALE_AT
                            tl.store(to + sw, scale, mask=(sw < SW) & needed)
                    to = base + row.to(tl.int64) * PITCH
                    tl.store(to + o, value, mask=(o < HW) & needed)
            i += F * P
        # How many tokens this rank has, then the flags: they publish all stores of this program.
        if (pid == 0) & sound:
            for n in tl.static_range(W):
                base = (
                    peer_address(regions, region_addresses, rank, n, W).to(
                        tl.pointer_type(tl.int32)
                    )
                    + parity
                )
                tl.store(base + COUNTS_AT + rank, m)
        if sound:
            signal_all(flag_addresses, rank, rank * F + pid, generation, W)
    else:
        # Wait for all F programs of all W ranks; from here on their stores are visible.
        generation = tl.load(counters)
        due = tl.arange(0, WORDS) < W * F
        # If one does not come there are no rows: the counts and ids here may be anything.
        sound = wait_all(
            flags, due, generation, errors, abort, operation, timeout_ns, F, WORDS, FLAG_STRIDE
        )
        mine = region + (generation & 1) * PARITY_WORDS
        if pid < L * SPLIT:
            e = pid // SPLIT
            j = pid % SPLIT
            first_row = e * R
            if PACKED:
                first_row, end = _packed_rows(
                    mine, e, rank, alignment, sound, IDS_AT, COUNTS_AT, C, D, P, K, KP, L, LP, SCAN
                )
                if j == 0:
                    tl.store(out_offsets + e, end)
            # SCAN tokens at a time: which of them name expert e, and their slots by prefix sum.
            count = tl.full((), 0, tl.int32)
            for base in range(0, D * C, SCAN):
                token = base + tl.arange(0, SCAN)
                kk = tl.arange(0, KP)
                ids = tl.load(
                    mine + IDS_AT + token[:, None] * K + kk[None, :],
                    mask=(token < D * C)[:, None] & (kk < K)[None, :],
                    other=-1,
                )
                tokens = tl.load(
                    mine + COUNTS_AT + token // C * P, mask=(token < D * C) & sound, other=0
                )
                named = (ids == rank * L + e) & (token % C < tokens)[:, None]
                hit = tl.max(named.to(tl.int32), 1)
                slot = tl.cumsum(hit, 0) - hit + count
                end = count + tl.sum(hit, 0)
                row = first_row + slot
                # For the combine: the row of each entry; the SPLIT programs share these stores.
                tl.store(
                    entry_row + token[:, None] * K + kk[None, :],
                    tl.broadcast_to(row[:, None], (SCAN, KP)),
                    mask=named & (slot % SPLIT == j)[:, None],
                )
                # Copy this program's rows j, j + SPLIT, ... of the slots found, ROWS at a time.
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
    if pid == 0:  # read by the other half, a later launch on this stream
        tl.store(counters + (0 if SEND else 1), generation)
