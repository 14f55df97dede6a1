"""Kernels of the attention exchange over symmetric memory: heads to their ranks, and their results
back to their rows.

SP2HP: ``push_heads`` writes each rank its heads of this rank's rows. ``arrive_heads`` puts the rows
of all ranks in the order of positions, normalises and rotates queries and keys, and lays heads out
as the attention kernel reads them. HP2SP: ``pack_heads`` (backward) rotates gradients back and puts
them side by side, ``push_rows`` writes each rank its rows of this rank's heads, and ``arrive_rows``
puts the heads of all ranks side by side; it adds the gradients of a key/value head that ranks
share, in fp32 and in the order of ranks.

No kernel here signals or waits: a barrier over the ranks (kernels.flags.barrier_kernel) runs
between push and arrive.

Reference: tests.support.attention_reference (tests/unit/attention/test_symmetric_exchange.py).

Legend: S positions, s rows of this rank, B batch, W ranks, D head dim; a slot is the index of a
head in a buffer; a row is a (position, batch entry) pair. spans int32 [W, 5]: of each rank, its
first row in a receive buffer (over B), its rows, how many of them are in its first stretch of
positions, where that begins, and where its second stretch begins. A target is (before, slot,
slots): a buffer is a run of tensors [rows, slots, D], and ``before`` heads lie in earlier ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.cuda.triton_launch import Launcher

__all__ = [
    "arrive_heads",
    "arrive_rows",
    "load_head",
    "pack_heads",
    "pieces",
    "push_heads",
    "push_rows",
    "store_head",
    "turned",
]

SPAN = 5
_SPAN = tl.constexpr(SPAN)
_STRIDES = ["q_s", "q_b", "q_h", "k_s", "k_b", "k_h", "v_s", "v_b", "v_h"]


@triton.jit
def _position(spans, rank, s):
    """Position of a rank's local position ``s``."""
    own = spans + rank * _SPAN
    first = tl.load(own + 2)
    return tl.where(s < first, tl.load(own + 3) + s, tl.load(own + 4) + s - first)


@triton.jit(do_not_specialize=["rank", "rows", "batch", *_STRIDES])
def push_heads_kernel(
    # [s, B, heads, D], the last dimension contiguous; k and v too, or the same tensor three times
    q,
    k, v,
    addresses,  # int64 [W]: every rank's receive buffer [S B rows by source rank, its slots, D]
    # int32 [W, 1 + SLOTS]: slots of a rank, then for each kind << 24 | head in q, k or v (kind 0,
    # 1, 2); -1 none
    table,
    spans, rank,
    rows,  # s
    batch,
    q_s,  # strides of position, batch entry and head, in units of VEC elements
    q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    W: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, VEC: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write every rank its heads of this rank's rows. Grid (blocks of rows * W * SLOTS,); the next
    rank's come first."""
    # A program takes one head of ROWS rows for one peer: it reads them in place and stores them at
    # the peer, in rows of the receive buffer that this rank alone writes.
    pid = tl.program_id(0)
    j = pid % SLOTS
    peer = (rank + 1 + pid // SLOTS % W) % W
    block = pid // (SLOTS * W)
    entry = tl.load(table + peer * (SLOTS + 1) + 1 + j)
    if entry >= 0:
        slots = tl.load(table + peer * (SLOTS + 1))
        kind = entry >> 24
        head = (entry & 0xFFFFFF).to(tl.int64)
        row = block * ROWS + tl.arange(0, ROWS)
        s = (row // batch).to(tl.int64)
        b = (row % batch).to(tl.int64)
        column = tl.arange(0, DP)
        inside = (row < rows * batch)[:, None] & (column < D)[None, :]
        if kind == 0:
            at = q + (head * q_h + s[:, None] * q_s + b[:, None] * q_b) * VEC
        elif kind == 1:
            at = k + (head * k_h + s[:, None] * k_s + b[:, None] * k_b) * VEC
        else:
            at = v + (head * v_h + s[:, None] * v_s + b[:, None] * v_b) * VEC
        value = tl.load(at + column[None, :], mask=inside)
        base = tl.multiple_of(tl.load(addresses + peer).to(q.dtype), 16)
        first = tl.load(spans + rank * _SPAN).to(tl.int64) * batch
        there = base + ((first + row)[:, None] * slots + j) * D + column[None, :]
        tl.store(there, value, mask=inside)


@triton.jit
def pieces(
    alive,  # [R]
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """A block of rows of a head is moved in three pieces: both members of its HALF rotated pairs,
    and the columns behind them. Their columns, and the masks of pairs and of the rest in rows
    `alive`. INTERLEAVED: members of a pair are neighbours, else HALF columns apart."""
    pair = tl.arange(0, HALF_P)
    if INTERLEAVED:
        one, two = 2 * pair, 2 * pair + 1
    else:
        one, two = pair, pair + HALF
    rest = 2 * HALF + tl.arange(0, REST_P)
    live = alive[:, None] & (pair < HALF)[None, :]
    kept = alive[:, None] & (rest < D)[None, :]
    return one, two, rest, live, kept


@triton.jit
def load_head(base, parts, D: tl.constexpr, HALF: tl.constexpr):
    """The pieces at `base`, pointers [R, 1] to the rows, or one pointer if R is 1. A piece without
    columns is zeros."""
    one, two, rest, live, kept = parts
    if HALF > 0:
        a = tl.load(base + one[None, :], mask=live, other=0.0)
        b = tl.load(base + two[None, :], mask=live, other=0.0)
    else:
        a = tl.zeros(live.shape, base.dtype.element_ty)
        b = a
    if 2 * HALF < D:
        r = tl.load(base + rest[None, :], mask=kept, other=0.0)
    else:
        r = tl.zeros(kept.shape, base.dtype.element_ty)
    return a, b, r


@triton.jit
def store_head(base, head, parts, D: tl.constexpr, HALF: tl.constexpr):
    one, two, rest, live, kept = parts
    dtype = base.dtype.element_ty
    if HALF > 0:
        tl.store(base + one[None, :], head[0].to(dtype), mask=live)
        tl.store(base + two[None, :], head[1].to(dtype), mask=live)
    if 2 * HALF < D:
        tl.store(base + rest[None, :], head[2].to(dtype), mask=kept)


@triton.jit
def as_type(head, dtype: tl.constexpr):
    return head[0].to(dtype), head[1].to(dtype), head[2].to(dtype)


@triton.jit
def dot(x, y, WIDE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """The dot product of each row of two heads. [R]"""
    total = tl.zeros((x[0].shape[0],), WIDE)
    if HALF > 0:
        total += tl.sum(x[0] * y[0], 1) + tl.sum(x[1] * y[1], 1)
    if 2 * HALF < D:
        total += tl.sum(x[2] * y[2], 1)
    return total


@triton.jit
def turned(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit(do_not_specialize=["batch", "total"])
def arrive_heads_kernel(
    received,  # [S B, SLOTS, D], rows by source rank
    target,  # where ``table`` says
    raw,  # the same before norm and rotation (NORM)
    table,  # int32 [SLOTS, 4]: kind, before, slot, slots of the target
    spans,
    q_weight,  # [D] (NORM)
    k_weight,
    cos,  # [S, HALF], WIDE (HALF > 0)
    sin, batch,
    total,  # S * B
    EPS: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of all ranks in the order of positions; queries and keys RMS-normalised (NORM) and
    rotated (HALF > 0). Grid (blocks of a rank's rows * W * cdiv(SLOTS, HEADS),): a program takes
    HEADS slots of ROWS rows that one rank sent."""
    # Rows that ``source`` sent, and the positions they belong to.
    pid = tl.program_id(0)
    parts: tl.constexpr = (SLOTS + HEADS - 1) // HEADS
    part = pid % parts
    source = pid // parts % W
    row = pid // (parts * W) * ROWS + tl.arange(0, ROWS)
    first = tl.load(spans + source * _SPAN).to(tl.int64) * batch
    alive = row < tl.load(spans + source * _SPAN + 1) * batch
    position = _position(spans, source, row // batch)
    line = (position * batch + row % batch).to(tl.int64)
    arrived = first + row
    parts = pieces(alive, D, HALF, HALF_P, REST_P, INTERLEAVED)
    one_row = pieces(tl.full((1,), 1, tl.int1), D, HALF, HALF_P, REST_P, INTERLEAVED)
    if HALF > 0:
        angle = position.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF_P)[None, :]
        c = tl.load(cos + angle, mask=parts[3], other=0.0)
        s = tl.load(sin + angle, mask=parts[3], other=0.0)
    for i in tl.static_range(HEADS):
        j = part * HEADS + i
        if j < SLOTS:
            kind = tl.load(table + j * 4)
            before = tl.load(table + j * 4 + 1).to(tl.int64)
            slot = tl.load(table + j * 4 + 2)
            slots = tl.load(table + j * 4 + 3)
            head = load_head(received + (arrived * SLOTS + j)[:, None] * D, parts, D, HALF)
            to = (before * total + line * slots + slot)[:, None] * D
            if NORM:
                store_head(raw + to, head, parts, D, HALF)
            # Queries and keys: RMS norm over the whole head, then rotation; values as they are.
            if kind < 2:
                x, y, z = as_type(head, WIDE)
                if NORM:
                    scale = tl.rsqrt(dot((x, y, z), (x, y, z), WIDE, D, HALF) / D + EPS)[:, None]
                    weight = q_weight if kind == 0 else k_weight
                    of_x, of_y, of_z = as_type(load_head(weight, one_row, D, HALF), WIDE)
                    x, y, z = x * scale * of_x, y * scale * of_y, z * scale * of_z
                if HALF > 0:
                    x, y = turned(x, y, c, s)
                store_head(target + to, (x, y, z), parts, D, HALF)
            else:
                store_head(target + to, head, parts, D, HALF)


@triton.jit
def _unnormalized(grad, raw, weight, mean, scale):
    """Gradient of the RMS norm's input; ``mean`` is that of weight * grad * unit over D."""
    return (weight * grad - raw * scale * mean) * scale


@triton.jit(do_not_specialize=["rows", "batch", "groups", *_STRIDES])
def pack_heads_kernel(
    # [S, B groups, heads, D], the last dimension contiguous; key/value heads may count as batch
    # entries (groups)
    dq,
    dk, dv,
    target,  # [S B, SLOTS, D]
    raw,  # [S B, SLOTS, D], queries and keys before their norm (NORM)
    partial,  # WIDE [blocks, SLOTS, D]: each program's share of the norm weights' gradients (NORM)
    table,  # int32 [SLOTS, 3]: kind, group, head in dq, dk or dv
    q_weight,  # [D] (NORM)
    k_weight,
    cos,  # [S, HALF] (HALF > 0)
    sin,
    rows,  # S * B
    batch, groups,
    q_s,  # strides of position, batch entry and head, in units of VEC elements
    q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    EPS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, REST_P: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and values side by side; those of queries and keys are rotated
    back and go back through the norm. Grid (blocks * SLOTS,)."""
    pid = tl.program_id(0)
    j = pid % SLOTS
    block = pid // SLOTS
    row = block * ROWS + tl.arange(0, ROWS)
    alive = row < rows
    position = (row // batch).to(tl.int64)
    kind = tl.load(table + j * 3)
    group = tl.load(table + j * 3 + 1)
    head = tl.load(table + j * 3 + 2).to(tl.int64)
    entry = (row % batch * groups + group).to(tl.int64)
    if kind == 0:
        read = dq + (head * q_h + position[:, None] * q_s + entry[:, None] * q_b) * VEC
    elif kind == 1:
        read = dk + (head * k_h + position[:, None] * k_s + entry[:, None] * k_b) * VEC
    else:
        read = dv + (head * v_h + position[:, None] * v_s + entry[:, None] * v_b) * VEC
    at = (row.to(tl.int64) * SLOTS + j)[:, None] * D
    parts = pieces(alive, D, HALF, HALF_P, REST_P, INTERLEAVED)
    head = load_head(read, parts, D, HALF)
    if kind < 2:
        x, y, z = as_type(head, WIDE)
        if HALF > 0:
            angle = position[:, None] * HALF + tl.arange(0, HALF_P)[None, :]
            c = tl.load(cos + angle, mask=parts[3], other=0.0)
            s = tl.load(sin + angle, mask=parts[3], other=0.0)
            x, y = turned(x, y, c, -s)
        # Back through the norm: its scale and the mean product from the raw head. This program's
        # share of the weight's gradient has a row of its own; the host adds the shares.
        if NORM:
            weight = q_weight if kind == 0 else k_weight
            raw_head = as_type(load_head(raw + at, parts, D, HALF), WIDE)
            raw_x, raw_y, raw_z = raw_head
            one_row = pieces(tl.full((1,), 1, tl.int1), D, HALF, HALF_P, REST_P, INTERLEAVED)
            of_x, of_y, of_z = as_type(load_head(weight, one_row, D, HALF), WIDE)
            square = dot(raw_head, raw_head, WIDE, D, HALF)
            product = dot((of_x * x, of_y * y, of_z * z), raw_head, WIDE, D, HALF)
            scale = tl.where(alive, tl.rsqrt(square / D + EPS), 0.0)[:, None]
            mean = product[:, None] * scale / D
            share_x = tl.sum(x * raw_x * scale, 0)[None, :]
            share_y = tl.sum(y * raw_y * scale, 0)[None, :]
            share_z = tl.sum(z * raw_z * scale, 0)[None, :]
            share = partial + (block * SLOTS + j).to(tl.int64) * D
            store_head(share, (share_x, share_y, share_z), one_row, D, HALF)
            x = _unnormalized(x, raw_x, of_x, mean, scale)
            y = _unnormalized(y, raw_y, of_y, mean, scale)
            z = _unnormalized(z, raw_z, of_z, mean, scale)
        store_head(target + at, (x, y, z), parts, D, HALF)
    else:
        store_head(target + at, head, parts, D, HALF)


@triton.jit(do_not_specialize=["rank", "batch", "slots"])
def push_rows_kernel(
    buffer,  # [S B, slots, D], this rank's heads at every position
    # int64 [W]: every rank's receive buffer [W, its rows, SLOTS, D]; source r writes [rows, its
    # slots, D] at entry r
    addresses,
    spans, rank, batch, slots,
    W: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write every other rank its rows of this rank's heads. Grid (blocks of a rank's rows * (W - 1)
    * slots,)."""
    # Entry ``rank`` of a peer's receive buffer belongs to this rank alone. The own rows stay here.
    pid = tl.program_id(0)
    j = pid % slots
    peer = (rank + 1 + pid // slots % (W - 1)) % W
    row = pid // (slots * (W - 1)) * ROWS + tl.arange(0, ROWS)
    count = tl.load(spans + peer * _SPAN + 1).to(tl.int64) * batch
    column = tl.arange(0, DP)
    inside = (row < count)[:, None] & (column < D)[None, :]
    line = (_position(spans, peer, row // batch) * batch + row % batch).to(tl.int64)
    value = tl.load(buffer + (line * slots + j)[:, None] * D + column[None, :], mask=inside)
    base = tl.multiple_of(tl.load(addresses + peer).to(buffer.dtype), 16)
    there = base + (rank * count * SLOTS + row * slots + j)[:, None] * D + column[None, :]
    tl.store(there, value, mask=inside)


@triton.jit(do_not_specialize=["rank", "rows", "batch", "heads"])
def arrive_rows_kernel(
    received,  # [W, s B, SLOTS, D]; entry r holds [s B, slots of r, D]
    own,  # [S B, slots of this rank, D]: this rank's heads, never sent
    target,  # where ``table`` says
    # int32 [heads, 3 + K]: before, slot, slots of the target; then the sources' r * SLOTS + j, -1
    # none
    table,
    slots_of,  # int32 [W]
    spans, rank,
    rows,  # s * B
    batch, heads,
    SLOTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Heads of all ranks side by side; a head that several ranks hold is their sum. Grid (blocks of
    rows * heads,)."""
    pid = tl.program_id(0)
    head = pid % heads
    row = pid // heads * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    entry = table + head * (3 + K)
    before = tl.load(entry).to(tl.int64)
    slot = tl.load(entry + 1)
    slots = tl.load(entry + 2)
    line = (_position(spans, rank, row // batch) * batch + row % batch).to(tl.int64)
    # The first source's piece, then those of further ranks that hold the head, in rank order.
    for i in tl.static_range(K):
        code = tl.load(entry + 3 + i)
        if i == 0 or code >= 0:
            source = code // SLOTS
            j = code % SLOTS
            held = tl.load(slots_of + source)
            if source == rank:
                at = own + (line * held + j)[:, None] * D
            else:
                at = received + (source.to(tl.int64) * rows * SLOTS + row * held + j)[:, None] * D
            piece = tl.load(at + column[None, :], mask=inside)
            if i == 0:
                value = piece if K == 1 else piece.to(WIDE)
            else:
                value += piece.to(WIDE)
    to = target + (before * rows + row.to(tl.int64) * slots + slot)[:, None] * D + column[None, :]
    tl.store(to, value.to(target.dtype.element_ty), mask=inside)


push_heads = Launcher(push_heads_kernel, 4)
arrive_heads = Launcher(arrive_heads_kernel, 4)
pack_heads = Launcher(pack_heads_kernel, 4)
push_rows = Launcher(push_rows_kernel, 4)
arrive_rows = Launcher(arrive_rows_kernel, 4)
