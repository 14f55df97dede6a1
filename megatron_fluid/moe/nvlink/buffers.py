"""Symmetric buffers of one layer shape on the NVLink path, and the steps of its data path: one
function a step, which launches one kernel.

    publish -> make_plan -> push -> scatter -> (experts) -> reduce_push -> reduce
                                                         -> begin_combine -> sent_matmul -> reduce

A streamed push and scatter work in chunks of tokens, at the same time. A combine has two forms:
reduce_push sums a token's rows on the sending rank and sends the sum; sent_rows.py sends each row.

A rank runs the steps in order on the current stream; a test runs each for all ranks of a
SimulatedWorkspace in turn. The backward runs all but the first two with the saved handle.

No buffer is overwritten too early, because all ranks launch the steps in the same order. A rank
writes a peer's receive buffer only after a combine with that peer, so after the peer's scatter. It
writes a peer's combine buffer only after a dispatch with that peer, so after the peer's reduce. Two
dispatches or two combines in a row need a `barrier` between them, which `take_turn` adds.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, H
hidden, N expert rows of this rank.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import FlagRegion, Workspace
from megatron_fluid.cuda.devices import current_stream
from megatron_fluid.cuda.triton_launch import Launch, aligned, power_of_two
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.grouped_gemm.launch import prepare
from megatron_fluid.kernels.move_tokens.kernel import (
    push_kernel,
    reduce_kernel,
    reduce_push_kernel,
    row_pieces,
    scatter_kernel,
)
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle, plan_kernel, publish_kernel
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule

__all__ = [
    "NvlinkBuffers",
    "barrier",
    "make_plan",
    "publish",
    "push",
    "reduce",
    "reduce_push",
    "scatter",
]

PLAN_TOKENS = 32  # of one program of the plan
_MOST_CHUNKS = 8
_PUSHERS = 48
# A streamed scatter waits for the push, so a program of each must always fit on an SM together: 3
# scattering programs of 128 threads and a pushing one of 512 share the SM's 65536 registers.
_WAITING_PROGRAMS, _WAITING_REGISTERS, _PUSHING_REGISTERS = 3, 72, 64


class NvlinkBuffers:
    """Symmetric buffers and flags of one layer shape on one stream order: `receive` takes the rows
    of a dispatch, `combine` those of a combine. Layers that share a workspace use the same memory
    one after the other. `max_tokens` is C, the same on every rank and the most a call may bring.
    """

    def __init__(
        self,
        workspace: Workspace,
        max_tokens: int,
        hidden: int,
        top_k: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        schedule: Schedule = NO_OVERLAP,
    ) -> None:
        ranks, device = workspace.world_size, workspace.device
        if num_experts % ranks:
            raise ConfigError.of("num_experts", num_experts, f"a multiple of the {ranks} ranks")
        if ranks > 31:
            raise ConfigError.of("ranks of an NVLink group", ranks, "at most 31")
        most = ((1 << 31) - 1) // (ranks * top_k)
        if not 1 <= max_tokens <= most:
            raise ConfigError.of("max_tokens", max_tokens, f"from 1 to {most}")
        self.workspace, self.schedule = workspace, schedule
        self.max_tokens, self.hidden, self.top_k = max_tokens, hidden, top_k
        self.num_experts, self.dtype = num_experts, dtype
        self.errors, self.abort = workspace.errors, workspace.errors.abort
        self.ranks, self.rank = ranks, workspace.rank
        self.local_experts = num_experts // ranks
        self.shift = (max_tokens * top_k - 1).bit_length()  # by which ranks are told from choices
        self.plan_blocks = -(-max_tokens // PLAN_TOKENS)

        self.plan_flags = workspace.flags("moe plan")
        self.dispatch_flags = workspace.flags("moe dispatch")
        self.stream_flags = workspace.flags("moe stream", _MOST_CHUNKS * ranks, counters=2)
        self.barrier_flags = workspace.flags("moe barrier")
        self.combine_flags = workspace.flags("moe combine")
        on_gpu = device.type == "cuda"
        # Written by the plan, read by the host; told: the offsets, the most tokens of a rank.
        self.overflow = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.told = torch.zeros(
            self.local_experts + 1, dtype=torch.int32, device="cpu", pin_memory=on_gpu
        )
        words = (ctypes.c_int32 * self.told.numel()).from_address(self.told.data_ptr())
        told = memoryview(words).cast("B").cast("i")  # becomes a list without torch
        self._host_ends, self._host_most = told[:-1], told[-1:]
        self._planned, self._fork, self._join = (
            torch.cuda.Event() if on_gpu else None for _ in range(3)
        )

        self.side: torch.cuda.Stream | None = None
        self.sms = 1
        prepare(device, dtype, hidden, "swiglu")
        if on_gpu:
            if schedule.stream:
                self.side = torch.cuda.Stream(device, priority=-1)
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        # SMs of a streamed push. A few fill the wire; more of them hide one another's waits at the
        # end of each chunk, where all stores must have arrived. The same for all buffers that share
        # a region's flags: chunks are counted in multiples of it.
        self.stream_programs = _PUSHERS if on_gpu else 2
        self.stream_chunks = _MOST_CHUNKS if on_gpu else 2

        self._launches: dict[Hashable, Launch] = {}
        self._growths = -1
        self.reserve()

    def reserve(self) -> None:
        """Take the symmetric memory for this shape (collective when it grows)."""
        rows = self.ranks * self.max_tokens
        received = rows if self.ranks > 1 else 1  # a rank's own tokens are read where they are
        answers = self.max_tokens * (self.top_k if self.schedule.sent_rows else self.ranks)
        for name, numel, dtype in (
            ("receive", received * self.hidden, self.dtype),
            ("combine", answers * self.hidden, self.dtype),
            ("ids", rows * self.top_k, torch.int32),
            ("probs", rows * self.top_k, torch.float32),
            ("counts", self.ranks * self.plan_blocks * self.local_experts, torch.int32),
            ("wanted", self.ranks, torch.int32),
            ("prob grads", self.max_tokens * self.top_k, torch.float32),
        ):
            self.workspace.reserve(f"moe {name}", numel, dtype)

    def local(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's flat buffer `name`."""
        return self.workspace.reserve(f"moe {name}", 0, dtype)

    def addresses(self, name: str, dtype: torch.dtype) -> Tensor:
        """int64 [W]: every rank's buffer `name`."""
        return self.workspace.peer_pointers(f"moe {name}", dtype)

    def waiting(self, region: FlagRegion) -> tuple[Tensor | int, ...]:
        """The arguments that every waiting kernel takes, in order."""
        space = self.workspace
        errors = space.errors
        flags = (region.flags, region.addresses, region.counter, errors.words, errors.abort)
        return (*flags, self.rank, region.operation, space.timeout_ns)

    def launch(self, key: Hashable, make: Callable[[], Launch]) -> Launch:
        """The launch that `make` prepared for `key`, which must tell all its constants apart, since
        buffers last moved."""
        if self._growths != self.workspace.growths:
            self._launches.clear()
            self._growths = self.workspace.growths
        if (found := self._launches.get(key)) is None:
            found = self._launches[key] = make()
        return found

    def planned(self) -> None:
        """The plan has been launched: its offsets may be asked for."""
        if self._planned is not None:
            self._planned.record(current_stream())

    def read_offsets(self) -> list[int]:
        """The offsets of the last plan on the host, when it has run."""
        if self._planned is not None:
            self._planned.synchronize()
        return self._host_ends.tolist()

    def most_wanted(self) -> int | None:
        """The most tokens that a rank brings to the plan whose offsets were just read, where they
        are more than these buffers hold; else None. The same on every rank, and such a rank has
        published none of its tokens."""
        most = self._host_most[0]
        return most if most > self.max_tokens else None

    def earlier_offsets(self) -> list[int]:
        """The offsets of an earlier plan, without waiting, for what only speed depends on. Sorted,
        as a plan may be writing its own."""
        return sorted(self._host_ends)

    # Without a GPU there is no side stream, and this does nothing: steps run in the order they are
    # written.
    def fork(self) -> None:
        """Work that follows on the side stream sees what precedes on the current one."""
        if self.side is not None and self._fork is not None:
            self._fork.record(current_stream())
            self._fork.wait(self.side)

    def join(self) -> None:
        """Work that follows on the current stream sees what precedes on the side stream."""
        if self.side is not None and self._join is not None:
            self._join.record(self.side)
            self._join.wait(current_stream())

    @property
    def most_rows(self) -> int:
        """Expert rows that can never be exceeded: every token of every rank on this rank."""
        return self.ranks * self.max_tokens * min(self.top_k, self.local_experts)

    def check_overflow(self) -> None:
        """Raise FluidError if a call in bounded mode wanted more rows than its capacity. Reads host
        memory only; may lag the device.
        """
        if wanted := int(self.overflow[0]):
            self.overflow.zero_()
            raise FluidError(
                f"rank {self.rank}: the routing wanted {wanted} expert rows, more than the "
                "capacity of this layer's bounded mode; the rows above it were left out. Raise the "
                "capacity or use exact mode. With MoEConfig.graph, run the iteration again outside "
                "of graph_room, then capture it again"
            )

    def bounded_rows(self, factor: float) -> int:
        """Expert rows of a rank in bounded mode: `factor` times those of a balanced routing."""
        return math.ceil(min(self.most_rows, factor * self.max_tokens * self.top_k))


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


def push(
    buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, *, streamed: bool = False
) -> None:
    """Write rows of x [T, H or less] into the receive buffers of the ranks that need them, without
    gaps at any width. `scatter` must follow, with the same width on all ranks.

    streamed: in chunks with a flag each, so that a streamed scatter can run meanwhile, and on the
    side stream, if there is one. Takes buffers.stream_programs SMs, enough for NVLink's full
    bandwidth.
    """
    width = x.shape[1]

    def make() -> Launch:
        assert width <= buffers.hidden, "rows are wider than those of the receive buffer"
        region = buffers.stream_flags if streamed else buffers.dispatch_flags
        block = min(1024, power_of_two(width))
        while block > 512 and width % block:
            block //= 2
        constants = {"H": width, "W": buffers.ranks, "BLOCK": block, "ROWS": 8 if streamed else 2}
        constants["CHUNKS"] = buffers.stream_chunks if streamed else 0
        fixed = (
            *(buffers.addresses("receive", buffers.dtype), region.counter, region.addresses),
            *(buffers.abort, buffers.rank, buffers.max_tokens),
        )
        registers = _PUSHING_REGISTERS if streamed else None
        return Launch(push_kernel, 16 if streamed else 4, constants, fixed, maxnreg=registers)

    launch = buffers.launch(("push", width, streamed), make)
    programs = buffers.stream_programs if streamed else buffers.sms * 4
    arguments = (x, handle.destinations, handle.num_tokens)
    if streamed:
        buffers.fork()
    launch((programs, 1), arguments, buffers.side if streamed else None)


def scatter(
    buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, out: Tensor, *, streamed: bool = False
) -> Tensor:
    """Once every rank has pushed, fill expert rows `out` [>= N, H or less] from the receive buffer
    and this rank's own x [T, H or less]. Both are as wide as the pushed rows.

    streamed: take the chunks of a streamed push one by one, as they arrive.
    """
    width = x.shape[1]

    def make() -> Launch:
        region = buffers.stream_flags if streamed else buffers.dispatch_flags
        # Above top-16, row indices need registers, so fewer values are in flight.
        most = (8 if buffers.top_k <= 16 else 4) * 2 // buffers.dtype.itemsize
        constants = {"H": width, "W": buffers.ranks} | row_pieces(width, most)
        constants |= {"K": buffers.top_k, "ROWS": 4}
        constants["CHUNKS"] = buffers.stream_chunks if streamed else 1
        constants["PUSHERS"] = buffers.stream_programs if streamed else 0
        received, waiting = buffers.local("receive", buffers.dtype), buffers.waiting(region)
        registers = _WAITING_REGISTERS if streamed else None
        fixed = (received, *waiting, buffers.max_tokens)
        return Launch(scatter_kernel, 4, constants, fixed, maxnreg=registers)

    launch = buffers.launch(("scatter", width, streamed), make)
    programs = buffers.sms * (_WAITING_PROGRAMS if streamed else 6)
    launch((programs, 1), (x, handle.inverse, handle.row_count, out))
    if streamed:
        buffers.join()  # x is the caller's again
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
