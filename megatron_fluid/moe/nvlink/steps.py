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
landing rows only after a combine in which that peer took part, so after the peer's scatter; and its
inbox only after a dispatch in which the peer took part, so after the peer's last sums. Two moves of
the same kind in a row (two pushes without a combine between) would break this.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, H
hidden, N expert rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, power_of_two
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.grouped_gemm import Owners
from megatron_fluid.kernels.move_tokens import (
    push_kernel,
    reduce_kernel,
    reduce_push_kernel,
    scatter_kernel,
)
from megatron_fluid.kernels.routing_plan import plan_kernel, publish_kernel
from megatron_fluid.kernels.sent_rows import begin_combine_kernel, send_rows_kernel
from megatron_fluid.moe.nvlink.buffers import PLAN_TOKENS, NvlinkBuffers, RoutingHandle

# A streamed dispatch needs room for one program that pushes on an SM full of programs that wait for
# it, whatever the shape: 3 of 128 threads and one of 512 within the 65536 registers of an SM.
_WAITING_PROGRAMS, _WAITING_REGISTERS, _PUSHING_REGISTERS = 3, 72, 64

__all__ = [
    "aligned",
    "begin_combine",
    "make_plan",
    "owners",
    "publish",
    "push",
    "reduce",
    "reduce_push",
    "row_pieces",
    "scatter",
    "send_rows",
    "settle",
    "stream_push",
    "stream_scatter",
]


def row_pieces(width: int, most: int) -> dict[str, int]:
    """BLOCK and UNROLL for rows of `width`: columns that one warp moves by one access of 16 bytes a
    lane (of bf16), and how many of those it has in flight, at most `most`. The largest number that
    divides a row into equal steps.
    """
    block = min(256, power_of_two(width))
    steps = -(-width // block)
    return {"BLOCK": block, "UNROLL": max(n for n in range(1, most + 1) if steps % n == 0)}


def aligned(x: Tensor) -> Tensor:
    """x itself, or a copy that is contiguous and begins on a 16-byte boundary, as prepared launches
    take it for granted."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def publish(
    domain: NvlinkBuffers, ids: Tensor, probs: Tensor, capacity: int | None = None
) -> RoutingHandle:
    """Send ids [T, K] and probs fp32 [T, K] to every rank; the handle's tables are filled by
    make_plan."""
    device, top_k = domain.workspace.device, domain.top_k
    size = domain.most_rows if capacity is None else capacity
    ids, probs = aligned(ids), aligned(probs)
    destinations = torch.empty(domain.max_tokens, dtype=torch.int32, device=device)

    def make() -> Launch:
        constants = {
            "K": top_k,
            "KP": power_of_two(top_k),
            "W": domain.ranks,
            "EL": domain.local_experts,
            "ELP": power_of_two(domain.local_experts),
            "BT": PLAN_TOKENS,
        }
        fixed = (
            domain.addresses("ids", torch.int32),
            domain.addresses("probs", torch.float32),
            domain.addresses("counts", torch.int32),
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
        row_prob=torch.empty(size, dtype=torch.float32, device=device),
        inverse=torch.empty(
            domain.ranks * domain.max_tokens, top_k, dtype=torch.int32, device=device
        ),
        origins=torch.empty(size, dtype=torch.int32, device=device),
        capacity=size,
    )


def make_plan(domain: NvlinkBuffers, handle: RoutingHandle) -> None:
    """Fill the handle's tables once every rank has published; domain.read_offsets() then waits for
    the offsets."""

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
            "SHIFT": domain.shift,
        }
        fixed = (
            *(domain.host_offsets, domain.overflow),
            domain.local("ids", torch.int32),
            domain.local("probs", torch.float32),
            domain.local("counts", torch.int32),
            *(*domain.waiting(domain.plan_flags), domain.max_tokens, domain.plan_blocks),
        )
        return Launch(plan_kernel, 4, constants, fixed)

    launch = domain.launch("plan", make)
    tables = (handle.offsets, handle.row_prob, handle.inverse, handle.origins, handle.capacity)
    launch((domain.ranks * domain.plan_blocks, 1), tables)
    domain.planned()


def _push_launch(domain: NvlinkBuffers, rows: int, warps: int, chunks: int = 0) -> Launch:
    region = domain.stream_flags if chunks else domain.dispatch_flags
    block = min(1024, power_of_two(domain.hidden))
    while block > 512 and domain.hidden % block:
        block //= 2
    constants = {"H": domain.hidden, "W": domain.ranks, "BLOCK": block, "ROWS": rows}
    fixed = (
        *(domain.addresses("landing", domain.dtype), region.counter, region.addresses),
        *(domain.rank, domain.max_tokens),
    )
    most = _PUSHING_REGISTERS if chunks else None
    return Launch(push_kernel, warps, constants | {"CHUNKS": chunks}, fixed, maxnreg=most)


def push(
    domain: NvlinkBuffers, handle: RoutingHandle, x: Tensor, programs: int | None = None
) -> None:
    """Write rows of x [T, H] into the landing rows of the ranks that need them, on at most
    `programs` SMs. `scatter` follows."""
    few = programs is not None

    def make() -> Launch:
        return _push_launch(domain, 8 if few else 2, 16 if few else 4)

    launch = domain.launch(("push", few), make)
    launch((programs or domain.sms * 4, 1), (x, handle.destinations, handle.num_tokens))


def stream_push(
    domain: NvlinkBuffers, handle: RoutingHandle, x: Tensor, stream: torch.cuda.Stream | None = None
) -> None:
    """`push` of all tokens in chunks that are announced one by one, on domain.stream_programs SMs:
    as fast as the wire. `stream_scatter` runs beside it.
    """

    def make() -> Launch:
        return _push_launch(domain, 8, 16, domain.stream_chunks)

    launch = domain.launch("stream push", make)
    launch((domain.stream_programs, 1), (x, handle.destinations, handle.num_tokens), stream)


def _scatter_launch(domain: NvlinkBuffers, warps: int, chunks: int = 0) -> Launch:
    region = domain.stream_flags if chunks else domain.dispatch_flags
    # Of more experts a token, the rows' numbers take the registers of values in flight.
    most = (8 if domain.top_k <= 16 else 4) * 2 // domain.dtype.itemsize
    constants = {
        "H": domain.hidden,
        "W": domain.ranks,
        **row_pieces(domain.hidden, most),
        "K": domain.top_k,
    }
    constants |= {"ROWS": warps, "CHUNKS": max(chunks, 1)}
    fixed = (domain.local("landing", domain.dtype), *domain.waiting(region), domain.max_tokens)
    constants |= {"PUSHERS": domain.stream_programs if chunks else 0}
    return Launch(
        scatter_kernel, warps, constants, fixed, maxnreg=_WAITING_REGISTERS if chunks else None
    )


def scatter(
    domain: NvlinkBuffers,
    handle: RoutingHandle,
    x: Tensor,
    out: Tensor,
    programs: int | None = None,
) -> Tensor:
    """Fill expert rows out [>= N, H] from what landed and from this rank's own x [T, H], once every
    rank has pushed."""
    few = programs is not None

    def make() -> Launch:
        return _scatter_launch(domain, 16 if few else 4)

    launch = domain.launch(("scatter", few), make)
    launch((programs or domain.sms * 6, 1), (x, handle.inverse, out))
    return out


def stream_scatter(
    domain: NvlinkBuffers,
    handle: RoutingHandle,
    x: Tensor,
    out: Tensor,
    programs: int | None = None,
) -> Tensor:
    """`scatter` of what stream_push lands, chunk by chunk as it arrives. With `programs` given, on
    at most so many SMs, and never on those that stream_push needs: beside a program of so many
    threads none of its own has room.
    """
    few = programs is not None
    if programs is not None:
        programs = max(1, min(programs, domain.sms - domain.stream_programs))

    def make() -> Launch:
        return _scatter_launch(domain, 16 if few else 4, domain.stream_chunks)

    launch = domain.launch(("stream scatter", few), make)
    launch((programs or domain.sms * _WAITING_PROGRAMS, 1), (x, handle.inverse, out))
    return out


def settle(domain: NvlinkBuffers) -> None:
    """Wait until every rank's stream has come here. Between two dispatches without a combine: only
    then has everybody read what landed.
    """

    def make() -> Launch:
        region = domain.settle_flags
        flags, addresses, counter, errors, abort, rank, operation, timeout_ns = domain.waiting(
            region
        )
        fixed = (flags, addresses, counter, errors, abort, rank, operation, 0, timeout_ns)
        return Launch(barrier_kernel, 1, {"W": domain.ranks, "SLOT": 0}, fixed)

    domain.launch("settle", make)((1, 1), ())


def reduce_push(
    domain: NvlinkBuffers,
    handle: RoutingHandle,
    y: Tensor,
    row_grad: Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Sum this rank's experts per token from y [>= N, H] and send the sums to the owners.

    With row_grad fp32 [>= N], also those, unsummed: each (token, k) has one row.
    """
    few, graded = programs is not None, row_grad is not None

    def make() -> Launch:
        # On few SMs, one program fills an SM with as many loads in flight as its registers hold.
        warps, slots = 16 if few else 4, min(domain.top_k, domain.local_experts)
        constants: dict[str, object] = {
            "HAS_GRAD": graded,
            "K": domain.top_k,
            "SLOTS": slots,
            "H": domain.hidden,
        }
        constants |= {"W": domain.ranks, "ROWS": warps}
        fixed = (
            *(
                domain.addresses("inbox", domain.dtype),
                domain.addresses("prob grads", torch.float32),
            ),
            *(domain.combine_flags.counter, domain.rank, domain.max_tokens),
        )
        return Launch(
            reduce_push_kernel,
            warps,
            constants | row_pieces(domain.hidden, 4 if slots > 2 else 8),
            fixed,
        )

    launch = domain.launch(("reduce push", few, graded), make)
    grads = handle.row_prob if row_grad is None else row_grad
    # As many programs as the registers of an SM hold at once.
    resident = 3 if min(domain.top_k, domain.local_experts) > 2 else 5
    launch((programs or domain.sms * resident, 1), (y, handle.inverse, grads))


def reduce(
    domain: NvlinkBuffers,
    handle: RoutingHandle,
    out: Tensor | None = None,
    grads: Tensor | None = None,
    programs: int | None = None,
) -> Tensor:
    """Sum what the ranks sent back into out [T, H] and return it, once every rank has sent; the
    probabilities' gradient goes into grads fp32 [T, K] if given. Rows or sums, as the domain's
    schedule says.
    """
    if out is None:
        out = torch.empty(
            handle.num_tokens, domain.hidden, dtype=domain.dtype, device=domain.workspace.device
        )
    few, graded, by_choice = programs is not None, grads is not None, domain.schedule.sent_rows

    def make() -> Launch:
        warps = 16 if few else 4
        constants: dict[str, object] = {
            "HAS_GRAD": graded,
            "BY_CHOICE": by_choice,
            "K": domain.top_k,
        }
        constants |= {
            "KP": power_of_two(domain.top_k),
            "H": domain.hidden,
            "W": domain.ranks,
            "ROWS": warps,
        }
        most = 16 // (min(domain.top_k, 8) if by_choice else domain.ranks)  # of accesses in flight
        fixed = (
            *(domain.local("inbox", domain.dtype), domain.local("prob grads", torch.float32)),
            *(*domain.waiting(domain.combine_flags), domain.max_tokens, domain.num_experts),
        )
        return Launch(
            reduce_kernel, warps, constants | row_pieces(domain.hidden, max(1, most)), fixed
        )

    launch = domain.launch(("reduce", few, graded, by_choice, handle.ids.dtype), make)
    filled = handle.row_prob if grads is None else grads
    launch(
        (programs or domain.sms * 5, 1),
        (handle.ids, out, handle.destinations, filled, handle.num_tokens),
    )
    return out


def begin_combine(
    domain: NvlinkBuffers, handle: RoutingHandle, row_grad: Tensor | None = None
) -> None:
    """What a combine of sent rows sends besides them: row_grad fp32 [>= N], if given, and zeros for
    rows without room, of which there may be some in bounded mode, or where a token may name an
    expert twice. The rows follow, by sent_matmul(..., owners(...)) or by send_rows, then reduce.
    """
    graded = row_grad is not None
    bounded = handle.ends is None or domain.top_k > domain.local_experts

    def make() -> Launch:
        constants = {
            "HAS_GRAD": graded,
            "BOUNDED": bounded,
            "K": domain.top_k,
            "KP": power_of_two(domain.top_k),
        }
        constants |= {"H": domain.hidden, "W": domain.ranks, "ROWS": 16, "BLOCK": 32}
        fixed = (
            *(domain.local("inbox", domain.dtype), domain.addresses("inbox", domain.dtype)),
            *(
                domain.addresses("prob grads", torch.float32),
                domain.combine_flags.counter,
                domain.max_tokens,
            ),
        )
        return Launch(begin_combine_kernel, 4, constants, fixed)

    launch = domain.launch(("begin combine", graded, bounded), make)
    programs = -(-domain.ranks * domain.max_tokens // 16) if graded or bounded else 1
    launch((programs, 1), (handle.inverse, handle.row_prob if row_grad is None else row_grad))


def owners(domain: NvlinkBuffers, handle: RoutingHandle) -> Owners:
    """Where the expert rows of a combine go."""
    return Owners(handle.origins, domain.addresses("inbox", domain.dtype), domain.shift)


def send_rows(domain: NvlinkBuffers, handle: RoutingHandle, y: Tensor) -> None:
    """Write the rows of y [>= N, H] into the inboxes of their tokens' ranks."""

    def make() -> Launch:
        constants = {
            "SHIFT": domain.shift,
            "H": domain.hidden,
            "ROWS": 4,
            **row_pieces(domain.hidden, 8),
        }
        return Launch(
            send_rows_kernel, 4, constants, (domain.addresses("inbox", domain.dtype), domain.rank)
        )

    if y.shape[0]:
        domain.launch("send rows", make)((domain.sms * 5, 1), (y, handle.origins, handle.row_count))
