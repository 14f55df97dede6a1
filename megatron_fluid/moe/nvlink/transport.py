"""The NVLink transport: tokens move over symmetric memory, sent by kernels of this project.

    buffers = shared_buffers(group, max_tokens, hidden, ffn, top_k, num_experts)  # collective, once
    y = run_experts(call, NvlinkTransport(buffers, topk_ids))

Exact mode (capacity None) sizes activations by the rows that arrive; the host reads the experts'
row counts while tokens are on the wire. Bounded mode (capacity = rows for this rank) reads nothing
on the host where one GEMM takes all experts (bf16, stacked), so forward and backward can be
captured in a CUDA graph; rows over the capacity contribute nothing and are reported by
`buffers.check_overflow()`. A graph holds the addresses of the moment: larger buffers that are made
on the same workspace afterwards free them, so make the largest first.

A recomputed layer keeps its routing: `handle = plan_nvlink(buffers, ids, probs)` once, outside the
checkpoint, and `handle=handle` inside.

Shapes: T tokens of this rank, K top-k, El local experts, H hidden, F ffn (F1 = 2F when gated: gate
first), N expert rows of this rank.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import aligned
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.activation.kernel import ACTIVATIONS
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Matrices, Fp8Rows, fp8_sent_matmul
from megatron_fluid.kernels.grouped_gemm.launch import can_send, sent_matmul
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import Matrices, RowGroups, computed_dtype, grouped_product
from megatron_fluid.moe.nvlink.buffers import (
    NvlinkBuffers,
    barrier,
    make_plan,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
)
from megatron_fluid.moe.nvlink.sent_rows import begin_combine, owners, send_rows
from megatron_fluid.moe.nvlink.shared import agreed_buffers
from megatron_fluid.moe.room import LayerRoom, refuse_capture
from megatron_fluid.moe.transport import (
    Backend,
    Exchange,
    ExpertPair,
    MakeTransport,
    Segment,
    TokenTransport,
)

__all__ = ["NvlinkBackend", "NvlinkTransport", "plan_nvlink"]


type Grow = Callable[[int], NvlinkBuffers]  # tokens of this rank -> larger buffers; collective


class NvlinkTransport(TokenTransport):
    """Moves the tokens of one call over NVLink. All sources' rows are one segment. Collective over
    the buffers' ranks, in one stream order.

    Args:
        buffers: of shared_buffers.
        ids: integers, -1 where dropped. A token names an expert once: of more rows than there are
            local experts a token's sum may leave some out. [T, K]
        handle: of plan_nvlink, in place of planning here; the ids and probs must be those it was
            made of.
        capacity: None for exact mode, or the rows of bounded mode.
        grow: makes larger buffers, on all ranks at once, where one has more tokens than these hold
            (NvlinkBackend.grow). In exact mode; None refuses such a call on every rank.
        room: of the layer, which is told the rows of exact mode.
    """

    recomputable = ("rows", "hidden")
    carries_packed_rows = True

    def __init__(
        self, buffers: NvlinkBuffers, ids: Tensor, handle: RoutingHandle | None = None,
        capacity: int | None = None, grow: Grow | None = None, room: LayerRoom | None = None,
    ) -> None:  # fmt: skip
        self.buffers, self.ids, self.handle, self.capacity = buffers, ids, handle, capacity
        self._grow, self.room = grow, room

    @property
    def published(self) -> RoutingHandle:
        """The handle, which a forward has published or was given."""
        assert self.handle is not None
        return self.handle

    def check_experts(self, activation: Activation, num_experts: int, biased: bool) -> None:
        if not activation.built_in or activation.name not in ACTIVATIONS:
            raise ConfigError.of("activation", activation.name, ", ".join(ACTIVATIONS))
        if biased and self.capacity is not None:
            allowed = "None (exact mode) for experts with biases"
            raise ConfigError.of("capacity", self.capacity, allowed)
        if num_experts != self.buffers.local_experts:
            raise ConfigError.of("experts of a rank", num_experts, self.buffers.local_experts)

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H] of the buffers' dtype, probs [T, K].

        Raises:
            ConfigError: they do not fit the buffers.
            PeerTimeoutError: an earlier call of this rank waited for a peer, which did not come.
        """
        assert probs is not None
        probs = probs.float()
        self.buffers.errors.check()
        self._check(x, probs)
        return aligned(x), probs

    def _check(self, x: Tensor, probs: Tensor) -> None:
        # In exact mode the ranks learn from the plan that a rank's tokens are too many.
        buffers, ids, tokens = self.buffers, self.ids, x.shape[0]
        if x.dim() != 2 or x.shape[1] != buffers.hidden or x.dtype != buffers.dtype:
            raise ConfigError.of("x", _shown(x), f"[T, {buffers.hidden}] {buffers.dtype}")
        if self.capacity is not None and tokens > buffers.max_tokens:
            kept = "; with a capacity factor buffers stay as the first call made them"
            raise _too_many(tokens, buffers, kept)
        if ids.shape != (tokens, buffers.top_k) or ids.is_floating_point():
            raise ConfigError.of("topk_ids", _shown(ids), f"integers [{tokens}, {buffers.top_k}]")
        if probs.shape != ids.shape:
            raise ConfigError.of("probs", _shown(probs), f"float32 {tuple(ids.shape)}")

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _NvlinkExchange:
        take_turn(self.buffers, "dispatch")
        if self.handle is not None:
            return _NvlinkExchange(self, x)
        assert probs is not None
        self.handle = publish(self.buffers, self.ids, probs, self.capacity)
        return _NvlinkExchange(self, x, probs)

    def publish_again(self, probs: Tensor | None, wanted: int) -> None:
        """Publish on larger buffers, when the plan says that a rank's tokens do not fit."""
        assert probs is not None
        self.buffers = _grown(self.buffers, self._grow, self.ids.shape[0], wanted)
        take_turn(self.buffers, "dispatch")
        self.handle = publish(self.buffers, self.ids, probs)

    def backward(self, grad: Tensor, keep: bool) -> _NvlinkExchange:
        take_turn(self.buffers, "dispatch")
        return _NvlinkExchange(self, aligned(grad), graded=True)

    def recompute_rows(self, x: Tensor) -> list[Tensor]:
        take_turn(self.buffers, "dispatch")
        _send(self.buffers, self.published, x)
        return [_receive(self.buffers, self.published, x)]  # no combine follows, but a dispatch


class _NvlinkExchange(Exchange):
    """Dispatch and combine of one call and direction.

    Args:
        call: the transport.
        x: what is dispatched. [T, H], or packed rows of fp8
        probs: of a forward whose handle is only published: its tables are made here. In exact mode
            the host then reads the experts' row counts, and where a rank has more tokens than the
            buffers hold, the call is published again.
        graded: the combine brings the gradients of the probabilities, too.
    """

    def __init__(
        self, call: NvlinkTransport, x: Tensor, probs: Tensor | None = None, graded: bool = False
    ) -> None:
        self.call, self.x, self.probs, self.graded = call, x, probs, graded
        self.results: list[Tensor] = []

    def segments(self) -> Iterator[Segment]:
        call, x, probs = self.call, self.x, self.probs
        buffers, handle = call.buffers, call.published
        _send(buffers, handle, x, plan=probs is not None)
        tokens, hidden = handle.num_tokens, buffers.hidden
        self.results = [x.new_empty(tokens, hidden)]
        if self.graded:
            self.results.append(x.new_empty(tokens, buffers.top_k, dtype=torch.float32))
        # The host may wait here. What can be done before is done before: nothing but launches
        # should follow.
        read = probs is not None and call.capacity is None
        if read and (wanted := _read_plan(buffers, handle, call.room)) is not None:
            _receive(buffers, handle, x)  # what is on the wire arrives before memory moves
            call.publish_again(probs, wanted)
            yield from self.segments()
            return
        rows = _receive(buffers, handle, x)
        bounded = handle.ends is None and not self.graded
        likely = buffers.earlier_offsets() if bounded else None
        groups = RowGroups(handle.offsets, handle.ends, likely, handle.row_count)
        yield Segment(rows, groups, handle.row_prob)

    def combine_product(
        self, segment: Segment, x: Tensor | Fp8Rows, matrices: Matrices,
        row_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        buffers, handle = self.call.buffers, self.call.published
        if (sending_product := self._sending_product(x, matrices)) is None:
            self.combine_rows(segment, grouped_product(x, matrices, segment.groups), row_grad)
            return
        take_turn(buffers, "combine")
        begin_combine(buffers, handle, row_grad)
        sending_product(x, matrices, handle.offsets, owners(buffers, handle))

    def _sending_product(
        self, x: Tensor | Fp8Rows, matrices: Matrices
    ) -> Callable[..., None] | None:
        """The grouped GEMM that sends its rows, or None where there is none for these operands."""
        if not self.call.buffers.schedule.sent_rows:
            return None
        if isinstance(x, Fp8Rows) and isinstance(matrices, Fp8Matrices) and x.values.is_cuda:
            return fp8_sent_matmul
        if isinstance(x, Tensor) and isinstance(matrices, Tensor) and can_send(x, matrices):
            return sent_matmul
        return None

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        buffers, handle, rows = self.call.buffers, self.call.published, aligned(rows)
        take_turn(buffers, "combine")
        if buffers.schedule.sent_rows:
            begin_combine(buffers, handle, row_grad)
            send_rows(buffers, handle, rows)
        else:
            reduce_push(buffers, handle, rows, row_grad)

    def finish(self, later: bool = False) -> None:
        # In a backward, after the weight gradients: a peer that is late has had their time to
        # arrive.
        reduce(self.call.buffers, self.call.published, *self.results)


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


def _grown(buffers: NvlinkBuffers, grow: Grow | None, tokens: int, wanted: int) -> NvlinkBuffers:
    """Larger buffers for the `tokens` of this rank, where some rank has `wanted`; or ConfigError,
    on every rank, where nobody makes them."""
    if grow is None:
        raise _too_many(wanted, buffers)
    return grow(tokens)


def _too_many(tokens: int, buffers: NvlinkBuffers, why: str = "") -> ConfigError:
    allowed = f"at most max_tokens = {buffers.max_tokens}{why}"
    return ConfigError.of("tokens of a rank", tokens, allowed)


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _send(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor, plan: bool = False) -> None:
    """Send x [T, H or less], and make the tables of a handle that was only published.

    Streamed, a few SMs push on the side stream while the others plan and then scatter what has
    arrived.
    """
    if buffers.schedule.stream:
        push(buffers, handle, x, streamed=True)
    if plan:
        make_plan(buffers, handle)
    if buffers.ranks > 1 and not buffers.schedule.stream:
        push(buffers, handle, x)


def _receive(buffers: NvlinkBuffers, handle: RoutingHandle, x: Tensor) -> Tensor:
    """The expert rows of what was sent, as wide as x."""
    rows = x.new_empty(handle.buffer_rows, x.shape[1])
    return scatter(buffers, handle, x, rows, streamed=buffers.schedule.stream)


def _read_plan(buffers: NvlinkBuffers, handle: RoutingHandle, room: LayerRoom | None) -> int | None:
    """Wait for the experts' row counts, in exact mode. Return the most tokens that a rank brings
    where these are more than the buffers hold, else None."""
    handle.ends = buffers.read_offsets()
    wanted = buffers.most_wanted()
    if wanted is None and room is not None:
        room.saw(handle.ends[-1])
    return wanted


def plan_nvlink(
    buffers: NvlinkBuffers, topk_ids: Tensor, probs: Tensor, capacity: int | None = None,
    grow: Grow | None = None, room: LayerRoom | None = None,
) -> RoutingHandle:  # fmt: skip
    """The routing of one call, for its NvlinkTransport and for that of its recomputation.
    Collective. It belongs to the buffers that `grow` made last, if it did.

    topk_ids integers [T, K], -1 where dropped, and no expert twice for a token; probs [T, K] (their
    values are part of the plan). The call of this handle comes before the next plan on the same
    buffers (and before any other call of the same workspace): peers may still read what was
    published here until that call. room: of the layer, which is told the rows of exact mode.
    """
    while True:
        take_turn(buffers, "plan")
        handle = publish(buffers, topk_ids, probs.detach().float(), capacity)
        make_plan(buffers, handle)
        if capacity is not None:
            return handle
        if (wanted := _read_plan(buffers, handle, room)) is None:
            return handle
        buffers = _grown(buffers, grow, topk_ids.shape[0], wanted)


class NvlinkBackend(Backend):
    """See Backend. The first call sizes the buffers, by the rank that then has most tokens. Where a
    later one brings more to any rank, all ranks make larger ones together. A copy shares the
    buffers, which layers use one after the other.

    Attributes:
        buffers: None before the first call.
    """

    name = "nvlink"
    buffers: NvlinkBuffers | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NvlinkBackend:
        return copy.copy(self)

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        if (buffers := self.buffers) is None:
            tokens, hidden = x.shape
            buffers = self._size(tokens, hidden, computed_dtype(x), self.shape.room)
        capacity = None
        if (factor := self.shape.capacity_factor) is not None:
            buffers.check_overflow()
            capacity = buffers.bounded_rows(factor)
        elif self.shape.captured is not None:
            capacity = self.shape.captured.capacity(buffers)
        # Asked here, and not by `capturing`, to save each call a function.
        initialized = capacity is None and torch.cuda.is_initialized()
        if initialized and torch.cuda.is_current_stream_capturing():
            refuse_capture()
        handle, room = None, self.shape.captured
        if again:
            handle = plan_nvlink(buffers, ids, probs, capacity, self.grow, room)
            assert self.buffers is not None
            buffers = self.buffers
        return functools.partial(NvlinkTransport, buffers, ids, handle, capacity, self.grow, room)

    def grow(self, tokens: int) -> NvlinkBuffers:
        """Buffers for the rank that has most tokens, `tokens` being those of this one. Collective:
        every rank has learnt from the plan of a call that some rank's tokens do not fit."""
        assert self.buffers is not None
        return self._size(tokens, self.buffers.hidden, self.buffers.dtype)

    def _size(self, tokens: int, hidden: int, dtype: torch.dtype, factor: int = 1) -> NvlinkBuffers:
        c = self.shape
        self.buffers = agreed_buffers(
            *(c.group, tokens, hidden, c.ffn, c.top_k, c.num_experts),
            dtype=dtype, by_choice=c.batch_invariant, factor=factor,
        )  # fmt: skip
        return self.buffers

    def check_overflow(self) -> None:
        if self.buffers is not None:
            self.buffers.check_overflow()
