"""Buffers, flags and prepared launches of one layer shape on the NVLink path, and the routing of
one call.

Layers use the same buffers one after the other, so a model of any depth holds them once:
`shared_buffers` keeps one symmetric workspace a process group, and NvlinkBuffers for each layer
shape on it.

Shapes: T tokens of this rank, C token capacity of a rank, K top-k, W ranks, El local experts, H
hidden.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.comm.workspace import FlagRegion, Workspace
from megatron_fluid.config import current_config
from megatron_fluid.cuda.streams import current_stream
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.grouped_gemm.launch import prepare, sends_rows
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule, choose_schedule
from megatron_fluid.plan.machine import machine_named

__all__ = ["NvlinkBuffers", "RoutingHandle", "SizedBuffers", "shared_buffers"]

PLAN_TOKENS = 32  # of one program of the plan
_MOST_CHUNKS = 8
_PUSHERS = 48


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
        # Written by the plan, read by the host.
        self.overflow = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        # The offsets, and the most tokens that a rank brings.
        self.told = torch.zeros(self.local_experts + 1, dtype=torch.int32, pin_memory=on_gpu)
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

    def check(self, x: Tensor, ids: Tensor, probs: Tensor, bounded: bool = False) -> None:
        """Raise ConfigError where the arguments of a call do not fit these buffers. That tokens are
        too many, the ranks learn from the plan, unless it is bounded: nobody reads it then."""
        tokens, hidden, top_k = x.shape[0], self.hidden, self.top_k
        if x.dim() != 2 or x.shape[1] != hidden or x.dtype != self.dtype:
            raise ConfigError.of("x", _shown(x), f"[T, {hidden}] {self.dtype}")
        if bounded and tokens > self.max_tokens:
            raise self.too_many(
                tokens, "; with a capacity factor buffers stay as the first call made them"
            )
        if ids.shape != (tokens, top_k) or ids.is_floating_point():
            raise ConfigError.of("topk_ids", _shown(ids), f"integers [{tokens}, {top_k}]")
        if probs.shape != ids.shape or probs.dtype != torch.float32:
            raise ConfigError.of("probs", _shown(probs), f"float32 {tuple(ids.shape)}")

    def too_many(self, tokens: int, why: str = "") -> ConfigError:
        allowed = f"at most max_tokens = {self.max_tokens}{why}"
        return ConfigError.of("tokens of a rank", tokens, allowed)


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


@torch.inference_mode(False)
def shared_buffers(
    group: dist.ProcessGroup,
    max_tokens: int,
    hidden: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.bfloat16,
    schedule: Schedule | None = None,
) -> NvlinkBuffers:
    """The buffers of this shape on the group's workspace. Collective the first time: all ranks ask
    in the same order.

    schedule None takes the one that rank 0 chooses for the shape. Raises ConfigError where the
    ranks cannot map each other's memory.
    """
    shape = (max_tokens, hidden, ffn, top_k, num_experts)
    if schedule is None:
        schedule = group_resource(
            group, ("moe schedule", *shape, dtype), lambda: _choose(group, shape, dtype)
        )
    chosen = schedule

    given = (max_tokens, hidden, top_k, num_experts, dtype)

    def make() -> NvlinkBuffers:
        workspace = group_resource(
            group,
            "moe workspace",
            lambda: SymmetricWorkspace(group, wait_timeout_s(group)),
            close=SymmetricWorkspace.close,
        )
        return NvlinkBuffers(workspace, *given, schedule=chosen)

    return group_resource(group, ("moe buffers", *given, schedule), make)


def _choose(
    group: dist.ProcessGroup, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Schedule:
    """choose_schedule on the group's first rank, for all: ranks with other schedules would wait for
    each other in vain."""

    def found() -> tuple[Schedule, str]:
        if dist.get_rank(group):
            return NO_OVERLAP, ""
        # Whether this GPU's grouped GEMMs can send the rows of their results.
        sends = torch.cuda.is_available() and sends_rows(
            torch.device("cuda", torch.cuda.current_device()), dtype
        )
        try:
            figures = machine_named(current_config().machine)
        except ConfigError as error:
            return NO_OVERLAP, str(error)
        return choose_schedule(*shape, dist.get_world_size(group), sends, figures), ""

    chosen, failure = agreement(group).first("schedule of an MoE layer", found())
    if failure:
        raise ConfigError(failure)
    schedule: Schedule = chosen
    return schedule


class SizedBuffers:
    """The NVLink buffers of one layer, sized by its first forward: by the rank that then has most
    tokens. Where a later one brings more to any rank, all ranks make larger ones together.

    Args:
        ffn, top_k, experts: F, K and E of the layer.
        factor: how many times the tokens of the first forward a later one may bring before that.

    Attributes:
        buffers: None before the first forward.
    """

    def __init__(
        self, group: dist.ProcessGroup, ffn: int, top_k: int, experts: int, factor: int = 1
    ) -> None:
        self._group, self._factor = group, factor
        self._shape = (ffn, top_k, experts)
        self.buffers: NvlinkBuffers | None = None

    def of(self, tokens: int, hidden: int, dtype: torch.dtype) -> NvlinkBuffers:
        """The buffers of a call with `tokens` of this rank. Collective the first time."""
        if self.buffers is None:
            self._make(tokens, self._factor, hidden, dtype)
        assert self.buffers is not None
        return self.buffers

    def grow(self, tokens: int) -> NvlinkBuffers:
        """Buffers for the rank that has most tokens, `tokens` being those of this one. Collective:
        every rank has learnt from the plan of a call that some rank's tokens do not fit."""
        assert self.buffers is not None
        self._make(tokens, 1, self.buffers.hidden, self.buffers.dtype)
        return self.buffers

    def _make(self, tokens: int, factor: int, hidden: int, dtype: torch.dtype) -> None:
        sizes = agreement(self._group).gather("tokens of an MoE layer", tokens)
        most = max(*sizes, 1) * factor
        self.buffers = shared_buffers(self._group, most, hidden, *self._shape, dtype=dtype)
