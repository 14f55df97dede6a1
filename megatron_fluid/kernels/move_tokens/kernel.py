"""Kernels that move token rows between ranks and between receive buffers and expert order.

Dispatch is `push_kernel` then `scatter_kernel`, or both at the same time in chunks that are
signalled one by one. Combine is `reduce_push_kernel` (or the kernels of sent_rows.py) then
`reduce_kernel`. The backward runs the same kernels: the gradient of combine is a dispatch and the
reverse. A row crosses the wire once per (token, rank), except where a combine sends rows instead of
sums. Every sum is taken in fp32 in a fixed order: a rank's experts by k, then the ranks by number.

The producing kernel advances the region's counter. The first program of the consuming kernel
signals the peers, which publishes everything before it on the stream, and every program waits for
all peers, so no barrier kernel runs in between. In chunks, the producing kernel signals and the
consuming one counts.

Once a wait of this rank has failed (the abort word), nothing more is sent, and results are NaN: the
tables of a plan that failed are not read, and what has not arrived is not taken for a token.

Reference: dispatch_reference and reduce_reference of tests/support/kernel_references.py.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, H hidden, N expert rows
of this rank. Rows are of any float type; addresses are int64 [W].
"""

# mypy: disable-error-code="assignment, attr-defined, var-annotated"
# Triton's tuples grow in loops that are unrolled, which Python's types cannot express.

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.cuda.triton_launch import power_of_two
from megatron_fluid.kernels.flags import advance, barrier, wait

__all__ = [
    "inside",
    "push_kernel",
    "reduce_kernel",
    "reduce_push_kernel",
    "row_pieces",
    "scatter_kernel",
    "sum_pieces",
]


def row_pieces(width: int, most: int) -> dict[str, int]:
    """BLOCK and UNROLL for rows of `width`: columns that one warp moves by one access of 16 bytes a
    lane (of bf16), and how many of those it has in flight, at most `most`. The largest number that
    divides a row into equal steps.
    """
    block = min(256, power_of_two(width))
    steps = -(-width // block)
    return {"BLOCK": block, "UNROLL": max(n for n in range(1, most + 1) if steps % n == 0)}


@triton.jit(do_not_specialize=["T"])
def push_kernel(
    x,  # [T, H]
    destinations,  # int32 [C]: bit d set when the token goes to rank d
    T,
    receive_addresses,  # [W * C, H] of every rank
    counter,
    flag_addresses,  # of the region in which chunks are announced (CHUNKS > 0)
    abort, rank, C,
    H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write token t into row rank * C + t of each other rank that it goes to.

    scatter_kernel reads this rank's own copy from x. Any grid: programs stride over tiles of ROWS
    tokens, so the grid bounds the SMs in use. With CHUNKS, tokens go in that many chunks of
    ceil(C / CHUNKS), and after each chunk every program adds 1 to word chunk * W + rank of each
    other rank's region.
    """
    sound = tl.load(abort) == 0
    if CHUNKS == 0 and tl.program_id(0) == 0:
        advance(counter)  # the generation that scatter_kernel's barrier waits for
    if CHUNKS > 0:
        # A program's part of a chunk, then its signal: the receiver has the whole chunk once all
        # programs of this grid have added to its word.
        size = tl.cdiv(C, CHUNKS)
        for chunk in tl.static_range(CHUNKS):
            first = chunk * size
            last = tl.minimum(first + size, T)
            last = tl.where(sound, last, first)
            _push_tokens(
                x, destinations, receive_addresses, rank, first, last, C, H, W, ROWS, BLOCK
            )
            tl.debug_barrier()  # all threads' stores precede the one thread's release
            for d in tl.static_range(W):
                if (d != rank) & sound:
                    word = (tl.load(flag_addresses + d) + (chunk * W + rank) * 4).to(
                        tl.pointer_type(tl.int32)
                    )
                    tl.atomic_add(word, 1, sem="release", scope="sys")
    else:
        last = tl.where(sound, T, 0)
        _push_tokens(x, destinations, receive_addresses, rank, 0, last, C, H, W, ROWS, BLOCK)


@triton.jit
def _push_tokens(
    x, destinations, receive_addresses, rank, first, last, C,
    H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = first + tl.program_id(0) * ROWS
    while start < last:
        t = start + tl.arange(0, ROWS)
        bits = tl.load(destinations + t, mask=t < last, other=0)
        bits = bits & ~(1 << rank)  # not to this rank itself
        # One load, then a store to each destination. Row rank * C + t belongs to this rank alone,
        # so no two ranks write the same memory.
        for h in range(0, H, BLOCK):
            column = h + tl.arange(0, BLOCK)
            inside = column < H
            source = x + t.to(tl.int64)[:, None] * H + column[None, :]
            value = tl.load(source, mask=(bits != 0)[:, None] & inside[None, :])
            for d in tl.static_range(W):
                base = tl.multiple_of(tl.load(receive_addresses + d).to(x.dtype), 16)
                there = base + (rank * C + t).to(tl.int64)[:, None] * H + column[None, :]
                tl.store(there, value, mask=(((bits >> d) & 1) != 0)[:, None] & inside[None, :])
        start += tl.num_programs(0) * ROWS


@triton.jit
def scatter_kernel(
    x,  # [T, H], this rank's own tokens
    inverse,  # int32 [W * C, K]: row, -1 not here, -2 over capacity
    count,  # int32 [1]: N
    out,  # [>= N, H]
    received,  # [W * C, H], this rank's receive buffer
    flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, C,
    H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, PUSHERS: tl.constexpr,
):  # fmt: skip
    """Copy each received token to the rows of its experts. Any grid.

    Each received row is read once, whatever the number of its experts. PUSHERS = 0: after all ranks
    have pushed. Else chunk by chunk as push_kernel signals them: a chunk of rank s is complete when
    its word has grown by PUSHERS in each dispatch so far. counter[0] counts finished dispatches;
    the last program to end advances it (counter[1] counts ended programs). One warp copies a row in
    pieces of BLOCK columns, UNROLL of them in flight. A program whose wait fails fills its share of
    all N rows with NaN.
    """
    # Wait for all rows at once (no chunks), or below for each chunk of each source.
    if PUSHERS == 0:
        sound = barrier(
            flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, W
        )
    else:
        sound = tl.load(abort) == 0
    expected = (tl.load(counter) + 1) * PUSHERS
    apart = (received.to(tl.int64) - x.to(tl.int64)) // (x.dtype.element_ty.primitive_bitwidth // 8)
    size = tl.cdiv(C, CHUNKS)
    tiles = tl.cdiv(size, ROWS)
    programs = tl.num_programs(0)
    for step in range(CHUNKS * W):
        chunk = step // W
        s = (rank + step % W) % W  # own tokens first: they need no wire
        # Tiles are dealt to programs round-robin over all steps, so that steps with few tiles do
        # not leave the same programs idle.
        tile = (tl.program_id(0) + programs - (step * tiles) % programs) % programs
        if PUSHERS > 0:  # noqa: SIM102  (decided at compile time)
            if (s != rank) & (tile < tiles):
                sound = sound & wait(
                    flags + chunk * W + s, expected, errors, abort, operation, s, chunk, timeout_ns
                )
        last = tl.where(sound, tl.minimum((chunk + 1) * size, C), 0)
        start = chunk * size + tile * ROWS
        while start < last:
            # The plan says which expert rows want each token of source s; none: not received.
            t = start + tl.arange(0, ROWS)
            entry = (s * C + t) * K
            came = tl.full((ROWS,), False, tl.int1)
            rows = ()
            for k in tl.static_range(K):
                row = tl.load(inverse + entry + k, mask=t < last, other=-1)
                came |= row >= 0
                rows = rows + (row,)
            if s == rank:
                line = t.to(tl.int64) * H
            else:
                # Own rows are in x, others in the receive buffer; one base pointer serves both.
                # Buffers begin on 16-byte boundaries.
                line = (s * C + t).to(tl.int64) * H + tl.multiple_of(apart, 8)
            for h in range(0, H, BLOCK * UNROLL):
                values = ()
                for u in tl.static_range(UNROLL):
                    column = h + u * BLOCK + tl.arange(0, BLOCK)
                    mask = came[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                    values = values + (tl.load(x + line[:, None] + column[None, :], mask=mask),)
                for k in tl.static_range(K):
                    target = out + rows[k].to(tl.int64)[:, None] * H
                    for u in tl.static_range(UNROLL):
                        column = h + u * BLOCK + tl.arange(0, BLOCK)
                        mask = (rows[k] >= 0)[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                        tl.store(target + column[None, :], values[u], mask=mask)
            start += programs * ROWS
    if not sound:
        _mark_rows(out, tl.load(count), H, BLOCK)
    # The last program to end closes the dispatch: no other one reads counter[0] any more.
    if PUSHERS > 0:
        tl.debug_barrier()
        if tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.store(counter + 1, 0)
            advance(counter)


@triton.jit
def _mark_rows(out, count, H: tl.constexpr, BLOCK: tl.constexpr):
    """Fill this program's share of the rows out [count, H] with NaN."""
    row = tl.program_id(0)
    while row < count:
        for h in range(0, H, BLOCK):
            column = h + tl.arange(0, BLOCK)
            nothing = tl.full((BLOCK,), float("nan"), tl.float32).to(out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * H + column, nothing, mask=column < H)
        row += tl.num_programs(0)


@triton.jit
def inside(column, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """column < WIDTH; a compile-time True if STEP divides WIDTH."""
    if WIDTH % STEP == 0:
        return tl.full(column.shape, True, tl.int1)
    else:
        return column < WIDTH


@triton.jit
def sum_pieces(
    y, rows, h, COUNT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """UNROLL sums in fp32, [ROWS, BLOCK] each, of columns h and following of rows y[rows[j]], for j
    from 0 to COUNT - 1 in turn. A row of -1 adds nothing. Four rows are in flight."""
    totals = ()
    for _ in tl.static_range(UNROLL):
        totals = totals + (tl.zeros((ROWS, BLOCK), tl.float32),)
    for first in tl.static_range(0, COUNT, 4):
        values = ()
        for j in tl.static_range(first, min(first + 4, COUNT)):
            source = y + rows[j].to(tl.int64)[:, None] * H
            for u in tl.static_range(UNROLL):
                column = h + u * BLOCK + tl.arange(0, BLOCK)
                mask = (rows[j] >= 0)[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                values = values + (tl.load(source + column[None, :], mask=mask, other=0.0),)
        sums = ()
        for u in tl.static_range(UNROLL):
            total = totals[u]
            for j in tl.static_range(min(4, COUNT - first)):
                total += values[j * UNROLL + u].to(tl.float32)
            sums = sums + (total,)
        totals = sums
    return totals


@triton.jit
def reduce_push_kernel(
    y,  # [N, H]
    inverse,  # int32 [W * C, K]: row, -1 not here, -2 over capacity
    row_grad,  # fp32 [N]: gradient of the probability of each expert row (HAS_GRAD)
    combine_addresses,  # [W, C, H] of every rank: what each rank sent back
    grad_addresses,  # fp32 [C, K] of every rank (HAS_GRAD)
    counter, abort, rank, C,
    HAS_GRAD: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum this rank's experts for each received token and write the sum into its owner's
    combine buffer, at [rank]. Any grid.

    SLOTS is the most rows a token can have here. One warp sums a token: its rows are compacted (in
    the order of k), and four of them in UNROLL pieces of BLOCK columns are in flight before they
    are added.
    """
    if tl.program_id(0) == 0:
        advance(counter)  # the generation that reduce_kernel's barrier waits for
    unit = y.dtype.element_ty.primitive_bitwidth // 8
    own = tl.load(combine_addresses + rank)
    mine = tl.multiple_of(own.to(y.dtype), 16)
    limit = tl.where(tl.load(abort) == 0, W * C, 0)
    start = tl.program_id(0) * ROWS
    while start < limit:
        i = start + tl.arange(0, ROWS)
        real = i < W * C
        # Neighbouring rows go to different ranks, so that every link is busy at once.
        owner = (rank + 1 + i % W) % W
        t = i // W
        entry = (owner * C + t) * K  # a domain has fewer than 2**31 of them
        # A token whose rows are all over capacity is sent, too: its owner would otherwise read what
        # an earlier combine left.
        send = tl.full((ROWS,), False, tl.int1)
        count = tl.zeros((ROWS,), tl.int32)
        found = ()
        for k in tl.static_range(K):
            found = found + (tl.load(inverse + entry + k, mask=real, other=-1),)
        # Gradients of probabilities go to the owner's [C, K]; only the rank with the expert of
        # (token, k) writes that entry.
        if HAS_GRAD:
            grads = tl.load(grad_addresses + owner).to(row_grad.dtype)
            owed = ()
            for k in tl.static_range(K):
                owed = owed + (tl.load(row_grad + found[k], mask=found[k] >= 0, other=0.0),)
            for k in tl.static_range(K):
                tl.store(grads + t.to(tl.int64) * K + k, owed[k], mask=found[k] != -1)
        # Compact: rows[j] is the j-th row of the token here, -1 behind the last.
        rows = ()
        for _ in tl.static_range(SLOTS):
            rows = rows + (tl.full((ROWS,), -1, tl.int32),)
        for k in tl.static_range(K):
            send |= found[k] != -1
            placed = ()
            for j in tl.static_range(SLOTS):
                placed = placed + (tl.where((found[k] >= 0) & (count == j), found[k], rows[j]),)
            rows = placed
            count += (found[k] >= 0).to(tl.int32)
        # Where the owner's buffer lies, in elements from this rank's: one pointer, any owner.
        # Buffers begin on 16-byte boundaries.
        apart = tl.multiple_of((tl.load(combine_addresses + owner) - own) // unit, 8)
        line = apart + (rank * C + t).to(tl.int64) * H
        for h in range(0, H, BLOCK * UNROLL):
            totals = sum_pieces(y, rows, h, SLOTS, H, ROWS, BLOCK, UNROLL)
            for u in tl.static_range(UNROLL):
                column = h + u * BLOCK + tl.arange(0, BLOCK)
                mask = send[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                target = mine + line[:, None] + column[None, :]
                tl.store(target, totals[u].to(y.dtype.element_ty), mask=mask)
        start += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["T"])
def reduce_kernel(
    ids,  # [T, K] any integer
    out,  # [T, H]
    destinations,  # int32 [C]
    grad_out,  # fp32 [T, K] (HAS_GRAD)
    T,
    combined,  # [C, K, H] (BY_CHOICE), or [W, C, H]
    received_grads,  # fp32 [C, K] (HAS_GRAD)
    flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, C, E,
    HAS_GRAD: tl.constexpr, BY_CHOICE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Once every rank has sent, add up in fp32 what came back for each token. Any grid.

    The parts are a row of each choice in the order of k (BY_CHOICE), or a sum of each rank in rank
    order; a token without any gets 0. One warp a token; eight rows in UNROLL pieces of BLOCK
    columns are in flight at a time. A program whose wait fails writes NaN.
    """
    # After this barrier the combine buffer holds all rows that the peers sent in this generation.
    sound = barrier(flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, W)
    nothing = tl.where(sound, 0.0, float("nan"))  # what the sums begin with
    PARTS: tl.constexpr = K if BY_CHOICE else W
    start = tl.program_id(0) * ROWS
    while start < T:
        t = start + tl.arange(0, ROWS)
        real = t < T
        # Which parts exist follows from this rank's own routing: nothing is read from the peers.
        sent = ()
        for part in tl.static_range(PARTS):
            if BY_CHOICE:
                chosen = tl.load(ids + t * K + part, mask=real, other=-1)
                sent = sent + ((chosen >= 0) & (chosen < E),)
            else:
                sent = sent + (((tl.load(destinations + t, mask=real, other=0) >> part) & 1) != 0,)
        line = t.to(tl.int64) * H
        for h in range(0, H, BLOCK * UNROLL):
            totals = ()
            for _ in tl.static_range(UNROLL):
                totals = totals + (tl.zeros((ROWS, BLOCK), tl.float32) + nothing,)
            for first in tl.static_range(0, PARTS, 8):
                values = ()
                for part in tl.static_range(first, min(first + 8, PARTS)):
                    if BY_CHOICE:
                        source = combined + part * H + line[:, None] * K
                    else:
                        source = combined + tl.cast(part * C, tl.int64) * H + line[:, None]
                    for u in tl.static_range(UNROLL):
                        column = h + u * BLOCK + tl.arange(0, BLOCK)
                        mask = sent[part][:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                        values = values + (tl.load(source + column[None, :], mask=mask, other=0.0),)
                sums = ()
                for u in tl.static_range(UNROLL):
                    total = totals[u]
                    for j in tl.static_range(min(8, PARTS - first)):
                        total += values[j * UNROLL + u].to(tl.float32)
                    sums = sums + (total,)
                totals = sums
            for u in tl.static_range(UNROLL):
                column = h + u * BLOCK + tl.arange(0, BLOCK)
                mask = real[:, None] & inside(column, H, BLOCK * UNROLL)[None, :]
                tl.store(
                    out + line[:, None] + column[None, :],
                    totals[u].to(out.dtype.element_ty),
                    mask=mask,
                )
        if HAS_GRAD:
            _return_grads(ids, received_grads, grad_out, t, real, nothing, E, K, KP)
        start += tl.num_programs(0) * ROWS


@triton.jit
def _return_grads(
    ids, received_grads, grad_out, t, real, nothing, E, K: tl.constexpr, KP: tl.constexpr
):
    """The gradients of the probabilities of tokens t that were sent back; 0 where nothing was
    chosen, or `nothing` (NaN) where a wait has failed."""
    k = tl.arange(0, KP)
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    room = real[:, None] & (k < K)[None, :]
    chosen = tl.load(ids + at, mask=room, other=-1)
    value = tl.load(received_grads + at, mask=room & (chosen >= 0) & (chosen < E), other=0.0)
    tl.store(grad_out + at, tl.where(nothing == 0.0, value, nothing), mask=room)
