"""Send halves of the decode-time all-to-all over NVSHMEM: puts with signals, whatever carries them
(P2P, IBGDA, IBRC, libfabric; NVSHMEM's own settings choose).

A program writes what it sends into its own symmetric staging memory, puts it, orders the puts with
a fence and raises its 64-bit signal at every rank. The receive halves are those of
dispatch.py and combine.py, with FLAG_STRIDE 2: they look at the low word of each signal.

Importing this module needs torch's NVSHMEM bindings.

Reference: megatron_fluid.low_latency.reference.

Shapes and memory: see megatron_fluid.kernels.low_latency.dispatch.
"""

from __future__ import annotations

import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
import triton
import triton.language as tl

from megatron_fluid.kernels.low_latency.signals import every_thread, wait_all

__all__ = ["combine_put_kernel", "dispatch_put_kernel"]

_COMMON = ["m", "rank", "first_pe", "pe_step"]
_DISPATCH_INTEGERS = [*_COMMON, "x_stride", "x_scale_stride"]
_COMBINE_INTEGERS = [
    *(*_COMMON, "timeout_ns", "weights_operation", "y_expert_stride", "y_row_stride")
]
# NVSHMEM_SIGNAL_SET of its headers. Within a host any other value adds, also the 0 of the bindings'
# docstrings.
SIGNAL_SET = tl.constexpr(9)


@triton.jit
def _signal(pad, signals, first, generation, first_pe, pe_step, W: tl.constexpr):
    """Raise signal `first` at every rank, after everything this program has put.

    The bindings signal only with a put: the 16 bytes of `pad` that it carries are never read.
    """
    nvshmem.fence()  # orders the puts before it ahead of the signals, at each rank
    for d in tl.static_range(W):
        size = tl.full((), 16, tl.int64)
        nvshmem.putmem_signal_block(
            pad + first * 4, pad + first * 4, size, signals + first, generation, SIGNAL_SET,
            first_pe + d * pe_step,
        )  # fmt: skip


@triton.jit(do_not_specialize=_DISPATCH_INTEGERS)
def dispatch_put_kernel(
    x, x_scale, indices, weights, bound_m,
    staging,  # int32 [C, PITCH + 2 KP + 4], symmetric: packed tokens on their way
    pad,  # int32 [W * F, 4], symmetric
    region,  # int32, symmetric
    signals,  # int64 [W * F], symmetric
    counters, abort, m, rank, first_pe, pe_step, x_stride, x_scale_stride,
    C: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    L: tl.constexpr, HW: tl.constexpr, SW: tl.constexpr, SWP: tl.constexpr, SCALE_AT: tl.constexpr,
    PITCH: tl.constexpr, PARITY_WORDS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Put every token of this rank's share to the ranks of its experts. Grid (F,); program p the
    tokens p, p + F, ..."""
    W: tl.constexpr = D * P
    IDS_AT: tl.constexpr = D * C * PITCH
    WEIGHTS_AT: tl.constexpr = IDS_AT + D * C * K
    COUNTS_AT: tl.constexpr = WEIGHTS_AT + D * C * K
    pid = tl.program_id(0)
    generation = tl.load(counters + 1) + 1
    arrival = region + (generation & 1) * PARITY_WORDS
    if HAS_BOUND:
        m = tl.minimum(m.to(tl.int64), tl.load(bound_m).to(tl.int64)).to(tl.int32)
    # Once a wait of this rank has failed it sends nothing: peers that are late may still read.
    sound = every_thread(tl.load(abort) == 0)
    m = tl.where(sound, m, 0)
    kk = tl.arange(0, KP)
    sw = tl.arange(0, SWP)
    i = pid * P + rank % P
    while i < m:
        ids = tl.load(indices + i * K + kk, mask=kk < K, other=-1)
        # Compared before they are cut to 32 bits.
        ids = tl.where((ids >= 0) & (ids < W * L), ids.to(tl.int32), -1)
        there = tl.where(ids >= 0, ids // L, -1)
        # Pack the token in symmetric staging memory: puts read it there until they are complete.
        row = (rank // P) * C + i
        packed = staging + i.to(tl.int64) * (PITCH + 2 * KP + 4)
        tl.store(packed + PITCH + kk, ids, mask=kk < K)
        if HAS_WEIGHTS:
            weight = tl.load(weights + i * K + kk, mask=kk < K)
            tl.store(
                (packed + PITCH + KP).to(tl.pointer_type(tl.float32)) + kk, weight, mask=kk < K
            )
        for h in tl.static_range(0, HW, BLOCK):
            o = h + tl.arange(0, BLOCK)
            value = tl.load(x + i.to(tl.int64) * x_stride * 4 + o, mask=o < HW)
            tl.store(packed + o, value, mask=o < HW)
        if SW > 0:
            scale = tl.load(x_scale + i.to(tl.int64) * x_scale_stride + sw, mask=sw < SW)
            tl.store(packed + SCALE_AT + sw, scale, mask=sw < SW)
        # Put the ids to every rank, the row to the ranks of its experts; before that, all threads
        # must have written.
        tl.debug_barrier()
        for n in tl.static_range(W):
            d = (rank + n) % W
            pe = first_pe + d * pe_step
            nvshmem.put(arrival + IDS_AT + row * K, packed + PITCH, tl.full((), K, tl.int32), pe)
            if HAS_WEIGHTS:
                nvshmem.put(
                    arrival + WEIGHTS_AT + row * K, packed + PITCH + KP, tl.full((), K, tl.int32),
                    pe,
                )  # fmt: skip
            if tl.max((there == d).to(tl.int32), 0) > 0:
                nvshmem.put(
                    arrival + row.to(tl.int64) * PITCH, packed, tl.full((), PITCH, tl.int32), pe
                )
        i += F * P
    if (pid == 0) & sound:
        word = pad + rank * (F * 4)
        tl.store(word, m)
        tl.debug_barrier()
        for d in tl.static_range(W):
            nvshmem.put(
                arrival + COUNTS_AT + rank, word, tl.full((), 1, tl.int32), first_pe + d * pe_step
            )
    if sound:
        _signal(pad, signals, rank * F + pid, generation, first_pe, pe_step, W)
    if pid == 0:
        tl.store(counters, generation)


@triton.jit(do_not_specialize=_COMBINE_INTEGERS)
def combine_put_kernel(
    weights,  # fp32 [m, K] (EXCHANGE)
    expert_y, entry_row, dispatched,
    sum_staging,  # [D * C, H], symmetric: sums on their way
    sums,  # [2, W, C, H], symmetric
    weight_staging,  # fp32 [C * K], symmetric (EXCHANGE)
    received_weights,  # fp32 [2, W, C, K], symmetric (EXCHANGE)
    pad, signals,
    weight_signals,  # int64 [W], symmetric (EXCHANGE)
    counters, errors, abort, m, rank, first_pe, pe_step, timeout_ns, weights_operation,
    y_expert_stride, y_row_stride,
    C: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    CK: tl.constexpr, L: tl.constexpr, R: tl.constexpr, H: tl.constexpr, PITCH: tl.constexpr,
    PARITY_WORDS: tl.constexpr, F: tl.constexpr, WEIGHT_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Sum this rank's experts' rows of each token and put one row a token to its owners. Grid
    (F,)."""
    W: tl.constexpr = D * P
    IDS_AT: tl.constexpr = D * C * PITCH
    WEIGHTS_AT: tl.constexpr = IDS_AT + D * C * K
    COUNTS_AT: tl.constexpr = WEIGHTS_AT + D * C * K
    dtype = expert_y.dtype.element_ty
    pid = tl.program_id(0)
    arrived = dispatched + (tl.load(counters + 1) & 1) * PARITY_WORDS
    generation = tl.load(counters + 3) + 1
    parity = generation & 1
    token_weights = (arrived + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
    # Once a wait of this rank has failed, what was dispatched may be anything: nothing is sent.
    sound = every_thread(tl.load(abort) == 0)
    # The first program sends this rank's weights to all; every program waits for all ranks' ones.
    if EXCHANGE:
        if (pid == 0) & sound:
            o = tl.arange(0, CK)
            tl.store(weight_staging + o, tl.load(weights + o, mask=o < m * K), mask=o < m * K)
            tl.debug_barrier()
            to = received_weights + (parity * W + rank) * (C * K)
            size = tl.full((), C * K * 4, tl.int64)
            for d in tl.static_range(W):
                nvshmem.putmem_signal_block(
                    to, weight_staging, size, weight_signals + rank, generation, SIGNAL_SET,
                    first_pe + d * pe_step,
                )  # fmt: skip
        due = tl.arange(0, WEIGHT_WORDS) < W
        low = weight_signals.to(tl.pointer_type(tl.int32))
        sound = sound & wait_all(
            low, due, generation, errors, abort, weights_operation, timeout_ns, 1, WEIGHT_WORDS, 2
        )
        token_weights = received_weights + parity * (W * C * K)
    # A token of each source in turn: sum its rows in staging memory, put the sum to its owners.
    item = tl.where(sound, pid, D * C)
    while item < D * C:
        source = (item + rank) % D
        i = item // D
        if i < tl.load(arrived + COUNTS_AT + source * P):
            entry = (source * C + i) * K
            weight_at = (source * P * C + i) * K if EXCHANGE else entry
            kk = tl.arange(0, KP)
            rows = tl.load(entry_row + entry + kk, mask=kk < K, other=-1)
            ids = tl.load(arrived + IDS_AT + entry + kk, mask=kk < K, other=-1)
            here = (ids >= rank * L) & (ids < rank * L + L)
            if tl.max(here.to(tl.int32), 0) > 0:
                packed = sum_staging + (source * C + i).to(tl.int64) * H
                for h in tl.static_range(0, H, BLOCK):
                    o = h + tl.arange(0, BLOCK)
                    total = tl.zeros((BLOCK,), tl.float32)
                    for k in tl.static_range(K):
                        row = tl.max(tl.where(here & (kk == k), rows, -1), 0)
                        at_y = (row // R).to(tl.int64) * y_expert_stride * 8
                        at_y += (row % R).to(tl.int64) * y_row_stride * 8
                        value = tl.load(expert_y + at_y + o, mask=(o < H) & (row >= 0), other=0.0)
                        weight = tl.load(token_weights + weight_at + k)
                        total += tl.where(row >= 0, weight, 0.0) * value.to(tl.float32)
                    tl.store(packed + o, total.to(dtype), mask=o < H)
                tl.debug_barrier()
                to = sums + ((parity * W + rank).to(tl.int64) * C + i) * H
                for s in tl.static_range(P):
                    nvshmem.put(
                        to, packed, tl.full((), H, tl.int32), first_pe + (source * P + s) * pe_step
                    )
        item += F
    if sound:
        _signal(pad, signals, rank * F + pid, generation, first_pe, pe_step, W)
    if pid == 0:
        tl.store(counters + 2, generation)
