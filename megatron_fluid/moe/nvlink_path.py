"""The steps of the NVLink data path, one function a step, each on its caller's current stream (but send_staged).

    publish -> make_plan -> push -> scatter -> (experts) -> reduce_push -> reduce

Dispatch can go in blocks of experts (push and scatter take a block: a token is sent with the first block that needs
it) and combine in pieces of columns (reduce_push and reduce take a piece), so that one piece moves beside the GEMM of
another. `meet` is then the barrier between producer and consumer; without pieces the consumer meets by itself. Or
reduce_push stages its sums, and copy engines send them beside what follows (send_staged).
stream_push and stream_scatter do the same in chunks of tokens, at the same time, and stream_combine does what reduce_push and
reduce do.

Every step is a launch on one rank. A real rank runs them in order; a test runs each step for all ranks of a
SimulatedWorkspace in turn. The backward is the same four moving steps with the saved `RoutingHandle`: it never plans
again.

Why no buffer is overwritten too early, with one stream order on every rank: a rank writes a peer's landing rows only
after a combine in which that peer took part, so after the peer's scatter and after the copies of what it staged in them;
and its inbox only after a dispatch in which the peer took part, so after the peer's last reduce. Two moves of the same
kind in a row (two pushes without a reduce between) would break this.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, H hidden, N expert rows
of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import FlagRegion
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.grouped_gemm import Owners
from megatron_fluid.kernels.launch import Launch
from megatron_fluid.kernels.move_tokens import (
    combine_kernel,
    meet_kernel,
    push_kernel,
    reduce_kernel,
    reduce_push_kernel,
    scatter_kernel,
)
from megatron_fluid.kernels.routing_plan import plan_kernel, publish_kernel
from megatron_fluid.kernels.sent_rows import begin_combine_kernel, send_rows_kernel, sum_choices_kernel
from megatron_fluid.moe.nvlink_domain import PLAN_TOKENS, NvlinkDomain, RoutingHandle, power_of_two

_COMBINE_PUSHERS = 64  # programs of a streamed combine that push, at most
# A streamed dispatch needs room for one program that pushes on an SM full of programs that wait for it, whatever the shape:
# 3 of 128 threads and one of 512 within the 65536 registers of an SM.
_WAITING_PROGRAMS, _WAITING_REGISTERS, _PUSHING_REGISTERS = 3, 72, 64

__all__ = [
    "aligned",
    "begin_combine",
    "make_plan",
    "meet",
    "owners",
    "publish",
    "push",
    "reduce",
    "reduce_push",
    "row_pieces",
    "scatter",
    "send_rows",
    "send_staged",
    "settle",
    "stream_combine",
    "stream_push",
    "stream_scatter",
    "sum_choices",
]


def row_pieces(width: int, most: int) -> dict[str, int]:
    """BLOCK and UNROLL for rows of `width`: columns that one warp moves by one access of 16 bytes a lane (of bf16), and
    how many of those it has in flight, at most `most`. The largest number that divides a row into equal steps.
    """
    block = min(256, power_of_two(width))
    steps = -(-width // block)
    return {"BLOCK": block, "UNROLL": max(n for n in range(1, most + 1) if steps % n == 0)}


def aligned(x: Tensor) -> Tensor:
    """x itself, or a copy that is contiguous and begins on a 16-byte boundary, as prepared launches take it for granted."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def publish(domain: NvlinkDomain, ids: Tensor, probs: Tensor, capacity: int | None = None) -> RoutingHandle:
    """Send ids [T, K] and probs fp32 [T, K] to every rank; the handle's tables are filled by make_plan."""
    device, top_k = domain.workspace.device, domain.top_k
    blocks = len(domain.expert_blocks)
    size = domain.most_rows if capacity is None else capacity
    ids, probs = aligned(ids), aligned(probs)
    destinations = torch.empty(blocks, domain.max_tokens, dtype=torch.int32, device=device)

    def make() -> Launch:
        constants = {
            "K": top_k,
            "KP": power_of_two(top_k),
            "W": domain.ranks,
            "EL": domain.local_experts,
            "ELP": power_of_two(domain.local_experts),
            "BT": PLAN_TOKENS,
            "B": blocks,
        }
        fixed = (
            domain.addresses("ids", torch.int32),
            domain.addresses("probs", torch.float32),
            domain.addresses("counts", torch.int32),
            domain.expert_block,
            domain.plan_flags.counter,
            domain.rank,
            domain.max_tokens,
        )
        return Launch(publish_kernel, 4, constants, fixed)

    launch = domain.launch(("publish", ids.dtype), make)
    launch((domain.plan_blocks, 1), (ids, probs, destinations, ids.shape[0]))
    # The tables of the plan are allocated while that runs.
    offsets = torch.empty(domain.local_experts, dtype=torch.int32, device=device)
    return RoutingHandle(
        num_tokens=ids.shape[0],
        ids=ids,
        destinations=destinations,
        offsets=offsets,
        row_count=offsets[-1:],
        block_offsets=offsets if blocks == 1 else torch.empty_like(offsets),
        row_prob=torch.empty(size, dtype=torch.float32, device=device),
        inverse=torch.empty(domain.ranks * domain.max_tokens, top_k, dtype=torch.int32, device=device),
        origins=torch.empty(size, dtype=torch.int32, device=device),
        capacity=size,
    )


def make_plan(domain: NvlinkDomain, handle: RoutingHandle) -> None:
    """Fill the handle's tables once every rank has published; domain.read_offsets() then waits for the offsets."""

    def make() -> Launch:
        experts = power_of_two(domain.local_experts)
        constants = {
            "K": domain.top_k,
            "KP": power_of_two(domain.top_k),
            "W": domain.ranks,
            "EL": domain.local_experts,
            "ELP": experts,
            "BT": PLAN_TOKENS,
            "RB": max(16, min(power_of_two(domain.ranks * domain.plan_blocks), 4096 // experts)),
            "B": len(domain.expert_blocks),
            "SHIFT": domain.shift,
        }
        fixed = (
            *(domain.host_offsets, domain.overflow, domain.expert_block),
            domain.local("ids", torch.int32),
            domain.local("probs", torch.float32),
            domain.local("counts", torch.int32),
            *(*domain.waiting(domain.plan_flags), domain.max_tokens, domain.plan_blocks),
        )
        return Launch(plan_kernel, 4, constants, fixed)

    launch = domain.launch("plan", make)
    tables = (handle.offsets, handle.block_offsets, handle.row_prob, handle.inverse, handle.origins, handle.capacity)
    launch((domain.ranks * domain.plan_blocks, 1), tables)
    domain.planned()


def _push_launch(
    domain: NvlinkDomain, region: FlagRegion, rows: int, warps: int, advance: bool, chunks: int = 0
) -> Launch:
    block = min(1024, power_of_two(domain.hidden))
    while block > 512 and domain.hidden % block:
        block //= 2
    constants = {"H": domain.hidden, "W": domain.ranks, "BLOCK": block, "ROWS": rows, "ADVANCE": advance}
    fixed = (
        *(domain.addresses("landing", domain.dtype), region.counter, region.addresses),
        *(domain.rank, domain.max_tokens),
    )
    most = _PUSHING_REGISTERS if chunks else None
    return Launch(push_kernel, warps, constants | {"CHUNKS": chunks}, fixed, maxnreg=most)


def push(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, block: int = 0, programs: int | None = None) -> None:
    """Write rows of x [T, H] into the landing rows of the ranks that first need them in expert block `block`.

    With `programs` given, on at most so many SMs. Block 0 comes first. `scatter` follows.
    """
    few = programs is not None

    def make() -> Launch:
        return _push_launch(domain, domain.dispatch_flags, 8 if few else 2, 16 if few else 4, block == 0)

    launch = domain.launch(("push", few, block == 0), make)
    arguments = (x, handle.destinations, handle.num_tokens, block * domain.max_tokens)
    launch((programs or domain.sms * 4, 1), arguments)


def stream_push(
    domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, stream: torch.cuda.Stream | None = None
) -> None:
    """`push` of all tokens in chunks that are announced one by one, on domain.stream_programs SMs: as fast as the wire.
    `stream_scatter` runs beside it.
    """

    def make() -> Launch:
        return _push_launch(domain, domain.stream_flags, 8, 16, False, domain.stream_chunks)

    launch = domain.launch("stream push", make)
    launch((domain.stream_programs, 1), (x, handle.destinations, handle.num_tokens, 0), stream)


def _scatter_launch(domain: NvlinkDomain, warps: int, *, part: bool, meet: bool, chunks: int = 0) -> Launch:
    region = domain.stream_flags if chunks else domain.dispatch_flags
    # Of more experts a token, the rows' numbers take the registers of values in flight.
    most = (8 if domain.top_k <= 16 else 4) * 2 // domain.dtype.itemsize
    constants = {"H": domain.hidden, "W": domain.ranks, **row_pieces(domain.hidden, most), "K": domain.top_k}
    constants |= {"ROWS": warps, "PART": part, "MEET": meet, "CHUNKS": max(chunks, 1)}
    fixed = (domain.local("landing", domain.dtype), *domain.waiting(region), domain.max_tokens)
    constants |= {"PUSHERS": domain.stream_programs if chunks else 0}
    return Launch(scatter_kernel, warps, constants, fixed, maxnreg=_WAITING_REGISTERS if chunks else None)


def scatter(
    domain: NvlinkDomain,
    handle: RoutingHandle,
    x: Tensor,
    out: Tensor,
    block: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """Fill expert rows out [>= N, H] from what landed and from this rank's own x [T, H], once every rank has pushed.

    Without `block` or with block 0, every program waits for the peers. A later block's rows alone are filled after
    its `meet`.
    """
    few, part = programs is not None, block is not None
    first, last = 0, 0
    if block is not None:
        last = domain.block_ends[block]
        first = last - domain.expert_blocks[block]

    def make() -> Launch:
        return _scatter_launch(domain, 16 if few else 4, part=part, meet=not block)

    launch = domain.launch(("scatter", few, part, not block), make)
    launch((programs or domain.sms * 6, 1), (x, handle.inverse, handle.offsets, out, first, last))
    return out


def stream_scatter(
    domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, out: Tensor, programs: int | None = None
) -> Tensor:
    """`scatter` of what stream_push lands, chunk by chunk as it arrives. With `programs` given, on at most so many SMs, and never on those
    that stream_push needs: beside a program of so many threads none of its own has room.
    """
    few = programs is not None
    if programs is not None:
        programs = max(1, min(programs, domain.sms - domain.stream_programs))

    def make() -> Launch:
        return _scatter_launch(domain, 16 if few else 4, part=False, meet=False, chunks=domain.stream_chunks)

    launch = domain.launch(("stream scatter", few), make)
    launch((programs or domain.sms * _WAITING_PROGRAMS, 1), (x, handle.inverse, handle.offsets, out, 0, 0))
    return out


def meet(domain: NvlinkDomain, region: FlagRegion, piece: int) -> None:
    """Wait, with one program, until every rank's stream has come to this meeting: all that was sent before it has
    then arrived.
    """

    def make() -> Launch:
        return Launch(meet_kernel, 1, {"W": domain.ranks}, domain.waiting(region))

    domain.launch(("meet", region.name), make)((1, 1), (piece,))


def settle(domain: NvlinkDomain) -> None:
    """Wait until every rank's stream has come here. Between two dispatches without a combine: only then has everybody
    read what landed.
    """

    def make() -> Launch:
        region = domain.settle_flags
        flags, addresses, counter, errors, abort, rank, operation, timeout_ns = domain.waiting(region)
        fixed = (flags, addresses, counter, errors, abort, rank, operation, 0, timeout_ns)
        return Launch(barrier_kernel, 1, {"W": domain.ranks, "SLOT": 0}, fixed)

    domain.launch("settle", make)((1, 1), ())


def reduce_push(
    domain: NvlinkDomain,
    handle: RoutingHandle,
    y: Tensor,
    row_grad: Tensor | None = None,
    column: int = 0,
    programs: int | None = None,
    staged: bool = False,
) -> None:
    """Sum this rank's experts per token from y [>= N, width], the columns of the rows from `column` on, and send the
    sums to the owners.

    With row_grad fp32 [>= N], also those, unsummed: each (token, k) has one row. Column 0 comes first. `staged`: sums for other
    ranks are laid down in this rank's landing rows, whose tokens have been read by then; `send_staged` follows.
    """
    few, graded, width = programs is not None, row_grad is not None, y.shape[1]

    def make() -> Launch:
        # On few SMs, one program fills an SM with as many loads in flight as its registers hold.
        warps, slots = 16 if few else 4, min(domain.top_k, domain.local_experts)
        constants: dict[str, object] = {"HAS_GRAD": graded, "K": domain.top_k, "SLOTS": slots, "H": domain.hidden}
        constants |= {"WIDTH": width, "ADVANCE": column == 0, "W": domain.ranks, "ROWS": warps, "STAGED": staged}
        fixed = (
            *(domain.addresses("inbox", domain.dtype), domain.addresses("prob grads", torch.float32)),
            *(domain.local("landing", domain.dtype), domain.combine_flags.counter, domain.rank, domain.max_tokens),
        )
        return Launch(reduce_push_kernel, warps, constants | row_pieces(width, 4 if slots > 2 else 8), fixed)

    launch = domain.launch(("reduce push", few, graded, width, column == 0, staged), make)
    grads = handle.row_prob if row_grad is None else row_grad
    # As many programs as the registers of an SM hold at once.
    resident = 3 if min(domain.top_k, domain.local_experts) > 2 else 5
    launch((programs or domain.sms * resident, 1), (y, handle.inverse, grads, column))


def send_staged(domain: NvlinkDomain, width: int) -> None:
    """Copy engines bring the first `width` columns of all staged sums to their owners' inboxes, on the domain's side stream.

    Whole blocks of C rows, so that nothing but sizes needs to be known: rows of tokens that did not come here are copied, too, and not
    read. domain.fork() comes before; `reduce` of all columns follows, after domain.join().
    """
    size = domain.dtype.itemsize
    pitch = domain.hidden * size

    def make() -> list[tuple[int, int]]:
        block, staged = domain.max_tokens * pitch, domain.places("landing")[domain.rank]
        inboxes = domain.places("inbox")
        owners = [(domain.rank + step) % domain.ranks for step in range(1, domain.ranks)]
        return [(inboxes[owner] + domain.rank * block, staged + owner * block) for owner in owners]

    stream = 0 if domain.side is None else domain.side.cuda_stream
    for destination, source in domain.prepared("send staged", make):
        domain.driver.copy_block(destination, source, pitch, width * size, domain.max_tokens, stream)


def reduce(
    domain: NvlinkDomain,
    handle: RoutingHandle,
    out: Tensor | None = None,
    grads: Tensor | None = None,
    column: int = 0,
    width: int | None = None,
    meeting: bool = True,
    programs: int | None = None,
) -> Tensor:
    """Sum what the ranks sent back into out [T, H] and return it; the probabilities' gradient goes into grads fp32
    [T, K] if given.

    `meeting`: every program waits until every rank has sent (as the only piece); else the piece's `meet` came before.
    `out` receives columns [column, column + width) of a result that is made in pieces.
    """
    if out is None:
        out = torch.empty(handle.num_tokens, domain.hidden, dtype=domain.dtype, device=domain.workspace.device)
    columns = domain.hidden if width is None else width
    few, graded = programs is not None, grads is not None

    def make() -> Launch:
        warps = 16 if few else 4
        constants: dict[str, object] = {"HAS_GRAD": graded, "K": domain.top_k, "KP": power_of_two(domain.top_k)}
        constants |= {"H": domain.hidden, "WIDTH": columns, "W": domain.ranks}
        constants |= {"B": len(domain.expert_blocks), "ROWS": warps, **row_pieces(columns, max(1, 16 // domain.ranks))}
        fixed = (
            *(domain.local("inbox", domain.dtype), domain.local("prob grads", torch.float32)),
            *(*domain.waiting(domain.combine_flags), domain.max_tokens, domain.num_experts),
        )
        return Launch(reduce_kernel, warps, constants | {"MEET": meeting}, fixed)

    launch = domain.launch(("reduce", few, graded, columns, meeting, handle.ids.dtype), make)
    filled = handle.row_prob if grads is None else grads
    arguments = (handle.destinations, out, handle.ids, filled, handle.num_tokens, column)
    launch((programs or domain.sms * 5, 1), arguments)
    return out


def begin_combine(domain: NvlinkDomain, handle: RoutingHandle, row_grad: Tensor | None = None) -> None:
    """What a combine of sent rows sends besides them: row_grad fp32 [>= N], if given, and in bounded mode zeros for rows without room. The
    rows follow, by sent_matmul(..., owners(...)) or by send_rows, then sum_choices.
    """
    graded, bounded = row_grad is not None, handle.ends is None

    def make() -> Launch:
        constants = {"HAS_GRAD": graded, "BOUNDED": bounded, "K": domain.top_k, "KP": power_of_two(domain.top_k)}
        constants |= {"H": domain.hidden, "W": domain.ranks, "ROWS": 16, "BLOCK": 32}
        fixed = (
            *(domain.local("inbox", domain.dtype), domain.addresses("inbox", domain.dtype)),
            *(domain.addresses("prob grads", torch.float32), domain.combine_flags.counter, domain.max_tokens),
        )
        return Launch(begin_combine_kernel, 4, constants, fixed)

    launch = domain.launch(("begin combine", graded, bounded), make)
    programs = -(-domain.ranks * domain.max_tokens // 16) if graded or bounded else 1
    launch((programs, 1), (handle.inverse, handle.row_prob if row_grad is None else row_grad))


def owners(domain: NvlinkDomain, handle: RoutingHandle) -> Owners:
    """Where the expert rows of a combine go."""
    return Owners(handle.origins, domain.addresses("inbox", domain.dtype), domain.shift)


def send_rows(domain: NvlinkDomain, handle: RoutingHandle, y: Tensor) -> None:
    """Write the rows of y [>= N, H] into the inboxes of their tokens' ranks."""

    def make() -> Launch:
        constants = {"SHIFT": domain.shift, "H": domain.hidden, "ROWS": 4, **row_pieces(domain.hidden, 8)}
        return Launch(send_rows_kernel, 4, constants, (domain.addresses("inbox", domain.dtype), domain.rank))

    if y.shape[0]:
        domain.launch("send rows", make)((domain.sms * 5, 1), (y, handle.origins, handle.row_count))


def sum_choices(domain: NvlinkDomain, handle: RoutingHandle, out: Tensor, grads: Tensor | None = None) -> Tensor:
    """Sum the rows that were sent back into out [T, H] and return it, once every rank has sent; the probabilities' gradient goes into
    grads fp32 [T, K] if given.
    """
    graded = grads is not None

    def make() -> Launch:
        constants: dict[str, object] = {"HAS_GRAD": graded, "K": domain.top_k, "KP": power_of_two(domain.top_k)}
        constants |= {"H": domain.hidden, "W": domain.ranks, "ROWS": 4}
        fixed = (
            *(domain.local("inbox", domain.dtype), domain.local("prob grads", torch.float32)),
            *(*domain.waiting(domain.combine_flags), domain.num_experts),
        )
        pieces = row_pieces(domain.hidden, max(1, 16 // min(domain.top_k, 8)))
        return Launch(sum_choices_kernel, 4, constants | pieces, fixed)

    launch = domain.launch(("sum choices", graded, handle.ids.dtype), make)
    filled = handle.row_prob if grads is None else grads
    launch((domain.sms * 5, 1), (handle.ids, out, filled, handle.num_tokens))
    return out


def stream_combine(
    domain: NvlinkDomain,
    handle: RoutingHandle,
    y: Tensor,
    row_grad: Tensor | None = None,
    out: Tensor | None = None,
    grads: Tensor | None = None,
    programs: int | None = None,
) -> Tensor:
    """reduce_push and reduce of all columns in one launch, chunk by chunk, on `programs` SMs (at least 2; None: all)."""
    if out is None:
        out = torch.empty(handle.num_tokens, domain.hidden, dtype=domain.dtype, device=domain.workspace.device)
    count = max(2, domain.sms if programs is None else programs)
    # Three fifths push: they read every expert row, the others one row a rank; at most as many as fill the wire.
    pushers = min(_COMBINE_PUSHERS, count - max(1, count * 2 // 5))
    graded = row_grad is not None

    def make() -> Launch:
        slots = min(domain.top_k, domain.local_experts)
        constants: dict[str, object] = {"HAS_GRAD": graded, "K": domain.top_k, "KP": power_of_two(domain.top_k)}
        constants |= {"SLOTS": slots, "H": domain.hidden, "W": domain.ranks, "B": len(domain.expert_blocks)}
        # One program an SM: few warps, and with them registers for as many loads in flight as there are.
        added = row_pieces(domain.hidden, max(1, 32 // domain.ranks))["UNROLL"]
        constants |= {"ROWS": 8, **row_pieces(domain.hidden, 8), "ADDED": added}
        fixed = (
            *(domain.addresses("inbox", domain.dtype), domain.addresses("prob grads", torch.float32)),
            *(domain.local("inbox", domain.dtype), domain.local("prob grads", torch.float32)),
            *(*domain.waiting(domain.chunk_flags), domain.max_tokens, domain.num_experts),
        )
        return Launch(combine_kernel, 8, constants | {"PUSHERS": pushers, "CHUNKS": domain.stream_chunks}, fixed)

    launch = domain.launch(("stream combine", graded, pushers, handle.ids.dtype), make)
    given, filled = (handle.row_prob if t is None else t for t in (row_grad, grads))
    tables = (y, handle.inverse, given, handle.destinations, out, handle.ids, filled, handle.num_tokens)
    launch((count, 1), tables)
    return out
