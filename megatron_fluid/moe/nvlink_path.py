"""The steps of the NVLink data path, one function a step, each on its caller's current stream.

    publish -> make_plan -> push -> gather -> (experts) -> reduce_push -> reduce

Dispatch can go in blocks of experts (push and gather take a block: a token is sent with the first block that needs
it) and combine in pieces of columns (reduce_push and reduce take a piece), so that one piece moves beside the GEMM of
another. `meet` is then the barrier between producer and consumer; without pieces the consumer meets by itself.

Every step is a launch on one rank. A real rank runs them in order; a test runs each step for all ranks of a
SimulatedWorkspace in turn. The backward is the same four moving steps with the saved `RoutingHandle`: it never plans
again.

Why no buffer is overwritten too early, with one stream order on every rank: a rank writes a peer's landing rows only
after a combine in which that peer took part, so after the peer's gather; and its inbox only after a dispatch in which
the peer took part, so after the peer's last reduce. Two moves of the same kind in a row (two pushes without a reduce
between) would break this.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, H hidden, N expert rows
of this rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import FlagRegion, Workspace
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.launch import Launch
from megatron_fluid.kernels.move_tokens import (
    advance_kernel,
    gather_kernel,
    meet_kernel,
    push_kernel,
    reduce_kernel,
    reduce_push_kernel,
    scatter_kernel,
)
from megatron_fluid.kernels.routing_plan import plan_kernel, publish_kernel
from megatron_fluid.moe.nvlink_schedule import NO_OVERLAP, Schedule

__all__ = [
    "NvlinkDomain",
    "RoutingHandle",
    "begin_stream",
    "scatter",
    "stream_push",
    "gather",
    "make_plan",
    "meet",
    "publish",
    "push",
    "reduce",
    "reduce_push",
]

_PLAN_BLOCK = 32  # tokens a plan program sorts
_MOST_PIECES = 8
_MOST_CHUNKS = 8


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _row_block(hidden: int, most: int) -> int:
    """Columns one program moves at a time: the widest power of two that divides `hidden`, within [512, most], else
    masked.
    """
    block = most
    while block > 512 and hidden % block:
        block //= 2
    return min(block, _power_of_two(hidden))


@dataclass
class RoutingHandle:
    """Where every token of one call went. Saved by the forward, replayed by the backward and by recompute.

    num_tokens T; ids [T, K]; destinations int32 [B, C] (bit d: block b is the first that needs the token on rank d);
    offsets int32 [El] and block_offsets int32 [El] (counted from the block's first row); row_entry int32 and row_prob
    fp32 [capacity]; inverse int32 [W * C, K]; ends: offsets on the host in exact mode, else None.
    """

    num_tokens: int
    ids: Tensor
    destinations: Tensor
    offsets: Tensor
    block_offsets: Tensor
    row_entry: Tensor
    row_prob: Tensor
    inverse: Tensor
    capacity: int
    ends: list[int] | None = None

    @property
    def row_count(self) -> Tensor:
        """N on the device (int32, one element), at most the capacity."""
        return self.offsets[-1:]

    @property
    def buffer_rows(self) -> int:
        """Rows that activations are allocated for."""
        return self.capacity if self.ends is None else self.ends[-1]


class NvlinkDomain:
    """Symmetric buffers and flags of one layer shape on one stream order.

    Layers of the same or of other shapes may share a workspace: they use the same memory one after the other.
    `max_tokens` is C and must be the same on every rank; a call may bring any number of tokens up to it.

    """

    def __init__(
        self,
        workspace: Workspace,
        max_tokens: int,
        hidden: int,
        top_k: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        stream: int = 0,
        schedule: Schedule = NO_OVERLAP,
    ) -> None:
        ranks = workspace.world_size
        if num_experts % ranks:
            raise ConfigError.of("num_experts", num_experts, f"a multiple of the {ranks} ranks")
        if len(schedule.expert_blocks) > _MOST_PIECES:
            raise ConfigError.of("expert_blocks", schedule.expert_blocks, f"at most {_MOST_PIECES}")
        if ranks > 31:
            raise ConfigError.of("ranks of an NVLink domain", ranks, "at most 31")
        if max_tokens < 1 or max_tokens * ranks * top_k >= 1 << 31:
            raise ConfigError.of("max_tokens", max_tokens, f"from 1 to {(1 << 31) // (ranks * top_k) - 1}")
        self.workspace = workspace
        self.max_tokens, self.hidden, self.top_k, self.num_experts, self.dtype = (
            max_tokens,
            hidden,
            top_k,
            num_experts,
            dtype,
        )
        self.ranks, self.rank = ranks, workspace.rank
        self.local_experts = num_experts // ranks
        blocks = schedule.expert_blocks or (self.local_experts,)
        if sum(blocks) != self.local_experts or min(blocks) < 1:
            raise ConfigError.of("expert_blocks", blocks, f"positive sizes with the sum {self.local_experts}")
        self.expert_blocks = blocks
        self.block_ends = list(itertools.accumulate(blocks))
        of = [b for b, size in enumerate(blocks) for _ in range(size)]
        self.expert_block = torch.tensor(of, dtype=torch.int32, device=workspace.device)
        self.plan_blocks = -(-max_tokens // _PLAN_BLOCK)
        self.stream = stream
        self._launches: dict[tuple[Any, tuple[Any, ...]], Launch] = {}
        self.plan_flags = workspace.flags("moe plan", stream=stream)
        self.dispatch_flags = workspace.flags("moe dispatch", slots=_MOST_PIECES * ranks, stream=stream)
        self.stream_flags = workspace.flags("moe stream", slots=_MOST_CHUNKS * ranks, stream=stream)
        self.combine_flags = workspace.flags("moe combine", slots=_MOST_PIECES * ranks, stream=stream)
        self.overflow = torch.zeros(1, dtype=torch.int32, pin_memory=workspace.device.type == "cuda")
        self.reserve()
        self.schedule = schedule
        self.side: torch.cuda.Stream | None = None
        if workspace.device.type == "cuda":
            if schedule.sms or schedule.stream:
                self.side = torch.cuda.Stream(workspace.device, priority=-1)
            self.sms = torch.cuda.get_device_properties(workspace.device).multi_processor_count
        else:
            self.sms = 1
        # SMs of a streamed push. 8 fill the wire; more of them hide one another's waits at the end of each chunk, where
        # all stores must have landed. Constant for a domain's flags: chunks are counted in multiples of it.
        self.stream_programs = 48 if workspace.device.type == "cuda" else 2
        self.stream_chunks = _MOST_CHUNKS if workspace.device.type == "cuda" else 2

        self.row_constants: dict[str, int] = {"H": hidden, "W": ranks, "BLOCK": _row_block(hidden, 1024)}

    def _name(self, name: str) -> str:
        return f"moe {name}@{self.stream}"

    def reserve(self) -> None:
        """Take the symmetric memory for this shape (collective when it grows)."""
        rows = self.ranks * self.max_tokens
        for name, numel, dtype in (
            ("landing", rows * self.hidden, self.dtype),
            ("inbox", rows * self.hidden, self.dtype),
            ("ids", rows * self.top_k, torch.int32),
            ("probs", rows * self.top_k, torch.float32),
            ("counts", self.ranks * self.plan_blocks * self.local_experts, torch.int32),
            ("prob grads", self.max_tokens * self.top_k, torch.float32),
        ):
            self.workspace.reserve(self._name(name), numel, dtype)

    def local(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's flat buffer `name`."""
        return self.workspace.reserve(self._name(name), 0, dtype)

    def addresses(self, name: str, dtype: torch.dtype) -> Tensor:
        """int64 [W]: every rank's buffer `name`."""
        return self.workspace.peer_pointers(self._name(name), dtype)

    @overload
    def launch(self, kernel: Any, key: tuple[Any, ...]) -> Launch | None: ...

    @overload
    def launch(self, kernel: Any, key: tuple[Any, ...], num_warps: int, **constants: object) -> Launch: ...

    def launch(
        self, kernel: Any, key: tuple[Any, ...], num_warps: int | None = None, **constants: object
    ) -> Launch | None:
        """The specialisation of a kernel under `key`, which must tell all its constants apart; made when they are
        given.
        """
        found = self._launches.get((kernel, key))
        if found is None and num_warps is not None:
            found = self._launches[kernel, key] = Launch(kernel, num_warps, constants)
        return found

    @property
    def most_rows(self) -> int:
        """Expert rows that can never be exceeded: every token of every rank on this rank."""
        return self.ranks * self.max_tokens * min(self.top_k, self.local_experts)

    def check_overflow(self) -> None:
        """Raise FluidError if a call in bounded mode wanted more rows than its capacity. Reads host memory only; may
        lag the device.
        """
        wanted = int(self.overflow[0])
        if wanted:
            self.overflow.zero_()
            raise FluidError(
                f"rank {self.rank}: the routing wanted {wanted} expert rows, more than the capacity of this layer's bounded mode; "
                "the rows above it were left out. Raise the capacity or use exact mode"
            )

    def check(self, x: Tensor, ids: Tensor, probs: Tensor) -> None:
        """Raise ConfigError where the arguments of a call do not fit this domain."""
        if x.dim() != 2 or x.shape[1] != self.hidden or x.dtype != self.dtype:
            raise ConfigError.of("x", f"{tuple(x.shape)} {x.dtype}", f"[T, {self.hidden}] {self.dtype}")
        if x.shape[0] > self.max_tokens:
            raise ConfigError.of("tokens of a rank", x.shape[0], f"at most max_tokens = {self.max_tokens}")
        if ids.shape != (x.shape[0], self.top_k) or ids.is_floating_point():
            raise ConfigError.of(
                "topk_ids", f"{tuple(ids.shape)} {ids.dtype}", f"integers [{x.shape[0]}, {self.top_k}]"
            )
        if probs.shape != ids.shape or probs.dtype != torch.float32:
            raise ConfigError.of("probs", f"{tuple(probs.shape)} {probs.dtype}", f"float32 {tuple(ids.shape)}")


def _wait_args(domain: NvlinkDomain, region: FlagRegion) -> tuple[Any, ...]:
    """The arguments that every waiting kernel takes, in order."""
    space = domain.workspace
    errors = space.errors
    return (
        *(region.flags, region.addresses, region.counter, errors.words, errors.abort),
        *(domain.rank, region.operation, space.timeout_ns),
    )


def publish(domain: NvlinkDomain, ids: Tensor, probs: Tensor, capacity: int | None = None) -> RoutingHandle:
    """Send ids [T, K] and probs fp32 [T, K] to every rank; the handle's tables are filled by make_plan."""
    device, top_k = domain.workspace.device, domain.top_k
    blocks = len(domain.expert_blocks)
    size = domain.most_rows if capacity is None else capacity
    ids, probs = ids.contiguous(), probs.contiguous()

    def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    handle = RoutingHandle(
        num_tokens=ids.shape[0],
        ids=ids,
        destinations=table(blocks, domain.max_tokens),
        offsets=table(domain.local_experts),
        block_offsets=table(domain.local_experts),
        row_entry=table(size),
        row_prob=table(size, dtype=torch.float32),
        inverse=table(domain.ranks * domain.max_tokens, top_k),
        capacity=size,
    )
    launch = domain.launch(publish_kernel, (ids.dtype,))
    if launch is None:
        launch = domain.launch(
            publish_kernel,
            (ids.dtype,),
            4,
            K=top_k,
            KP=_power_of_two(top_k),
            W=domain.ranks,
            EL=domain.local_experts,
            ELP=_power_of_two(domain.local_experts),
            BT=_PLAN_BLOCK,
            B=blocks,
        )
    launch(
        (domain.plan_blocks, 1),
        (
            ids,
            probs,
            handle.destinations,
            domain.addresses("ids", torch.int32),
            domain.addresses("probs", torch.float32),
            domain.addresses("counts", torch.int32),
            domain.expert_block,
            domain.plan_flags.counter,
            domain.rank,
            handle.num_tokens,
            domain.max_tokens,
        ),
    )
    return handle


def make_plan(domain: NvlinkDomain, handle: RoutingHandle) -> None:
    """Fill the handle's tables once every rank has published."""
    experts = _power_of_two(domain.local_experts)
    region = domain.plan_flags
    launch = domain.launch(plan_kernel, ())
    if launch is None:
        launch = domain.launch(
            plan_kernel,
            (),
            4,
            K=domain.top_k,
            W=domain.ranks,
            EL=domain.local_experts,
            ELP=experts,
            BT=_PLAN_BLOCK,
            RB=max(16, min(_power_of_two(domain.ranks * domain.plan_blocks), 4096 // experts)),
            B=len(domain.expert_blocks),
        )
    launch(
        (domain.ranks * domain.plan_blocks, 1),
        (
            domain.local("ids", torch.int32),
            domain.local("probs", torch.float32),
            domain.local("counts", torch.int32),
            handle.offsets,
            handle.block_offsets,
            domain.expert_block,
            handle.row_entry,
            handle.row_prob,
            handle.inverse,
            domain.overflow,
            *_wait_args(domain, region),
            domain.max_tokens,
            domain.plan_blocks,
            handle.capacity,
        ),
    )


def push(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, block: int = 0, programs: int | None = None) -> None:
    """Write rows of x [T, H] into the landing rows of the ranks that first need them in expert block `block`.

    With `programs` given, on at most so many SMs. Block 0 comes first. `gather` follows.
    """
    few = programs is not None
    key = (few, block == 0)
    launch = domain.launch(push_kernel, key)
    if launch is None:
        constants: dict[str, int] = {"ROWS": 8 if few else 2, "ADVANCE": block == 0, "CHUNKS": 0}
        launch = domain.launch(push_kernel, key, 16 if few else 4, **domain.row_constants, **constants)
    launch((programs or domain.sms * 4, 1), _push_args(domain, handle, x, block, domain.dispatch_flags))


def _push_args(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, block: int, region: FlagRegion) -> tuple:
    return (
        *(x, handle.destinations, domain.addresses("landing", domain.dtype), region.counter, region.addresses),
        *(domain.rank, handle.num_tokens, domain.max_tokens, block * domain.max_tokens),
    )


def begin_stream(domain: NvlinkDomain) -> None:
    """A new dispatch by stream_push and scatter begins; comes before both, which may then run at the same time."""
    launch = domain.launch(advance_kernel, ()) or domain.launch(advance_kernel, (), 1)
    launch((1, 1), (domain.stream_flags.counter,))


def stream_push(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor) -> None:
    """`push` of all tokens in chunks that are announced one by one, on domain.stream_programs SMs: as fast as the wire.
    `scatter` runs beside it.
    """
    launch = domain.launch(push_kernel, ("stream",))
    if launch is None:
        constants: dict[str, int] = {"ROWS": 8, "ADVANCE": False, "CHUNKS": domain.stream_chunks}
        launch = domain.launch(push_kernel, ("stream",), 16, **domain.row_constants, **constants)
    launch((domain.stream_programs, 1), _push_args(domain, handle, x, 0, domain.stream_flags))


def scatter(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, out: Tensor) -> Tensor:
    """Fill expert rows out [>= N, H] from this rank's own x [T, H] and from what stream_push lands, chunk by chunk as
    it arrives.
    """
    launch = domain.launch(scatter_kernel, ())
    if launch is None:
        wide = min(_power_of_two(domain.hidden), 4096)
        constants = {
            "K": domain.top_k,
            "ROWS": 8192 // wide,
            "CHUNKS": domain.stream_chunks,
            "PUSHERS": domain.stream_programs,
        }
        launch = domain.launch(scatter_kernel, (), 8, **(domain.row_constants | {"BLOCK": wide}), **constants)
    launch(
        # Two programs of 8 warps an SM leave room for a pushing program on any SM, so waiting here never keeps one out.
        (domain.sms * 2, 1),
        (
            *(x, domain.local("landing", domain.dtype), handle.inverse, out),
            *(*_wait_args(domain, domain.stream_flags), domain.max_tokens),
        ),
    )
    return out


def meet(domain: NvlinkDomain, region: FlagRegion, piece: int) -> None:
    """Wait, with one program, until every rank's stream has come to this meeting: all that was sent before it has
    then arrived.
    """
    launch = domain.launch(meet_kernel, ()) or domain.launch(meet_kernel, (), 1, W=domain.ranks)
    launch((1, 1), (*_wait_args(domain, region), piece))


def gather(
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
    few = programs is not None
    last = domain.local_experts if block is None else domain.block_ends[block]
    launch = domain.launch(gather_kernel, (few, block))
    if launch is None:
        launch = domain.launch(
            gather_kernel,
            (few, block),
            16 if few else 4,
            K=domain.top_k,
            H=domain.hidden,
            W=domain.ranks,
            ROWS=8 if few else 1,
            BLOCK=_row_block(domain.hidden, 1024 if few else 2048),
            FIRST=domain.block_ends[block - 1] - 1 if block else -1,
            LAST=last - 1,
            MEET=not block,
        )
    launch(
        (programs or domain.sms * 8, 1),
        (
            x,
            domain.local("landing", domain.dtype),
            handle.row_entry,
            handle.offsets,
            out,
            *_wait_args(domain, domain.dispatch_flags),
            domain.max_tokens,
        ),
    )
    return out


def reduce_push(
    domain: NvlinkDomain,
    handle: RoutingHandle,
    y: Tensor,
    row_grad: Tensor | None = None,
    column: int = 0,
    programs: int | None = None,
) -> None:
    """Sum this rank's experts per token from y [>= N, width], the columns of the rows from `column` on, and send the
    sums to the owners.

    With row_grad fp32 [>= N], also those, unsummed: each (token, k) has one row. Column 0 comes first.
    """
    few = programs is not None
    block = _row_block(y.shape[1], 1024)
    launch = domain.launch(reduce_push_kernel, (few, row_grad is not None, y.shape[1], column))
    if launch is None:
        launch = domain.launch(
            reduce_push_kernel,
            (few, row_grad is not None, y.shape[1], column),
            32 if few else 4,
            HAS_GRAD=row_grad is not None,
            K=domain.top_k,
            H=domain.hidden,
            WIDTH=y.shape[1],
            COLUMN=column,
            W=domain.ranks,
            # On few SMs, one program fills an SM with as many loads in flight as its registers hold.
            ROWS=16384 // block if few else 1,
            BLOCK=block,
        )
    launch(
        (programs or domain.sms * 8, 1),
        (
            y,
            handle.inverse,
            domain.addresses("inbox", domain.dtype),
            row_grad if row_grad is not None else handle.row_prob,
            domain.addresses("prob grads", torch.float32),
            domain.combine_flags.counter,
            domain.rank,
            domain.max_tokens,
        ),
    )


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
    space = domain.workspace
    if out is None:
        out = torch.empty(handle.num_tokens, domain.hidden, dtype=domain.dtype, device=space.device)
    width = domain.hidden if width is None else width
    few = programs is not None
    block = _row_block(width, 1024)
    launch = domain.launch(reduce_kernel, (few, grads is not None, width, column, meeting, handle.ids.dtype))
    if launch is None:
        launch = domain.launch(
            reduce_kernel,
            (few, grads is not None, width, column, meeting, handle.ids.dtype),
            32 if few else 4,
            HAS_GRAD=grads is not None,
            K=domain.top_k,
            KP=_power_of_two(domain.top_k),
            H=domain.hidden,
            WIDTH=width,
            COLUMN=column,
            W=domain.ranks,
            B=len(domain.expert_blocks),
            ROWS=16384 // block if few else max(1, 1024 // block),
            BLOCK=block,
            MEET=meeting,
        )
    launch(
        (programs or domain.sms * 8, 1),
        (
            domain.local("inbox", domain.dtype),
            handle.destinations,
            out,
            handle.ids,
            domain.local("prob grads", torch.float32),
            grads if grads is not None else handle.row_prob,
            *_wait_args(domain, domain.combine_flags),
            handle.num_tokens,
            domain.max_tokens,
            domain.num_experts,
        ),
    )
    return out
