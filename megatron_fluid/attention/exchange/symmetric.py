"""Heads over symmetric memory inside one NVLink domain: few launches, no permutation pass, no NCCL.

Two transports. ``sm_push``: one projection of all heads, then one kernel that stores each head into
its rank's receive buffer. ``copy_engine``: one projection per peer; the copy engine sends each
result while the next is computed, and uses no SM. Its rows travel while the next head group is
attended, or (backward) while dW of the output projection is computed. ``choose_transport`` picks by
message size.

Received heads lie in a receive buffer, rows by source. One kernel reads it: it orders positions,
normalises, rotates and writes the layout that the attention kernel reads; on the way back it puts
all heads side by side. Receive buffers hold nothing after that, so all layers and microbatches
share them: one for heads, one for the rows of each head group.

Legend: attention.exchange.protocol; a slot is a head's index in a buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from megatron_fluid.attention.exchange.buffers import HeadBuffers, Transfer, shared_head_buffers
from megatron_fluid.attention.exchange.protocol import (
    HeadExchange,
    Prepare,
    Projection,
    RowsInFlight,
    groups_that_pay,
    matmul,
)
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.packed import (
    Triple,
    aligned_heads,
    ceil_div,
    head_strides,
    pack_gradients,
    pack_in_one_pass,
    rotary_arguments,
    split_flat,
)
from megatron_fluid.attention.tables import (
    APART,
    FUSED,
    OUTPUT,
    SPLIT,
    ExchangeTables,
    exchange_tables,
    keep,
)
from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
from megatron_fluid.cuda.devices import capturing
from megatron_fluid.cuda.triton_launch import power_of_two
from megatron_fluid.kernels.head_exchange.launch import (
    arrive_heads,
    arrive_rows,
    push_heads,
    push_rows,
)

__all__ = ["SymmetricExchange", "choose_transport"]

_ROWS = 32  # rows of a program's tile
_HEADS = 4  # slots of a program that rotates: it loads the angles once for them
# Bytes below which sm_push is faster. Measured: docs/tuning_notes.md#attention
_COPY_ENGINE_BYTES = 16 << 20


def choose_transport(transport: str, sent_bytes: int) -> str:
    """Return "sm_push" or "copy_engine" for an exchange in which a rank sends this many bytes."""
    if transport != "auto":
        return transport
    return "copy_engine" if sent_bytes >= _COPY_ENGINE_BYTES else "sm_push"


def _wide(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


@dataclass
class _Heads:
    """Heads in flight. The first ``take`` reads all head groups out of the receive buffer, and each
    ``take`` lets go of one."""

    exchange: SymmetricExchange
    sent: Transfer
    kind: str
    batch: int
    taken: list[tuple[Tensor | None, Tensor] | None] | None = None

    def pending(self) -> list[Transfer]:
        return self.sent.pending()

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        if self.taken is None:
            raw, packed = self.exchange.take_heads(self.sent, self.kind, self.batch, prepare)
            self.taken = list(zip(self._groups(raw), self._groups(packed), strict=True))  # type: ignore[arg-type]
        # Written and read on the current stream alone, so memory that the caller lets go of may be
        # allocated again at once.
        mine, self.taken[group] = self.taken[group], None
        assert mine is not None, "a head group is taken once"
        return mine

    def _groups(self, flat: Tensor | None) -> Sequence[Tensor | None]:
        """The head groups of a flat buffer, each [S, B, C]."""
        slots = self.exchange.tables(self.kind).own_slots
        if flat is None:
            return [None] * len(slots)
        length, dim = self.exchange.sequence.length, self.exchange.heads.unit
        if len(slots) == 1:
            return [flat.view(length, self.batch, slots[0] * dim)]
        pieces = list(flat.split([length * self.batch * count * dim for count in slots]))
        if self.kind in (APART, SPLIT):
            # Transformer Engine takes q, k, v that lie one after the other from the beginning of a
            # storage: each group gets a storage.
            pieces[1:] = [torch.from_dlpack(piece) for piece in pieces[1:]]
        shapes = [(length, self.batch, count * dim) for count in slots]
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class SymmetricExchange(HeadExchange):
    """``HeadExchange`` over ``HeadBuffers``; all calls of one layout share it.

    Args:
        connection: buffers of the context-parallel group.
        heads, sequence: as of HeadExchange; ``head_dim`` values must be a multiple of 16 bytes.
        apart: lay queries, keys and values out one after the other, for attention kernels that read
            each for itself. Not with a norm of queries and keys.
    """

    late_weight_gradient = True

    def __init__(
        self,
        connection: HeadBuffers,
        heads: HeadLayout,
        sequence: SequenceLayout,
        apart: bool = False,
    ) -> None:
        super().__init__(connection, heads, sequence)
        self.buffers, self.rank, self.apart = connection, connection.rank, apart
        self.group = getattr(connection.workspace, "group", None)
        self._whole = dataclasses.replace(heads, groups=1)  # a rank's head groups together
        self._tables: dict[str, ExchangeTables] = {}
        self._copies: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}

    @classmethod
    def unsupported_reason(
        cls, group: dist.ProcessGroup, head_dim: int, device_type: str
    ) -> str | None:
        if device_type != "cuda":
            return f"symmetric memory is on CUDA devices, not on {device_type}"
        if head_dim % 8:
            return f"a head of {head_dim} 16-bit values is not a multiple of 16 bytes"
        return symmetric_unsupported_reason(group)

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> HeadBuffers:
        return shared_head_buffers(group)

    @classmethod
    def head_groups(
        cls, connection: Any, heads: HeadLayout, length: int, batch: int, itemsize: int
    ) -> int:
        """More than one where the output of a group is large enough to send while the next group is
        attended."""
        world, values = heads.world, length * batch * heads.output_columns
        sent = values * itemsize // world * (world - 1) // world
        return groups_that_pay(heads, sent, _COPY_ENGINE_BYTES, (4, 2))

    def tables(self, kind: str) -> ExchangeTables:
        found = self._tables.get(kind)
        if found is None:
            device = self.buffers.workspace.device
            found = exchange_tables(self.heads, self.sequence, self.rank, kind, device)
            self._tables[kind] = found
        elif capturing():
            keep(found)  # also when this exchange is gone
        return found

    def _transport(self, like: Tensor, positions: int, slots: int) -> str:
        """The transport for this many (position, slot) pairs of a whole group of ranks, of which
        1 / W stays. Alike on all ranks."""
        size = positions * like.shape[1] * slots * self.heads.unit * like.element_size()
        world = self.buffers.world
        return choose_transport(self.buffers.transport, size * (world - 1) // world)

    # ---- SP2HP
    def _claim_heads(self, like: Tensor, tables: ExchangeTables) -> Transfer:
        numel = self.sequence.length * like.shape[1] * tables.max_slots * self.heads.unit
        return self.buffers.transfer("heads", numel, like.dtype)

    def _kind(self, of_output: bool) -> str:
        return OUTPUT if of_output else APART if self.apart else FUSED

    def project(self, operation: str, x: Tensor, projection: Projection, chunks: int = 1) -> _Heads:
        kind = self._kind(projection.of_output)
        tables = self.tables(kind)
        positions = ceil_div(self.sequence.length, self.buffers.world)
        if self._transport(x, positions, tables.columns) != "copy_engine":
            return super().project(operation, x, projection)  # type: ignore[return-value]
        sent = self._claim_heads(x, tables)
        self._copy_parts(sent, x, projection)
        return _Heads(self, sent, kind, x.shape[1])

    def send_heads(self, operation: str, whole: Tensor, of_output: bool) -> _Heads:
        kind = self._kind(of_output)
        tables, batch = self.tables(kind), whole.shape[1]
        sent = self._claim_heads(whole, tables)
        shape = (whole.shape[0], batch, tables.columns, self.heads.unit)
        by_head = aligned_heads(whole.reshape(shape))
        self._push_heads(sent, tables, by_head, by_head, by_head)
        return _Heads(self, sent, kind, batch)

    def _copy_parts(self, sent: Transfer, x: Tensor, projection: Projection) -> None:
        """Project each peer's part, and let the copy engine send it while the next is computed; own
        part last, in place."""
        (rows, batch, depth), rank, buffers = x.shape, self.rank, self.buffers
        addresses, size = buffers.addresses(sent.name, x.dtype), x.element_size()
        flat = x.reshape(-1, depth)
        before = sum(self.sequence.local_length(r) for r in range(rank)) * batch

        for step in range(1, buffers.world):
            peer = (rank + step) % buffers.world
            theirs = projection.part(self._whole.part(peer))
            width = theirs.matrix.shape[1]
            part = x.new_empty((rows * batch, width))
            matmul(flat, theirs, part)
            target = addresses[peer] + before * width * size
            buffers.driver.copy(target, part.data_ptr(), part.nbytes, buffers.fork())
            sent.held.append(part)
        mine = projection.part(self._whole.part(rank))
        width = mine.matrix.shape[1]
        own = sent.received[before * width : (before + rows * batch) * width]
        matmul(flat, mine, own.view(-1, width))
        sent.close_copies()

    def _push_heads(
        self, sent: Transfer, tables: ExchangeTables, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        rows, batch, _, dim = q.shape
        world = self.buffers.world
        blocks = ceil_div(rows * batch, _ROWS)
        if blocks == 0:
            return
        tensors = (q, k, v, self.buffers.pointers(sent.name, q.dtype), tables.push, tables.spans)
        strides = (*head_strides(q), *head_strides(k), *head_strides(v))
        push_heads(
            blocks * world * tables.max_slots,
            (*tensors, self.rank, rows, batch, *strides),
            W=world,
            SLOTS=tables.max_slots,
            D=dim,
            DP=power_of_two(dim),
            VEC=16 // q.element_size(),
            ROWS=_ROWS,
        )

    def take_heads(
        self, sent: Transfer, kind: str, batch: int, prepare: Prepare | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """This rank's heads at every position, flat, as the tables of ``kind`` lay them out: before
        the norm (None without one), and prepared."""
        tables, dim = self.tables(kind), self.heads.unit
        prepare = Prepare() if prepare is None else prepare
        slots, total = sum(tables.own_slots), self.sequence.length * batch
        target = sent.received.new_empty(total * slots * dim)
        norm = prepare.norm
        assert norm is None or kind != APART, "a norm's backward reads its input by key/value heads"
        raw = None if norm is None else torch.empty_like(target)
        sent.wait()
        blocks = ceil_div(tables.max_rows * batch, _ROWS)
        if blocks:
            weights = (target, target) if norm is None else (norm.q_weight, norm.k_weight)
            angles, sizes, interleaved = rotary_arguments(prepare.table, target, dim)
            buffers = (sent.received, target, target if raw is None else raw)
            arrive_heads(
                blocks * self.buffers.world * ceil_div(slots, _HEADS),
                (*buffers, tables.arrive, tables.spans, *weights, *angles, batch, total),
                EPS=1e-6 if norm is None else norm.eps,
                W=self.buffers.world,
                SLOTS=slots,
                HEADS=_HEADS,
                D=dim,
                **sizes,
                ROWS=_ROWS,
                NORM=norm is not None,
                INTERLEAVED=interleaved,
                WIDE=_wide(target.dtype),
            )
        sent.mark_read()
        return raw, target

    # ---- HP2SP
    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> RowsInFlight:
        return self._send_rows(buffer, group, OUTPUT if of_output else FUSED)

    def _send_rows(self, buffer: Tensor, group: int, kind: str) -> RowsInFlight:
        tables, batch, dim = self.tables(kind), buffer.shape[1], self.heads.unit
        name, most, world = f"rows {group}", tables.group_slots[group], self.buffers.world
        # Gradients of q, k and v use the same receive buffer and are wider. It is claimed at their
        # size, as a backward must not make it grow.
        numel = world * tables.max_rows * batch * self.tables(FUSED).group_slots[group] * dim
        sent = self.buffers.transfer(name, numel, buffer.dtype)
        slots = tables.own_slots[group]
        if self._transport(buffer, self.sequence.length, most) == "copy_engine":
            self._copy_rows(sent, buffer, slots, most)
        elif world > 1 and tables.max_rows * batch:
            blocks = ceil_div(tables.max_rows * batch, _ROWS)
            pointers = self.buffers.pointers(name, buffer.dtype)
            push_rows(
                blocks * (world - 1) * slots,
                (buffer, pointers, tables.spans, self.rank, batch, slots),
                W=world,
                SLOTS=most,
                D=dim,
                DP=power_of_two(dim),
                ROWS=_ROWS,
            )
        return RowsInFlight(buffer, sent, sent.pending())

    def _copy_rows(self, sent: Transfer, buffer: Tensor, slots: int, most: int) -> None:
        buffers, (length, batch, width) = self.buffers, buffer.shape
        row = batch * self.heads.unit * buffer.element_size()  # bytes, of one slot
        addresses, source = buffers.addresses(sent.name, buffer.dtype), buffer.data_ptr()
        expected = self.sequence.length, slots * self.heads.unit
        assert buffer.is_contiguous() and (length, width) == expected, "rows are copied in place"
        stream = buffers.fork()
        for peer, to, start, count in self._row_copies(slots, most):
            target = addresses[peer] + to * row
            buffers.driver.copy(target, source + start * row, count * row, stream)
        sent.held.append(buffer)
        sent.close_copies()

    def _row_copies(self, slots: int, most: int) -> list[tuple[int, int, int, int]]:
        """(peer, index in its receive buffer, index in the sent buffer, count) of each stretch of
        rows, in rows of one slot."""
        found = self._copies.get((slots, most))
        if found is None:
            found = self._copies[slots, most] = []
            for step in range(1, self.buffers.world):
                peer = (self.rank + step) % self.buffers.world
                before = self.rank * self.sequence.local_length(peer) * most
                for local, at in self.sequence.pieces(peer):
                    count = (at.stop - at.start) * slots
                    found.append((peer, before + local.start * slots, at.start * slots, count))
        return found

    def collect(
        self, returning: Sequence[RowsInFlight], of_output: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        kind, first = OUTPUT if of_output else FUSED, returning[0].buffer
        rows = self.sequence.local_length(self.rank)
        columns = self.tables(kind).columns * self.heads.unit
        total = first.new_empty((rows, first.shape[1], columns))
        self._collect(returning, kind, total)
        yield slice(0, rows), total

    def _collect(self, returning: Sequence[RowsInFlight], kind: str, total: Tensor) -> None:
        """Put the heads of all ranks where the tables of ``kind`` say in ``total``, which holds [s,
        B, all heads, D]."""
        tables, dim = self.tables(kind), self.heads.unit
        rows = self.sequence.local_length(self.rank)
        for group, back in enumerate(returning):
            batch, table = back.buffer.shape[1], tables.rows[group]
            back.arrivals.wait()
            blocks = ceil_div(rows * batch, _ROWS)
            if blocks:
                heads = table.shape[0]
                tensors = (
                    back.arrivals.received,
                    back.buffer,
                    total,
                    table,
                    tables.slots_of[group],
                )
                arrive_rows(
                    blocks * heads,
                    (*tensors, tables.spans, self.rank, rows * batch, batch, heads),
                    SLOTS=tables.group_slots[group],
                    K=table.shape[1] - 3,
                    D=dim,
                    DP=power_of_two(dim),
                    ROWS=_ROWS,
                    WIDE=_wide(total.dtype),
                )
            back.arrivals.mark_read()

    # ---- q, k and v apart: their own tables, and no copy into a fused tensor
    def send_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
        tables, batch, dim = self.tables(SPLIT), q.shape[1], self.heads.unit
        sent = self._claim_heads(q, tables)
        self._push_heads(sent, tables, *(aligned_heads(_pieces(t, dim)) for t in (q, k, v)))
        heads, length = _Heads(self, sent, SPLIT, batch), self.sequence.length
        shapes = [self.heads.part(self.rank, g).shapes for g in range(self.heads.groups)]
        taken = (heads.take(g)[1].view(-1) for g in range(self.heads.groups))
        return [split_flat(t, length, batch, s) for t, s in zip(taken, shapes, strict=True)]

    def send_qkv_gradients(self, group: int, dq: Tensor, dk: Tensor, dv: Tensor) -> RowsInFlight:
        part = self.heads.part(self.rank, group)
        packed = dq.new_empty((dq.shape[0], dq.shape[1], part.width))
        if part.value_dim != part.head_dim:
            pack_gradients((dq, dk, dv), part, None, packed)
        elif packed.numel():
            pack_in_one_pass((dq, dk, dv), part, None, packed, apart=True)
        return self._send_rows(packed, group, SPLIT)

    def collect_qkv_gradients(self, returning: Sequence[RowsInFlight]) -> Triple:
        buffer, heads = returning[0].buffer, self.heads
        rows, batch = self.sequence.local_length(self.rank), buffer.shape[1]
        pair = (heads.num_kv_heads, heads.head_dim), (heads.num_kv_heads, heads.dv)
        total = buffer.new_empty(rows * batch * heads.qkv_rows)
        self._collect(returning, SPLIT, total)
        return split_flat(total, rows, batch, [(heads.num_heads, heads.head_dim), *pair])


def _pieces(heads: Tensor, width: int) -> Tensor:
    """Heads [s, B, h, D] as pieces [s, B, h D / width, width]."""
    if heads.shape[3] == width:
        return heads
    return heads.contiguous().unflatten(3, (-1, width)).flatten(2, 3)
