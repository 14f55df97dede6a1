"""Kernels that move token rows between ranks and between landing order and expert order.

Dispatch is `push_kernel` then `gather_kernel`, combine is `reduce_push_kernel` then `reduce_kernel`. Both can go in
pieces: dispatch by blocks of experts, combine by columns. In the backward the same four run: the gradient of combine
is dispatch and the reverse. A row crosses the wire once per (token, rank), and every sum is taken in fp32 in a fixed
order: a rank's experts by k, then the ranks by number.

The producing kernel advances the region's counter; the consuming kernel's first program signals the peers (everything
before it on the stream is then visible to them) and every program waits for them, so no barrier kernel runs in
between.

Oracles: megatron_fluid.kernels.oracles.dispatch_oracle, reduce_oracle.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, H hidden, N expert rows of this rank.
Rows are of any float type; addresses are int64 [W].
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.flags import advance, signal, wait

__all__ = [
    "advance_kernel",
    "gather_kernel",
    "meet_kernel",
    "push_kernel",
    "reduce_kernel",
    "reduce_push_kernel",
    "scatter_kernel",
]


@triton.jit
def _meet(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, piece, W: tl.constexpr):
    generation = tl.load(counter)
    if tl.program_id(0) == 0:
        for d in tl.static_range(W):
            signal(tl.load(flag_addresses + d) + (piece * W + rank) * 4, generation)
    for s in tl.static_range(W):
        wait(flags + piece * W + s, generation, errors, abort, operation, s, piece, timeout_ns)


@triton.jit(do_not_specialize=["piece"])
def meet_kernel(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, piece, W: tl.constexpr):
    """All ranks have finished what precedes this on their stream: words [piece * W, (piece + 1) * W) of the region.
    Grid (1,).
    """
    _meet(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, piece, W)


@triton.jit
def advance_kernel(counter):
    """Add one to the int32 word `counter`. Grid (1,)."""
    advance(counter)


@triton.jit(do_not_specialize=["T", "skip"])
def push_kernel(
    x,  # [T, H]
    destinations,  # int32 [B, C]: bit d set when the block is the first that needs the token on rank d
    landing_addresses,  # [W * C, H] of every rank
    counter,
    flag_addresses,  # of the region in which chunks are announced (CHUNKS > 0)
    rank,
    T,
    C,
    skip,  # block * C
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADVANCE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write token t into row rank * C + t of each other rank that first needs it in the block.

    This rank's own copy is read from x by the kernel that follows. Any grid: programs stride over tiles of ROWS
    tokens, so the grid bounds the SMs taken. With CHUNKS, tokens go in that many chunks of ceil(C / CHUNKS), and
    after each every program adds 1 to word chunk * W + rank of each other rank's region.
    """
    if ADVANCE and tl.program_id(0) == 0:
        advance(counter)
    if CHUNKS > 0:
        size = tl.cdiv(C, CHUNKS)
        for chunk in tl.static_range(CHUNKS):
            first = chunk * size
            last = tl.minimum(first + size, T)
            _push_tokens(x, destinations + skip, landing_addresses, rank, first, last, C, H, W, ROWS, BLOCK)
            tl.debug_barrier()  # every thread's stores come before the one thread's release
            for d in tl.static_range(W):
                if d != rank:
                    word = (tl.load(flag_addresses + d) + (chunk * W + rank) * 4).to(tl.pointer_type(tl.int32))
                    tl.atomic_add(word, 1, sem="release", scope="sys")
    else:
        _push_tokens(x, destinations + skip, landing_addresses, rank, 0, T, C, H, W, ROWS, BLOCK)


@triton.jit
def _push_tokens(
    x,
    destinations,
    landing_addresses,
    rank,
    first,
    last,
    C,
    H: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = first + tl.program_id(0) * ROWS
    while start < last:
        t = start + tl.arange(0, ROWS)
        bits = tl.load(destinations + t, mask=t < last, other=0)
        bits = bits & ~(1 << rank)
        for h in range(0, H, BLOCK):
            column = h + tl.arange(0, BLOCK)
            inside = column < H
            source = x + t.to(tl.int64)[:, None] * H + column[None, :]
            value = tl.load(source, mask=(bits != 0)[:, None] & inside[None, :])
            for d in tl.static_range(W):
                base = tl.multiple_of(tl.load(landing_addresses + d).to(x.dtype), 16)
                there = base + (rank * C + t).to(tl.int64)[:, None] * H + column[None, :]
                tl.store(there, value, mask=(((bits >> d) & 1) != 0)[:, None] & inside[None, :])
        start += tl.num_programs(0) * ROWS


@triton.jit
def scatter_kernel(
    x,  # [T, H], this rank's own tokens
    landing,  # [W * C, H], this rank's landing rows
    inverse,  # int32 [W * C, K]: row, -1 not here, -2 over capacity
    out,  # [>= N, H]
    flags,
    flag_addresses,
    counter,
    errors,
    abort,
    rank,
    operation,
    timeout_ns,
    C,
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PUSHERS: tl.constexpr,
):
    """Copy each token that came here to the rows of its experts, chunk by chunk as push_kernel announces them. Any
    grid.

    A chunk of rank s is complete when its word has grown by PUSHERS in each dispatch so far.
    """
    expected = tl.load(counter) * PUSHERS
    apart = (landing.to(tl.int64) - x.to(tl.int64)) // (x.dtype.element_ty.primitive_bitwidth // 8)
    size = tl.cdiv(C, CHUNKS)
    tiles = tl.cdiv(size, ROWS)
    programs = tl.num_programs(0)
    for step in range(CHUNKS * W):
        chunk = step // W
        s = (rank + step % W) % W  # own tokens first: they need no wire
        # Tiles are dealt to programs over all steps in turn, so a step with few tiles idles nobody twice in a row.
        tile = (tl.program_id(0) + programs - (step * tiles) % programs) % programs
        if (s != rank) & (tile < tiles):
            wait(flags + chunk * W + s, expected, errors, abort, operation, s, chunk, timeout_ns)
        last = tl.minimum((chunk + 1) * size, C)
        start = chunk * size + tile * ROWS
        while start < last:
            t = start + tl.arange(0, ROWS)
            entry = (s * C + t) * K
            came = tl.full((ROWS,), -1, tl.int32)
            for k in tl.static_range(K):
                came = tl.maximum(came, tl.load(inverse + entry + k, mask=t < last, other=-1))
            if s == rank:
                line = t.to(tl.int64) * H
            else:
                line = (s * C + t).to(tl.int64) * H + tl.multiple_of(apart, 8)  # buffers begin on 16-byte boundaries
            for h in range(0, H, BLOCK):
                column = h + tl.arange(0, BLOCK)
                inside = (column < H)[None, :]
                value = tl.load(x + line[:, None] + column[None, :], mask=(came >= 0)[:, None] & inside)
                for k in tl.static_range(K):
                    row = tl.load(inverse + entry + k, mask=t < last, other=-1)
                    target = out + row.to(tl.int64)[:, None] * H + column[None, :]
                    tl.store(target, value, mask=(row >= 0)[:, None] & inside)
            start += programs * ROWS


@triton.jit
def gather_kernel(
    x,  # [T, H], this rank's own tokens
    landing,  # [W * C, H], this rank's landing rows
    row_entry,  # int32 [>= N]: landing row * K + k
    bounds,  # int32: expert rows [bounds[FIRST], bounds[LAST]), from 0 where FIRST < 0
    out,  # [>= N, H]
    flags,
    flag_addresses,
    counter,
    errors,
    abort,
    rank,
    operation,
    timeout_ns,
    C,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MEET: tl.constexpr,
):
    """Copy landed rows into expert order once every rank has pushed. Any grid."""
    if MEET:
        _meet(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, 0, W)
    start = tl.program_id(0) * ROWS
    if FIRST >= 0:
        start += tl.load(bounds + FIRST)
    n = tl.load(bounds + LAST)
    apart = (landing.to(tl.int64) - x.to(tl.int64)) // (x.dtype.element_ty.primitive_bitwidth // 8)
    while start < n:
        i = start + tl.arange(0, ROWS)
        real = i < n
        place = tl.load(row_entry + i, mask=real, other=0) // K
        own = place // C == rank
        line = tl.where(own, place - rank * C, place).to(tl.int64) * H + tl.where(own, 0, apart)
        line = tl.multiple_of(line, 8)  # both buffers begin on 16-byte boundaries
        target = out + i.to(tl.int64)[:, None] * H
        for h in range(0, H, BLOCK):
            column = h + tl.arange(0, BLOCK)
            mask = real[:, None] & (column < H)[None, :]
            tl.store(target + column[None, :], tl.load(x + line[:, None] + column[None, :], mask=mask), mask=mask)
        start += tl.num_programs(0) * ROWS


@triton.jit
def reduce_push_kernel(
    y,  # [N, WIDTH], columns [COLUMN, COLUMN + WIDTH) of the expert rows
    inverse,  # int32 [W * C, K]: row, -1 not here, -2 over capacity
    inbox_addresses,  # [W, C, H] of every rank: what each rank sent back
    row_grad,  # fp32 [N]: gradient of the probability of each expert row (HAS_GRAD)
    grad_addresses,  # fp32 [C, K] of every rank (HAS_GRAD)
    counter,
    rank,
    C,
    HAS_GRAD: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum this rank's experts for each token it received and write the sum into its owner's inbox[rank]. Any grid."""
    if COLUMN == 0 and tl.program_id(0) == 0:
        advance(counter)
    unit = y.dtype.element_ty.primitive_bitwidth // 8
    own = tl.load(inbox_addresses + rank)
    mine = tl.multiple_of(own.to(y.dtype), 16)
    start = tl.program_id(0) * ROWS
    while start < W * C:
        i = start + tl.arange(0, ROWS)
        real = i < W * C
        owner = (rank + 1 + i % W) % W  # neighbouring rows go to different ranks: every link is busy at once
        t = i // W
        entry = (owner * C + t).to(tl.int64) * K
        came = tl.zeros((ROWS,), tl.int32)
        for k in tl.static_range(K):
            came |= (tl.load(inverse + entry + k, mask=real, other=-1) != -1).to(tl.int32)
        # A token whose rows were all over capacity is sent too: its owner reads zeros then, not what was there before.
        send = came != 0
        apart = (tl.load(inbox_addresses + owner) - own) // unit
        line = tl.multiple_of(apart + (rank * C + t).to(tl.int64) * H, 8)  # buffers begin on 16-byte boundaries
        for h in range(0, WIDTH, BLOCK):
            column = h + tl.arange(0, BLOCK)
            inside = column < WIDTH
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for k in tl.static_range(K):
                row = tl.load(inverse + entry + k, mask=real, other=-1).to(tl.int64)
                source = y + row[:, None] * WIDTH + column[None, :]
                total += tl.load(source, mask=(row >= 0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            target = mine + COLUMN + line[:, None] + column[None, :]
            tl.store(target, total.to(y.dtype.element_ty), mask=send[:, None] & inside[None, :])
        if HAS_GRAD:
            grads = tl.load(grad_addresses + owner).to(row_grad.dtype)
            for k in tl.static_range(K):
                row = tl.load(inverse + entry + k, mask=real, other=-1)
                value = tl.load(row_grad + row, mask=row >= 0, other=0.0)
                tl.store(grads + t.to(tl.int64) * K + k, value, mask=row != -1)
        start += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["T"])
def reduce_kernel(
    inbox,  # [W, C, H]
    destinations,  # int32 [B, C]
    out,  # [T, H]
    ids,  # [T, K] any integer (HAS_GRAD)
    grad_inbox,  # fp32 [C, K] (HAS_GRAD)
    grad_out,  # fp32 [T, K] (HAS_GRAD)
    flags,
    flag_addresses,
    counter,
    errors,
    abort,
    rank,
    operation,
    timeout_ns,
    T,
    C,
    E,
    HAS_GRAD: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MEET: tl.constexpr,
):
    """Add up what the ranks sent back for each token, in rank order; 0 for a token that went nowhere. Any grid.

    Columns [COLUMN, COLUMN + WIDTH) of the rows.
    """
    if MEET:
        _meet(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, 0, W)
    start = tl.program_id(0) * ROWS
    while start < T:
        t = start + tl.arange(0, ROWS)
        real = t < T
        bits = tl.load(destinations + t, mask=real, other=0)
        for b in tl.static_range(1, B):
            bits |= tl.load(destinations + b * C + t, mask=real, other=0)
        for h in range(0, WIDTH, BLOCK):
            column = h + tl.arange(0, BLOCK)
            inside = column < WIDTH
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for d in tl.static_range(W):
                source = inbox + (d * C + t).to(tl.int64)[:, None] * H + COLUMN + column[None, :]
                sent = (((bits >> d) & 1) != 0)[:, None] & inside[None, :]
                total += tl.load(source, mask=sent, other=0.0).to(tl.float32)
            target = out + t.to(tl.int64)[:, None] * H + COLUMN + column[None, :]
            tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
        if HAS_GRAD:
            k = tl.arange(0, KP)
            at = t.to(tl.int64)[:, None] * K + k[None, :]
            room = real[:, None] & (k < K)[None, :]
            chosen = tl.load(ids + at, mask=room, other=-1)
            value = tl.load(grad_inbox + at, mask=room & (chosen >= 0) & (chosen < E), other=0.0)
            tl.store(grad_out + at, value, mask=room)
        start += tl.num_programs(0) * ROWS
