"""The steps of the NVLink data path, one function a step.

    publish -> make_plan -> push -> scatter -> (experts) -> reduce_push -> reduce
                                                         -> begin_combine -> sent_matmul -> reduce

stream_push and stream_scatter do what push and scatter do in chunks of tokens, at the same time.
A combine has two forms. reduce_push sums a token's rows on the sending rank and sends the sum.
sent_matmul sends every row from the GEMM's epilogue; send_rows does so after any other GEMM.

Every step launches one kernel on one rank, on the current stream unless another is given. A real
rank runs them in order; a test runs each step for all ranks of a SimulatedWorkspace in turn. The
backward runs the same steps with the saved `RoutingHandle`, without publish and make_plan.

No buffer is overwritten too early, because all ranks launch the steps in the same order. A rank
writes a peer's receive buffer only after a combine with that peer, so after the peer's scatter. It
writes a peer's combine buffer only after a dispatch with that peer, so after the peer's reduce. Two
dispatches or two combines in a row need a `barrier` between them, which `take_turn` adds.

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

# stream_scatter waits for stream_push, so a program of each must always fit on an SM together: 3
# scattering programs of 128 threads and a pushing one of 512 share the SM's 65536 registers.
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
    """Send ids [T, K] and probs fp32 [T, K] to every rank; make_plan fills the handle's tables.
    If there are more tokens than the buffers hold, only the number of tokens is sent."""
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
    # The plan's tables are allocated while the kernel runs.
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
    """Fill the handle's tables once every rank has published. buffers.read_offsets() then waits for
    the offsets on the host."""

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
    assert width <= buffers.hidden, "rows are wider than those of the receive buffer"
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
    """Write rows of x [T, H or less] into the receive buffers of the ranks that need them, without
    gaps at any width. `scatter` must follow, with the same width on all ranks."""
    width = x.shape[1]
    launch = buffers.launch(("push", width), lambda: _push_launch(buffers, width, 2, 4))
    launch((buffers.sms * 4, 1), (x, handle.destinations, handle.num_tokens))


def stream_push(
    buffers: NvlinkBuffers,
    handle: RoutingHandle,
    x: Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Like `push`, but in chunks with a flag each, so that `stream_scatter` can run meanwhile. Uses
    buffers.stream_programs SMs, enough for NVLink's full bandwidth.
    """
    width = x.shape[1]
    launch = buffers.launch(
        ("stream push", width), lambda: _push_launch(buffers, width, 8, 16, buffers.stream_chunks)
    )
    arguments = (x, handle.destinations, handle.num_tokens)
    launch((buffers.stream_programs, 1), arguments, stream)


def _scatter_launch(buffers: NvlinkBuffers, width: int, warps: int, chunks: int = 0) -> Launch:
    region = buffers.stream_flags if chunks else buffers.dispatch_flags
    # Above top-16, row indices need registers, so fewer values are in flight.
    most = (8 if buffers.top_k <= 16 else 4) * 2 // buffers.dtype.itemsize
    constants = {"H": width, "W": buffers.ranks} | row_pieces(width, most)
    constants |= {"K": buffers.top_k, "ROWS": warps, "CHUNKS": max(chunks, 1)}
    constants |= {"PUSHERS": buffers.stream_programs if chunks else 0}
    fixed = (buffers.local("receive", buffers.dtype), *buffers.waiting(region), buffers.max_tokens)
    registers = _WAITING_REGISTERS if chunks else None
    return Launch(scatter_kernel, warps, constants, fixed, maxnreg=registers)


def scatter(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, out: Tensor) -> Tensor:
    """Once every rank has pushed, fill expert rows `out` [>= N, H or less] from the receive buffer
    and this rank's own x [T, H or less]. Both are as wide as the pushed rows."""
    width = x.shape[1]
    launch = buffers.launch(("scatter", width), lambda: _scatter_launch(buffers, width, 4))
    launch((buffers.sms * 6, 1), (x, handle.inverse, handle.row_count, out))
    return out


def stream_scatter(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, out: Tensor) -> Tensor:
    """Like `scatter`, but takes stream_push's chunks one by one as they arrive."""
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
    """Sum each token's rows of y [>= N, H] and send the sums to the tokens' ranks.

    row_grad fp32 [>= N], if given, is sent unsummed: each (token, k) has one row.
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
    resident = 3 if slots > 2 else 5  # programs that fit in the registers of an SM at once
    launch((buffers.sms * resident, 1), (y, handle.inverse, grads))


def reduce(
    buffers: NvlinkBuffers,
    handle: RoutingHandle,
    out: Tensor | None = None,
    grads: Tensor | None = None,
) -> Tensor:
    """Once every rank has sent, sum what they sent into out [T, H] and return it. The gradient of
    the probabilities goes into grads fp32 [T, K], if given. buffers.schedule.sent_rows tells
    whether the ranks sent single rows or sums.
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


# For each move, the previous moves after which it needs a barrier: a slower rank may not have read
# what the move overwrites.
_BARRIER_AFTER = {"dispatch": ("dispatch",), "plan": ("dispatch", "plan"), "combine": ("combine",)}


def take_turn(buffers: NvlinkBuffers, move: str) -> None:
    """Record the next move of this rank ("plan", "dispatch" or "combine") and launch a `barrier`
    before it if it needs one. All ranks make the same moves in the same order.

    Alternating dispatches and combines need none. Recomputed rows and frozen inputs leave a
    dispatch without its combine, and two calls may interleave.
    """
    space = buffers.workspace
    if space.last_move in _BARRIER_AFTER[move]:
        barrier(buffers)
    space.last_move = move


def begin_combine(
    buffers: NvlinkBuffers, handle: RoutingHandle, row_grad: Tensor | None = None
) -> None:
    """Start a combine that sends single rows. Sends row_grad fp32 [>= N], if given, and zeros for
    rows over the capacity (in bounded mode, or if a token may name an expert twice). The rows
    follow, by sent_matmul(..., owners(...)) or by send_rows; then reduce.
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
    """The destination of each expert row, for sent_matmul."""
    return Owners(handle.origins, buffers.addresses("combine", buffers.dtype), buffers.shift)


def send_rows(buffers: NvlinkBuffers, handle: RoutingHandle, y: Tensor) -> None:
    """Write each row of y [>= N, H] into the combine buffer of its token's rank."""

    def make() -> Launch:
        constants = {"SHIFT": buffers.shift, "H": buffers.hidden, "ROWS": 4}
        constants |= row_pieces(buffers.hidden, 8)
        fixed = (buffers.addresses("combine", buffers.dtype), buffers.rank)
        return Launch(send_rows_kernel, 4, constants, fixed)

    if y.shape[0]:
        launch = buffers.launch("send rows", make)
        launch((buffers.sms * 5, 1), (y, handle.origins, handle.row_count))
