"""The routing plan of an expert-parallel layer, made on the device from top-k ids without a host
read.

Two small kernels. `publish_kernel` runs where the tokens are: it writes their ids, probabilities
and per-block expert counts into every rank's memory and notes which ranks each token goes to.
`plan_kernel` runs where the experts are, once every rank has published: it sorts (source rank,
token, k) stably by local expert with prefix sums, so the order of rows is fixed and no atomic
decides it.

Receive rows: token t of rank s arrives on any rank in row s * C + t, where C is the token capacity
of a rank. The index follows from the token alone, so tokens can be sent before any rank has
planned. Expert rows are expert-major, each expert's rows in the order of receive rows.

Reference: publish_reference and plan_reference of tests/support/kernel_references.py.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, NB =
ceil(C / BT) blocks of a rank, N expert rows of this rank. ids are global expert numbers, -1 where
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.kernels.flags import advance, barrier

__all__ = [
    "RoutingHandle",
    "count_blocks",
    "count_choices",
    "plan_kernel",
    "publish_kernel",
    "rows_of_choices",
]


@dataclass
class RoutingHandle:
    """Where every token of one call went. Saved by the forward, replayed by the backward and by
    recompute.

    num_tokens T; ids [T, K]; destinations int32 [C], of which T are set (bit d: the token goes to
    rank d); offsets int32 [El]; row_prob fp32 [capacity]; inverse int32 [W * C, K] (expert row of
    each receive row and k; -1 not here, -2 over capacity); origins int32 [capacity] (the choice
    that each expert row is of: its rank << NvlinkBuffers.shift | t * K + k, 32 unsigned bits);
    ends: offsets on the host in exact mode, else None. row_count: N on the device (int32, one
    element), at most the capacity.
    """

    num_tokens: int
    ids: Tensor
    destinations: Tensor
    offsets: Tensor
    row_count: Tensor
    row_prob: Tensor
    inverse: Tensor
    origins: Tensor
    capacity: int
    ends: list[int] | None = None

    @property
    def buffer_rows(self) -> int:
        """Rows that activations are allocated for."""
        return self.capacity if self.ends is None else self.ends[-1]


@triton.jit
def count_choices(ids, token, real, first, K: tl.constexpr, EP: tl.constexpr):
    """How often each `token` [BT], if `real`, names expert first + e, for e below EP: int32 [BT,
    EP]. ids: [.., K]."""
    # Hits of all k first: a sum over tokens crosses warps and is expensive.
    expert = tl.arange(0, EP)
    hits = tl.zeros((token.shape[0], EP), tl.int32)
    for k in tl.static_range(K):
        chosen = tl.load(ids + token * K + k, mask=real, other=-1).to(tl.int32) - first
        hits += (chosen[:, None] == expert[None, :]).to(tl.int32)
    return hits


@triton.jit
def count_blocks(
    counts, number, blocks, sound, E: tl.constexpr, EP: tl.constexpr, RB: tl.constexpr
):
    """The counts [blocks, E] of each expert summed over all blocks and over those before `number`,
    int32 [EP] each; zeros unless `sound`. RB: blocks that are read at a time.

    Every program does so for itself, which spares another kernel and a wait among programs.
    """
    expert = tl.arange(0, EP)
    total = tl.zeros((RB, EP), tl.int32)
    earlier = tl.zeros((RB, EP), tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < blocks:
        block = first + tl.arange(0, RB)
        found = tl.load(
            counts + block[:, None] * E + expert[None, :],
            mask=(block < blocks)[:, None] & (expert < E)[None, :] & sound,
            other=0,
        )
        total += found
        earlier += tl.where((block < number)[:, None], found, 0)
        first += RB
    return tl.sum(total, 0), tl.sum(earlier, 0)


@triton.jit
def rows_of_choices(hits, before, chosen, kept, KP: tl.constexpr):
    """The row of each choice [BT, KP], where `kept`: behind `before` [EP] rows of its expert, and
    those of the tokens before by `hits` [BT, EP]. No atomic decides the order."""
    next_row = before[None, :] + tl.cumsum(hits, 0) - hits
    row = tl.gather(next_row, tl.where(kept, chosen, 0), 1)
    # An expert that a token names twice: the later k has the next row.
    k = tl.arange(0, KP)
    again = (chosen[:, :, None] == chosen[:, None, :]) & (k[None, None, :] < k[None, :, None])
    return row + tl.sum(again.to(tl.int32), 2)


@triton.jit(do_not_specialize=["T", "wanted"])
def publish_kernel(
    ids,  # [T, K] any integer
    probs,  # fp32 [T, K]
    destinations,  # int32 [C], T of them out: bit d set when the token goes to rank d
    T,
    wanted,  # tokens that this rank brings: more than T where they do not fit, and T is 0
    ids_addresses,  # int64 [W]: int32 [W, C, K] of every rank
    probs_addresses,  # int64 [W]: fp32 [W, C, K]
    counts_addresses,  # int64 [W]: int32 [W * NB, El]
    wanted_addresses,  # int64 [W]: int32 [W]
    counter,  # int32: generation of the region that plan_kernel waits on
    abort,  # int32: not 0 when a wait of this rank has failed; then nothing is sent
    rank, C,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, EL: tl.constexpr, ELP: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Grid (NB,). KP and ELP are K and El rounded up to powers of two."""
    block = tl.program_id(0)
    sound = tl.load(abort) == 0
    if block == 0:
        advance(counter)  # the generation that plan_kernel's barrier waits for
    t = block * BT + tl.arange(0, BT)
    k = tl.arange(0, KP)
    real = (t < T)[:, None] & (k < K)[None, :]
    room = (t < C)[:, None] & (k < K)[None, :] & sound
    at = t[:, None] * K + k[None, :]
    chosen = tl.load(ids + at, mask=real, other=-1).to(tl.int32)
    weight = tl.load(probs + at, mask=real, other=0.0)
    # To every rank d: this block's ids and probabilities, and how many of them each of its experts
    # gets. The memory at [rank] on rank d belongs to this rank alone.
    expert = tl.arange(0, ELP)
    for d in tl.static_range(W):
        slot = rank * C * K + at
        tl.store(tl.load(ids_addresses + d).to(tl.pointer_type(tl.int32)) + slot, chosen, mask=room)
        tl.store(
            tl.load(probs_addresses + d).to(tl.pointer_type(tl.float32)) + slot, weight, mask=room
        )
        hits = count_choices(ids, t, t < T, d * EL, K, ELP)
        counts = tl.load(counts_addresses + d).to(tl.pointer_type(tl.int32))
        first = counts + (rank * tl.num_programs(0) + block) * EL + expert
        tl.store(first, tl.sum(hits, 0), mask=(expert < EL) & sound)
        if block == 0:
            there = tl.load(wanted_addresses + d).to(tl.pointer_type(tl.int32))
            tl.store(there + rank, wanted, mask=sound)
    # For this rank's own push and reduce: the set of ranks that each token goes to.
    bits = tl.zeros((BT,), tl.int32)
    for d in tl.static_range(W):
        here = (chosen >= d * EL) & (chosen < (d + 1) * EL)
        bits |= tl.max(here.to(tl.int32), 1) << d
    tl.store(destinations + t, bits, mask=t < T)


@triton.jit(do_not_specialize=["capacity"])
def plan_kernel(
    offsets,  # int32 [El] out: rows up to and including each expert, at most `capacity`
    row_prob,  # fp32 [capacity] out
    inverse,  # int32 [W * C, K] out: expert row of (receive row, k); -1 not here, -2 over capacity
    # int32 [capacity] out: of each expert row its token's rank << SHIFT | t * K + k, in 32 bits
    # without a sign
    origins,
    capacity,
    # int32 [El + 1] out, visible to the host: offsets again, and the most tokens that a rank brings
    host_offsets,
    # int32 [1] in and out, visible to the host: the most rows ever wanted where they were over
    # capacity
    overflow,
    ids,  # int32 [W, C, K], published
    probs,  # fp32 [W, C, K], published
    counts,  # int32 [W * NB, El], published
    wanted,  # int32 [W], published
    flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, C, NB,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, EL: tl.constexpr, ELP: tl.constexpr,
    BT: tl.constexpr, RB: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Grid (W * NB,). Rows beyond `capacity` are left out of every table and reported in
    `overflow`.

    If a rank does not come, its ids and counts are whatever the memory held, and so nothing is read
    from it: there are no rows then. Programs may find different answers if it comes late, so the
    kernels that use the tables look at the abort word.
    """
    pid = tl.program_id(0)
    # From here on, all ranks' ids, probs and counts are visible.
    sound = barrier(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, W)

    # Triton 3.6 fails to compile some gathers and scans of rows narrower than 16 bytes: pad El.
    EP: tl.constexpr = max(ELP, 4)
    BLOCKS: tl.constexpr = min(RB, 4096 // EP)
    expert = tl.arange(0, EP)
    everything, before = count_blocks(counts, pid, W * NB, sound, EL, EP, BLOCKS)
    ends = tl.cumsum(everything, 0)
    # The first program writes what is not per token: where each expert's rows end.
    if pid == 0:
        rows = tl.sum(everything, 0)
        kept = tl.minimum(ends, capacity)
        tl.store(offsets + expert, kept, mask=expert < EL)
        tl.store(host_offsets + expert, kept, mask=expert < EL)
        most = tl.full((), 0, tl.int32)
        for s in tl.static_range(W):
            most = tl.maximum(most, tl.load(wanted + s, mask=sound, other=0))
        tl.store(host_offsets + EL, most)
        if rows > capacity:
            tl.store(overflow, tl.maximum(tl.load(overflow), rows))

    # This program's tokens: behind the experts before and the blocks before.
    source = pid // NB
    t = (pid % NB) * BT + tl.arange(0, BT)
    received = source * C + t
    hits = count_choices(ids, received, (t < C) & sound, rank * EL, K, EP)
    k = tl.arange(0, KP)
    room = (t < C)[:, None] & (k < K)[None, :]
    entry = received[:, None] * K + k[None, :]
    column = tl.load(ids + entry, mask=room & sound, other=-1) - rank * EL
    here = (column >= 0) & (column < EL)
    row = rows_of_choices(hits, ends - everything + before, column, here, KP)
    # Both directions of the plan: entry -> row for the tokens, row -> entry for the experts' rows.
    valid = here & (row < capacity)
    tl.store(inverse + entry, tl.where(valid, row, tl.where(here, -2, -1)), mask=room)
    choice = (t * K)[:, None] + k[None, :] + tl.zeros_like(row)
    tl.store(origins + row, (source << SHIFT) | choice, mask=valid)
    tl.store(row_prob + row, tl.load(probs + entry, mask=room, other=0.0), mask=valid)
