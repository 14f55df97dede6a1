"""The steps of the NVLink data path, one function a step.

    publish -> make_plan -> push -> scatter -> (experts) -> reduce_push -> reduce
                                                         -> begin_combine -> sent_matmul -> reduce

stream_push and stream_scatter do what push and scatter do in chunks of tokens, at the same time.
Combine sums a rank's experts first, in a pass of its own, or the GEMM sends every row as it makes
it (sent_matmul, or send_rows after any other GEMM).

Every step is a launch on one rank, on its caller's current stream if none is given. A real rank
runs them in order; a test runs each step for all ranks of a SimulatedWorkspace in turn. The
backward is the same moving steps with the saved `RoutingHandle`: it never plans again.

Why no buffer is overwritten too early, with one stream order on every rank: a rank writes a peer's
receive buffer only after a combine in which that peer took part, so after the peer's scatter; and
its combine buffer only after a dispatch in which the peer took part, so after the peer's last sums.
Two moves of the same kind in a row need a `barrier` between them: `take_turn` sees to it.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, H
hidden, N expert rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, aligned, power_of_two
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.grouped_gemm.launch import Owners
from megatron_fluid.kernels.move_tokens.kernel import (
    push_kernel,
    reduce_kernel,
    reduce_push_kernel,
    row_pieces,
    scatter_kernel,
)
from megatron_fluid.kernels.move_tokens.sent_rows import begin_combine_kernel, send_rows_kernel
from megatron_fluid.kernels.routing_plan.kernel import plan_kernel, publish_kernel
from megatron_fluid.moe.nvlink.buffers import PLAN_TOKENS, NvlinkBuffers, RoutingHandle

# A streamed dispatch needs room for one program that pushes on an SM full of programs that wait for
# it, whatever the shape: 3 of 128 threads and one of 512 within the 65536 registers of an SM.
_WAITING_PROGRAMS, _WAITING_REGISTERS, _PUSHING_REGISTERS = 3, 72, 64

__all__ = [
    "barrier",
    "begin_combine",
    "make_plan",
    "owners",
    "publish",
    "push",
    "reduce",
    "reduce_push",
    "scatter",
    "send_rows",
    "stream_push",
    "stream_scatter",
    "take_turn",
]


def _plan_constants(buffers: NvlinkBuffers) -> dict[str, int]:
    top_k, experts = buffers.top_k, buffers.local_experts
    constants = {"K": top_k, "KP": power_of_two(top_k), "W": buffers.ranks, "EL": experts}
    return constants | {"ELP": power_of_two(experts), "BT": PLAN_TOKENS}


def publish(
    buffers: NvlinkBuffers, ids: Tensor, probs: Tensor, capacity: int | None = None
) -> RoutingHandle:
    """Send ids [T, K] and probs fp32 [T, K] to every rank; the handle's tables are filled by
    make_plan. Of more tokens than the buffers hold, only their number is sent."""
    device, top_k = buffers.workspace.device, buffers.top_k
    wanted = ids.shape[0]
    tokens = wanted if wanted <= buffers.max_tokens else 0
    size = buffers.most_rows if capacity is None else capacity
    ids, probs = aligned(ids), aligned(probs)
    destinations = torch.empty(buffers.max_tokens, dtype=torch.int32, device=device)

    def make() -> Launch:
        fixed = (
            buffers.addresses("ids", torch.int32),
            buffers.addresses("probs", torch.float32),
            buffers.addresses("counts", torch.int32),
            buffers.addresses("wanted", torch.int32),
            *(buffers.plan_flags.counter, buffers.abort, buffers.rank, buffers.max_tokens),
        )
        return Launch(publish_kernel, 4, _plan_constants(buffers), fixed)

    launch = buffers.launch(("publish", ids.dtype), make)
    launch((buffers.plan_blocks, 1), (ids, probs, destinations, tokens, wanted))
    # The tables of the plan are allocated while that runs.
    offsets = torch.empty(buffers.local_experts, dtype=torch.int32, device=device)
    return RoutingHandle(
        num_tokens=tokens,
        ids=ids,
        destinations=destinations,
        offsets=offsets,
        row_count=offsets[-1:],
        row_prob=torch.empty(size, dtype=torch.float32, device=device),
        inverse=torch.empty(
            buffers.ranks * buffers.max_tokens, top_k, dtype=torch.int32, device=device
        ),
        origins=torch.empty(size, dtype=torch.int32, device=device),
        capacity=size,
    )


def make_plan(buffers: NvlinkBuffers, handle: RoutingHandle) -> None:
    """Fill the handle's tables once every rank has published; buffers.read_offsets() then waits for
    the offsets."""

    def make() -> Launch:
        constants = _plan_constants(buffers)
        blocks = power_of_two(buffers.ranks * buffers.plan_blocks)
        constants["RB"] = max(16, min(blocks, 4096 // constants["ELP"]))
        constants["SHIFT"] = buffers.shift
        fixed = (
            *(buffers.told, buffers.overflow),
            buffers.local("ids", torch.int32),
            buffers.local("probs", torch.float32),
            buffers.local("counts", torch.int32),
            buffers.local("wanted", torch.int32),
            *(*buffers.waiting(buffers.plan_flags), buffers.max_tokens, buffers.plan_blocks),
        )
        return Launch(plan_kernel, 4, constants, fixed)

    launch = buffers.launch("plan", make)
    tables = (handle.offsets, handle.row_prob, handle.inverse, handle.origins, handle.capacity)
    launch((buffers.ranks * buffers.plan_blocks, 1), tables)
    buffers.planned()


def _push_launch(
    buffers: NvlinkBuffers, width: int, rows: int, warps: int, chunks: int = 0
) -> Launch:
    assert width <= buffers.hidden, "wider rows than the receive buffers have room for"
    region = buffers.stream_flags if chunks else buffers.dispatch_flags
    block = min(1024, power_of_two(width))
    while block > 512 and width % block:
        block //= 2
    constants = {"H": width, "W": buffers.ranks, "BLOCK": block, "ROWS": rows}
    fixed = (
        *(buffers.addresses("receive", buffers.dtype), region.counter, region.addresses),
        *(buffers.abort, buffers.rank, buffers.max_tokens),
    )
    registers = _PUSHING_REGISTERS if chunks else None
    return Launch(push_kernel, warps, constants | {"CHUNKS": chunks}, fixed, maxnreg=registers)


def push(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor) -> None:
    """Write rows of x [T, H or less] into the receive buffers of the ranks that need them, one
    behind the other whatever their width. `scatter` follows, on all ranks of rows as wide."""
    width = x.shape[1]
    launch = buffers.launch(("push", width), lambda: _push_launch(buffers, width, 2, 4))
    launch((buffers.sms * 4, 1), (x, handle.destinations, handle.num_tokens))


def stream_push(
    buffers: NvlinkBuffers,
    handle: RoutingHandle,
    x: Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """`push` of all tokens in chunks that are announced one by one, on buffers.stream_programs SMs:
    as fast as the wire. `stream_scatter` runs at the same time.
    """
    width = x.shape[1]
    launch = buffers.launch(
        ("stream push", width), lambda: _push_launch(buffers, width, 8, 16, buffers.stream_chunks)
    )
    arguments = (x, handle.destinations, handle.num_tokens)
    launch((buffers.stream_programs, 1), arguments, stream)


def _scatter_launch(buffers: NvlinkBuffers, width: int, warps: int, chunks: int = 0) -> Launch:
    region = buffers.stream_flags if chunks else buffers.dispatch_flags
    # Of more experts a token, the rows' numbers take the registers of values in flight.
    most = (8 if buffers.top_k <= 16 else 4) * 2 // buffers.dtype.itemsize
    constants = {"H": width, "W": buffers.ranks} | row_pieces(width, most)
    constants |= {"K": buffers.top_k, "ROWS": warps, "CHUNKS": max(chunks, 1)}
    constants |= {"PUSHERS": buffers.stream_programs if chunks else 0}
    fixed = (buffers.local("receive", buffers.dtype), *buffers.waiting(region), buffers.max_tokens)
    registers = _WAITING_REGISTERS if chunks else None
    return Launch(scatter_kernel, warps, constants, fixed, maxnreg=registers)


def scatter(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, out: Tensor) -> Tensor:
    """Fill expert rows `out` from the receive buffer and from this rank's own x, once every rank
    has pushed: [>= N, H or less] and [T, H or less], as wide as what was pushed."""
    width = x.shape[1]
    launch = buffers.launch(("scatter", width), lambda: _scatter_launch(buffers, width, 4))
    launch((buffers.sms * 6, 1), (x, handle.inverse, handle.row_count, out))
    return out


def stream_scatter(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, out: Tensor) -> Tensor:
    """`scatter` of what stream_push sends, chunk by chunk as it arrives."""
    width = x.shape[1]
    launch = buffers.launch(
        ("stream scatter", width), lambda: _scatter_launch(buffers, width, 4, buffers.stream_chunks)
    )
    launch((buffers.sms * _WAITING_PROGRAMS, 1), (x, handle.inverse, handle.row_count, out))
    return out


def barrier(buffers: NvlinkBuffers) -> None:
    """Block each rank's stream until all ranks reach this point. Required between two dispatches
    with no combine in between: a dispatch overwrites the receive buffers, so every rank must have
    read its own first.
    """

    def make() -> Launch:
        flags, addresses, counter, errors, abort, rank, operation, timeout_ns = buffers.waiting(
            buffers.barrier_flags
        )
        fixed = (flags, addresses, counter, errors, abort, rank, operation, 0, timeout_ns)
        constants = {"W": buffers.ranks, "SLOT": 0, "MARK": False}
        return Launch(barrier_kernel, 1, constants, (0, 0, *fixed))

    buffers.launch("barrier", make)((1, 1), ())


def reduce_push(
    buffers: NvlinkBuffers, handle: RoutingHandle, y: Tensor, row_grad: Tensor | None = None
) -> None:
    """Sum this rank's experts per token from y [>= N, H] and send the sums to the owners.

    With row_grad fp32 [>= N], also those, unsummed: each (token, k) has one row.
    """
    graded = row_grad is not None
    slots = min(buffers.top_k, buffers.local_experts)

    def make() -> Launch:
        constants: dict[str, object] = {"HAS_GRAD": graded, "K": buffers.top_k, "SLOTS": slots}
        constants |= {"H": buffers.hidden, "W": buffers.ranks, "ROWS": 4}
        constants |= row_pieces(buffers.hidden, 4 if slots > 2 else 8)
        fixed = (
            buffers.addresses("combine", buffers.dtype),
            buffers.addresses("prob grads", torch.float32),
            *(buffers.combine_flags.counter, buffers.abort, buffers.rank, buffers.max_tokens),
        )
        return Launch(reduce_push_kernel, 4, constants, fixed)

    launch = buffers.launch(("reduce push", graded), make)
    grads = handle.row_prob if row_grad is None else row_grad
    resident = 3 if slots > 2 else 5  # as many programs as the registers of an SM hold at once
    launch((buffers.sms * resident, 1), (y, handle.inverse, grads))


def reduce(
    buffers: NvlinkBuffers,
    handle: RoutingHandle,
    out: Tensor | None = None,
    grads: Tensor | None = None,
) -> Tensor:
    """Sum what the ranks sent back into out [T, H] and return it, once every rank has sent; the
    probabilities' gradient goes into grads fp32 [T, K] if given. What was sent are rows or sums, as
    the schedule says.
    """
    if out is None:
        size = (handle.num_tokens, buffers.hidden)
        out = torch.empty(size, dtype=buffers.dtype, device=buffers.workspace.device)
    graded, by_choice = grads is not None, buffers.schedule.sent_rows

    def make() -> Launch:
        top_k, ranks = buffers.top_k, buffers.ranks
        in_flight = 16 // (min(top_k, 8) if by_choice else ranks)  # accesses
        constants: dict[str, object] = {"HAS_GRAD": graded, "BY_CHOICE": by_choice, "K": top_k}
        constants |= {"KP": power_of_two(top_k), "H": buffers.hidden, "W": ranks, "ROWS": 4}
        constants |= row_pieces(buffers.hidden, max(1, in_flight))
        fixed = (
            buffers.local("combine", buffers.dtype),
            buffers.local("prob grads", torch.float32),
            *buffers.waiting(buffers.combine_flags),
            *(buffers.max_tokens, buffers.num_experts),
        )
        return Launch(reduce_kernel, 4, constants, fixed)

    launch = buffers.launch(("reduce", graded, by_choice, handle.ids.dtype), make)
    filled = handle.row_prob if grads is None else grads
    arguments = (handle.ids, out, handle.destinations, filled, handle.num_tokens)
    launch((buffers.sms * 5, 1), arguments)
    return out


# A move of these kinds after one of those: nothing in between has made every rank read what it
# overwrites.
_UNREAD = {"dispatch": ("dispatch",), "plan": ("dispatch", "plan"), "combine": ("combine",)}


def take_turn(buffers: NvlinkBuffers, move: str) -> None:
    """Say that a move of this rank comes next ("plan", "dispatch" or "combine"), and put a
    `barrier` before it where one is needed. All ranks move in the same order.

    A call whose experts are computed here dispatches and combines in turn, and needs none. Experts
    of others may leave a dispatch without its combine (frozen inputs), or two calls may interleave.
    """
    space = buffers.workspace
    if space.last_move in _UNREAD[move]:
        barrier(buffers)
    space.last_move = move


def begin_combine(
    buffers: NvlinkBuffers, handle: RoutingHandle, row_grad: Tensor | None = None
) -> None:
    """What a combine of sent rows sends besides them: row_grad fp32 [>= N], if given, and zeros for
    rows over the capacity, of which there may be some in bounded mode, or where a token may name an
    expert twice. The rows follow, by sent_matmul(..., owners(...)) or by send_rows, then reduce.
    """
    graded = row_grad is not None
    bounded = handle.ends is None or buffers.top_k > buffers.local_experts

    def make() -> Launch:
        constants: dict[str, object] = {"HAS_GRAD": graded, "BOUNDED": bounded}
        constants |= {"K": buffers.top_k, "KP": power_of_two(buffers.top_k)}
        constants |= {"H": buffers.hidden, "W": buffers.ranks, "SHIFT": buffers.shift}
        constants |= {"ROWS": 16, "BLOCK": 32}
        fixed = (
            buffers.local("combine", buffers.dtype),
            buffers.addresses("combine", buffers.dtype),
            buffers.addresses("prob grads", torch.float32),
            *(buffers.combine_flags.counter, buffers.abort, buffers.rank, buffers.max_tokens),
        )
        return Launch(begin_combine_kernel, 4, constants, fixed)

    launch = buffers.launch(("begin combine", graded, bounded), make)
    programs = -(-buffers.ranks * buffers.max_tokens // 16) if graded or bounded else 1
    grads = handle.row_prob if row_grad is None else row_grad
    launch((programs, 1), (handle.inverse, grads, handle.origins, handle.row_count))


def owners(buffers: NvlinkBuffers, handle: RoutingHandle) -> Owners:
    """Where the expert rows of a combine go."""
    return Owners(handle.origins, buffers.addresses("combine", buffers.dtype), buffers.shift)


def send_rows(buffers: NvlinkBuffers, handle: RoutingHandle, y: Tensor) -> None:
    """Write the rows of y [>= N, H] into the combine buffers of their tokens' ranks."""

    def make() -> Launch:
        constants = {"SHIFT": buffers.shift, "H": buffers.hidden, "ROWS": 4}
        constants |= row_pieces(buffers.hidden, 8)
        fixed = (buffers.addresses("combine", buffers.dtype), buffers.rank)
        return Launch(send_rows_kernel, 4, constants, fixed)

    if y.shape[0]:
        launch = buffers.launch("send rows", make)
        launch((buffers.sms * 5, 1), (y, handle.origins, handle.row_count))
