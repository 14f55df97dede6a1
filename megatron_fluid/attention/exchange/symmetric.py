"""``HeadExchange`` over symmetric memory inside one NVLink domain: few launches, no permutation
pass, no NCCL.

Two ways to move, chosen by bytes (``choose_mover``):
    push    one projection of all heads, then one kernel that writes every head into its rank's
    memory. Fewest launches. engine  a projection for each peer, and the copy engine moves one while
    the next is computed; takes no SMs. Rows go back
            the same way while the next head group is attended, or (backward) while dW of the output
            projection is computed.

What arrives lies in a landing zone, rows by source. One kernel takes it from there: order of
positions, norm, rotation, the layout that the attention kernel reads; or, on the way back, all
heads side by side. So zones hold nothing after an exchange, and all layers and microbatches share
them: one for heads, one for the rows of each head group.

Legend: S positions, s rows of this rank, B batch, W ranks, D head dim; a slot is a head's place in
a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from megatron_fluid.attention.exchange.buffers import HeadBuffers
from megatron_fluid.attention.exchange.rounds import Prepare, Projection, matmul
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.packed import aligned_heads, ceil_div, head_strides, pack_in_one_pass
from megatron_fluid.attention.table_cache import capturing, keep
from megatron_fluid.attention.tables import (
    APART,
    FUSED,
    OUTPUT,
    SPLIT,
    ExchangeTables,
    exchange_tables,
)
from megatron_fluid.cuda.streams import current_stream
from megatron_fluid.cuda.triton_launch import power_of_two
from megatron_fluid.kernels.head_exchange import arrive_heads, arrive_rows, push_heads, push_rows

__all__ = ["SymmetricExchange", "choose_groups", "choose_mover", "heads_unsupported_reason"]

_ROWS = 32  # rows of a program's tile
_HEADS = 4  # slots of a program that rotates: the angles are loaded once for them
_ENGINE_BYTES = (
    16 << 20
)  # below this a push kernel is done before the copies would have been set up


def choose_mover(mover: str, sent_bytes: int) -> str:
    """ "push" or "engine" for an exchange in which a rank sends this many bytes."""
    if mover != "auto":
        return mover
    return "engine" if sent_bytes >= _ENGINE_BYTES else "push"


def choose_groups(heads: HeadLayout, length: int, batch: int, itemsize: int) -> int:
    """Head groups for a sequence, all alike: the output of one moves while another is attended,
    where that is worth a launch."""
    sent = (
        length
        * batch
        * heads.num_heads
        * heads.head_dim
        * itemsize
        // heads.world
        * (heads.world - 1)
        // heads.world
    )
    most = heads.num_kv_heads // heads.world if heads.disjoint else 1
    return next(
        groups
        for groups in (4, 2, 1)
        if groups == 1 or (most % groups == 0 and sent >= groups * _ENGINE_BYTES)
    )


def heads_unsupported_reason(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the symmetric exchange cannot serve heads of this size; None if it can."""
    if head_dim * dtype.itemsize % 16:
        return f"a head of {head_dim} {dtype} values is not a multiple of 16 bytes"
    return None


def _wide(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


class _Moving:
    """The copy stream's work of one exchange."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def wait(self) -> None:
        if self.event is not None:
            self.event.wait(current_stream())

    def done(self) -> bool:
        return self.event is None or self.event.query()


@dataclass
class _Sent:
    """An exchange under way: its zone, and what the copy stream still reads (``held``)."""

    domain: HeadBuffers
    zone: str
    landing: Tensor
    use: int
    moving: _Moving | None = None
    proved: dict[str, int] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)

    def pending(self) -> list[_Moving]:
        return [] if self.moving is None else [self.moving]

    def close_copies(self) -> None:
        """On the copy stream, after its copies: tell the peers, and wait for theirs. The current
        stream does not wait."""
        side = self.domain.side
        self.proved = self.domain.meet(self.zone, side)
        self.moving = _Moving(None if side is None else side.record_event())

    def arrive(self) -> None:
        """Order the current stream after the arrival of everything."""
        self.domain.expect(self.zone, self.use)
        if self.moving is None:
            self.proved = self.domain.meet(self.zone)
        else:
            self.moving.wait()
        self.held.clear()

    def read(self) -> None:
        self.domain.read(self.zone, self.proved)


@dataclass
class _Heads:
    """Heads under way; the first ``take`` takes all head groups out of the landing zone, and each
    ``take`` lets go of one."""

    exchange: SymmetricExchange
    sent: _Sent
    kind: str
    batch: int
    taken: list[tuple[Tensor | None, Tensor] | None] | None = None

    def pending(self) -> list[_Moving]:
        return self.sent.pending()

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        if self.taken is None:
            raw, packed = self.exchange.take_heads(self.sent, self.kind, self.batch, prepare)
            self.taken = list(zip(self._groups(raw), self._groups(packed), strict=True))  # type: ignore[arg-type]
        # Written and read on the current stream alone: what the caller lets go of may be given out
        # again at once.
        mine, self.taken[group] = self.taken[group], None
        assert mine is not None, "a head group is taken once"
        return mine

    def _groups(self, flat: Tensor | None) -> Sequence[Tensor | None]:
        """The head groups of a flat buffer, each [S, B, C]."""
        slots = self.exchange.tables(self.kind).own_slots
        if flat is None:
            return [None] * len(slots)
        length, dim = self.exchange.sequence.length, self.exchange.heads.head_dim
        if len(slots) == 1:
            return [flat.view(length, self.batch, slots[0] * dim)]
        pieces = list(flat.split([length * self.batch * count * dim for count in slots]))
        if self.kind == APART:
            # Transformer Engine takes q, k, v that lie one after the other from the beginning of a
            # storage: each group gets one.
            pieces[1:] = [torch.from_dlpack(piece) for piece in pieces[1:]]
        return [
            piece.view(length, self.batch, n * dim) for piece, n in zip(pieces, slots, strict=True)
        ]


@dataclass
class _Rows:
    """One head group's rows under way, with the buffer they are sent from."""

    sent: _Sent
    buffer: Tensor

    def pending(self) -> list[_Moving]:
        return self.sent.pending()


class SymmetricExchange:
    """``HeadExchange`` over a ``HeadBuffers``, for one layout; calls share it.

    Args:
        domain: zones and flags of the context-parallel group.
        heads: who attends which heads; ``head_dim`` values must be a multiple of 16 bytes.
        sequence: who holds which positions.
        apart: lay queries, keys and values out one after the other, for attention kernels that read
            each for itself; not with a norm of queries and keys.
    """

    late_weight_gradient = True

    def __init__(
        self, domain: HeadBuffers, heads: HeadLayout, sequence: SequenceLayout, apart: bool = False
    ) -> None:
        self.domain, self.heads, self.sequence, self.rank = domain, heads, sequence, domain.rank
        self.apart = apart
        self._tables: dict[str, ExchangeTables] = {}
        self._copies: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}

    def tables(self, kind: str) -> ExchangeTables:
        found = self._tables.get(kind)
        if found is None:
            made = exchange_tables(
                self.heads, self.sequence, self.rank, kind, self.domain.workspace.device
            )
            found = self._tables[kind] = made
        elif capturing():
            keep(found)  # also when this exchange is gone
        return found

    def _mover(self, like: Tensor, positions: int, slots: int) -> str:
        """How to move this many (position, slot) pairs of a whole group of ranks, of which 1 / W
        stays. Alike on all ranks."""
        size = positions * like.shape[1] * slots * self.heads.head_dim * like.element_size()
        return choose_mover(self.domain.mover, size * (self.domain.world - 1) // self.domain.world)

    # ---- SP2HP
    # -------------------------------------------------------------------------------------------------------------
    def _claim_heads(self, like: Tensor, tables: ExchangeTables) -> _Sent:
        numel = self.sequence.length * like.shape[1] * tables.max_slots * self.heads.head_dim
        return _Sent(self.domain, "heads", *self.domain.claim("heads", numel, like.dtype))

    def project(self, operation: str, x: Tensor, projection: Projection, chunks: int = 1) -> _Heads:
        kind = OUTPUT if projection.of_output else APART if self.apart else FUSED
        tables = self.tables(kind)
        sent = self._claim_heads(x, tables)
        rows, batch = x.shape[:2]
        if (
            self._mover(x, ceil_div(self.sequence.length, self.domain.world), tables.columns)
            == "engine"
        ):
            self._copy_parts(sent, x, projection, tables)
        else:
            whole = x.new_empty((rows, batch, tables.columns * self.heads.head_dim))
            matmul(x, projection, whole)
            by_head = whole.view(rows, batch, tables.columns, self.heads.head_dim)
            self._push_heads(sent, tables, by_head, by_head, by_head)
        return _Heads(self, sent, kind, batch)

    def _copy_parts(
        self, sent: _Sent, x: Tensor, projection: Projection, tables: ExchangeTables
    ) -> None:
        """Project each peer's part, and let the copy engine move it while the next is computed; own
        part last, in place."""
        (rows, batch, depth), rank, domain = x.shape, self.rank, self.domain
        places, size, flat = (
            domain.places(sent.zone, x.dtype),
            x.element_size(),
            x.reshape(-1, depth),
        )
        before = sum(self.sequence.local_length(r) for r in range(rank)) * batch

        def of(peer: int) -> Projection:
            columns = self.heads.block(peer, projection.of_output)
            if columns is None:
                return projection.part(self.heads.part(peer))
            bias = None if projection.bias is None else projection.bias[columns]
            return Projection(projection.matrix[:, columns], bias, projection.of_output)

        for step in range(1, domain.world):
            peer = (rank + step) % domain.world
            theirs = of(peer)
            width = theirs.matrix.shape[1]
            part = x.new_empty((rows * batch, width))
            matmul(flat, theirs, part)
            place = places[peer] + before * width * size
            domain.driver.copy(place, part.data_ptr(), part.nbytes, domain.fork())
            sent.held.append(part)
        mine = of(rank)
        width = mine.matrix.shape[1]
        matmul(
            flat,
            mine,
            sent.landing[before * width : (before + rows * batch) * width].view(-1, width),
        )
        sent.close_copies()

    def _push_heads(
        self, sent: _Sent, tables: ExchangeTables, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        rows, batch, _, dim = q.shape
        world = self.domain.world
        blocks = ceil_div(rows * batch, _ROWS)
        if blocks == 0:
            return
        tensors = (q, k, v, self.domain.addresses(sent.zone, q.dtype), tables.push, tables.spans)
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
        self, sent: _Sent, kind: str, batch: int, prepare: Prepare | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """This rank's heads at every position, flat, as the tables of ``kind`` lay them out; before
        it, without the norm."""
        tables, dim = self.tables(kind), self.heads.head_dim
        prepare = Prepare() if prepare is None else prepare
        slots, total = sum(tables.own_slots), self.sequence.length * batch
        target = torch.empty(
            total * slots * dim, dtype=sent.landing.dtype, device=sent.landing.device
        )
        norm = prepare.q_norm is not None
        assert norm == (prepare.k_norm is not None), "queries and keys are normalised alike"
        assert not (norm and kind == APART), (
            "the backward of a norm reads its input by key/value heads"
        )
        raw = torch.empty_like(target) if norm else None
        sent.arrive()
        blocks = ceil_div(tables.max_rows * batch, _ROWS)
        if blocks:
            table = prepare.table
            half = 0 if table is None else table.cos.shape[1]
            rest = dim - 2 * half
            q_norm, k_norm = (target if w is None else w for w in (prepare.q_norm, prepare.k_norm))
            angles = (target, target) if table is None else (table.cos, table.sin)
            buffers = (
                sent.landing,
                target,
                target if raw is None else raw,
                tables.arrive,
                tables.spans,
            )
            arrive_heads(
                blocks * self.domain.world * ceil_div(slots, _HEADS),
                (*buffers, q_norm, k_norm, *angles, batch, total),
                EPS=prepare.eps,
                W=self.domain.world,
                SLOTS=slots,
                HEADS=_HEADS,
                D=dim,
                HALF=half,
                HALF_P=power_of_two(max(half, 1)),
                REST_P=power_of_two(max(rest, 1)),
                ROWS=_ROWS,
                NORM=norm,
                RAW=norm,
                INTERLEAVED=table is not None and table.interleaved,
                WIDE=_wide(target.dtype),
            )
        sent.read()
        return raw, target

    # ---- HP2SP
    # -------------------------------------------------------------------------------------------------------------
    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> _Rows:
        return self._send_rows(buffer, group, OUTPUT if of_output else FUSED)

    def _send_rows(self, buffer: Tensor, group: int, kind: str) -> _Rows:
        tables, batch, dim, world = (
            self.tables(kind),
            buffer.shape[1],
            self.heads.head_dim,
            self.domain.world,
        )
        zone, most = f"rows {group}", tables.group_slots[group]
        # Gradients of q, k and v come back through the same zone, and are wider: nothing is to grow
        # in a backward.
        numel = world * tables.max_rows * batch * self.tables(FUSED).group_slots[group] * dim
        sent = _Sent(self.domain, zone, *self.domain.claim(zone, numel, buffer.dtype))
        slots = tables.own_slots[group]
        if self._mover(buffer, self.sequence.length, most) == "engine":
            self._copy_rows(sent, buffer, slots, most)
        elif world > 1 and tables.max_rows * batch:
            blocks = ceil_div(tables.max_rows * batch, _ROWS)
            push_rows(
                blocks * (world - 1) * slots,
                (
                    buffer,
                    self.domain.addresses(zone, buffer.dtype),
                    tables.spans,
                    self.rank,
                    batch,
                    slots,
                ),
                W=world,
                SLOTS=most,
                D=dim,
                DP=power_of_two(dim),
                ROWS=_ROWS,
            )
        return _Rows(sent, buffer)

    def _copy_rows(self, sent: _Sent, buffer: Tensor, slots: int, most: int) -> None:
        domain, row = (
            self.domain,
            buffer.shape[1] * self.heads.head_dim * buffer.element_size(),
        )  # bytes, of one slot
        places, source = domain.places(sent.zone, buffer.dtype), buffer.data_ptr()
        wanted = self.sequence.length, buffer.shape[1], slots * self.heads.head_dim
        assert buffer.is_contiguous() and buffer.shape == wanted, "its rows are copied as they lie"
        stream = domain.fork()
        for peer, place, start, count in self._row_copies(slots, most):
            domain.driver.copy(
                places[peer] + place * row, source + start * row, count * row, stream
            )
        sent.held.append(buffer)
        sent.close_copies()

    def _row_copies(self, slots: int, most: int) -> list[tuple[int, int, int, int]]:
        """(peer, where in its zone, from where in the buffer, how much) of each stretch of rows, in
        rows of one slot."""
        found = self._copies.get((slots, most))
        if found is None:
            peers = [(self.rank + step) % self.domain.world for step in range(1, self.domain.world)]
            found = self._copies[slots, most] = [
                (
                    peer,
                    self.rank * self.sequence.local_length(peer) * most + local.start * slots,
                    positions.start * slots,
                    (positions.stop - positions.start) * slots,
                )
                for peer in peers
                for local, positions in self.sequence.pieces(peer)
            ]
        return found

    def collect(
        self, returning: Sequence[_Rows], of_output: bool, like: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        rows, batch = like.shape[:2]
        kind = OUTPUT if of_output else FUSED
        total = like.new_empty((rows, batch, self.tables(kind).columns * self.heads.head_dim))
        self._collect(returning, kind, total)
        yield slice(0, rows), total

    def _collect(self, returning: Sequence[_Rows], kind: str, total: Tensor) -> None:
        """Put the heads of all ranks where the tables of ``kind`` say in ``total``, which holds [s,
        B, all heads, D]."""
        tables, dim, rows = (
            self.tables(kind),
            self.heads.head_dim,
            self.sequence.local_length(self.rank),
        )
        for group, back in enumerate(returning):
            batch, table = back.buffer.shape[1], tables.rows[group]
            back.sent.arrive()
            blocks = ceil_div(rows * batch, _ROWS)
            if blocks:
                heads = table.shape[0]
                tensors = (
                    back.sent.landing,
                    back.buffer,
                    total,
                    table,
                    tables.slots_of[group],
                    tables.spans,
                )
                arrive_rows(
                    blocks * heads,
                    (*tensors, self.rank, rows * batch, batch, heads),
                    SLOTS=tables.group_slots[group],
                    K=table.shape[1] - 3,
                    D=dim,
                    DP=power_of_two(dim),
                    ROWS=_ROWS,
                    WIDE=_wide(total.dtype),
                )
            back.sent.read()

    # ---- q, k, v apart: core_exchange.CoreExchange
    # ----------------------------------------------------------------------------
    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        tables, batch, dim, length = (
            self.tables(SPLIT),
            q.shape[1],
            self.heads.head_dim,
            self.sequence.length,
        )
        sent = self._claim_heads(q, tables)
        self._push_heads(sent, tables, aligned_heads(q), aligned_heads(k), aligned_heads(v))
        _, flat = self.take_heads(sent, SPLIT, batch)
        parts = [self.heads.part(self.rank, g) for g in range(self.heads.groups)]
        counts = [
            n for part in parts for n in (len(part.q_heads), len(part.kv_heads), len(part.kv_heads))
        ]
        pieces = flat.split([length * batch * count * dim for count in counts])
        ours = [t.view(length, batch, count, dim) for t, count in zip(pieces, counts, strict=True)]
        # Transformer Engine refuses contiguous tensors that begin inside a storage, but for q, k, v
        # one after the other from its beginning, as the first group's are: the others' become
        # storages of their own, in place.
        ours[3:] = [torch.from_dlpack(t) for t in ours[3:]]
        return list(zip(ours[::3], ours[1::3], ours[2::3], strict=True))

    def start_gradients(self, group: int, q: Tensor, k: Tensor, v: Tensor) -> _Rows:
        part = self.heads.part(self.rank, group)
        packed = q.new_empty((q.shape[0], q.shape[1], part.width))
        if packed.numel():
            pack_in_one_pass(q, k, v, part, None, packed, apart=True)
        return self._send_rows(packed, group, SPLIT)

    def finish_gradients(self, started: Sequence[_Rows]) -> tuple[Tensor, Tensor, Tensor]:
        buffer, dim = started[0].buffer, self.heads.head_dim
        rows, batch = self.sequence.local_length(self.rank), buffer.shape[1]
        counts = (self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads)
        total = buffer.new_empty(rows * batch * sum(counts) * dim)
        self._collect(started, SPLIT, total)
        pieces = total.split([rows * batch * count * dim for count in counts])
        whole = [t.view(rows, batch, count, dim) for t, count in zip(pieces, counts, strict=True)]
        return whole[0], whole[1], whole[2]

    def output_to_heads(self, y: Tensor) -> list[Tensor]:
        tables, batch, dim, length = (
            self.tables(OUTPUT),
            y.shape[1],
            self.heads.head_dim,
            self.sequence.length,
        )
        sent = self._claim_heads(y, tables)
        y = aligned_heads(y)
        self._push_heads(sent, tables, y, y, y)
        _, flat = self.take_heads(sent, OUTPUT, batch)
        pieces = flat.split([length * batch * count * dim for count in tables.own_slots])
        return [
            t.view(length, batch, n, dim) for t, n in zip(pieces, tables.own_slots, strict=True)
        ]

    def start_output(self, group: int, y: Tensor) -> _Rows:
        return self._send_rows(y.contiguous().flatten(2), group, OUTPUT)

    def finish_output(self, started: Sequence[_Rows]) -> Tensor:
        buffer, rows = started[0].buffer, self.sequence.local_length(self.rank)
        total = buffer.new_empty((rows, buffer.shape[1], self.heads.num_heads, self.heads.head_dim))
        self._collect(started, OUTPUT, total)
        return total
