"""Tables on a device: a cache that outlives the CUDA graphs reading it, and the tables of the
kernels of the symmetric exchange.

A unit is a piece's number among those of one tensor: the fused QKV columns (for each key/value head
its n queries, its key, its value), the attention output's Hq heads, or q, k and v apart ("split",
as Megatron has them between projection and attention). "apart" sends fused columns, and lays q, k
and v out one after the other in the target. A piece is a head; where heads of values have a width
of their own, it is ``HeadLayout.unit`` columns of one.

Legend: W ranks, D width of a piece; slot: a piece's index in a rank's packed part; kind: 0 query, 1
key, 2 value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.errors import FluidError

__all__ = [
    "APART",
    "FUSED",
    "OUTPUT",
    "SPLIT",
    "ExchangeTables",
    "cached_tables",
    "capturing",
    "exchange_tables",
    "keep",
    "position_order",
]

FUSED, OUTPUT, SPLIT, APART = "fused", "output", "split", "apart"

_captured: dict[int, object] = {}
"""What captures have read, by identity. A graph holds its addresses, and this process may replay it
as long as it runs."""


def capturing() -> bool:
    """Return whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep(tables: object) -> None:
    """Keep tables that a capture reads until the process ends."""
    _captured[id(tables)] = tables


def cached_tables[T](maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """``functools.lru_cache`` for functions that make tensors: usable under autograd wherever they
    were made, never evicted once a CUDA-graph capture has read them.

    Raises (the decorated function):
        FluidError: tables have to be made inside a capture, where only a replay would fill them.
    """

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(maxsize)
        def cached(*key: object) -> T:
            if capturing():
                raise FluidError(
                    f"{make.__name__}: run attention once at this size before a CUDA-graph capture"
                )
            with torch.inference_mode(False), torch.no_grad():
                return make(*key)

        @functools.wraps(make)
        def get(*key: object) -> T:
            tables = cached(*key)
            if capturing():
                keep(tables)
            return tables

        return get

    return decorate


@cached_tables(64)
def position_order(sequence: SequenceLayout, device: torch.device) -> Tensor:
    """``sequence.order(device)``, kept."""
    return sequence.order(device)


@dataclass(frozen=True)
class ExchangeTables:
    """The int32 tables of one (heads, sequence, rank) for one kind of tensor; see
    kernels.head_exchange for their columns.

    spans: [W, 5]. push: [W, 1 + max_slots]. arrive: [own slots, 4]. rows: one a head group,
    [heads, 3 + K]. slots_of: one a head group, [W]. max_slots, group_slots: the most slots of any
    rank, in all and by group. own_slots: this rank's, by group.
    """

    spans: Tensor
    push: Tensor
    arrive: Tensor
    rows: tuple[Tensor, ...]
    slots_of: tuple[Tensor, ...]
    max_rows: int
    max_slots: int
    group_slots: tuple[int, ...]
    own_slots: tuple[int, ...]
    columns: int  # pieces of the sequence-parallel tensor


def _heads(part: HeadPart, layout: HeadLayout, kind: str) -> list[tuple[int, int]]:
    """(kind, piece) of each slot of a part; a tensor's pieces are numbered head by head."""
    wide, narrow = layout.head_dim // layout.unit, layout.dv // layout.unit
    if kind == OUTPUT:
        return [(0, head * narrow + i) for head in part.q_heads for i in range(narrow)]
    of_queries = layout.num_heads // layout.num_kv_heads * wide
    found = []
    for rows in part.qkv_rows:
        for unit in range(rows.start // layout.unit, rows.stop // layout.unit):
            kv, index = divmod(unit, of_queries + wide + narrow)
            if index < of_queries:
                found.append((0, kv * of_queries + index))
            elif index < of_queries + wide:
                found.append((1, kv * wide + index - of_queries))
            else:
                found.append((2, kv * narrow + index - of_queries - wide))
    return found


def _unit(layout: HeadLayout, kind: str, of: int, piece: int) -> tuple[int, int, int]:
    """(pieces in earlier tensors, piece, pieces of its tensor) in the sequence-parallel tensor or
    tensors."""
    wide, narrow = layout.head_dim // layout.unit, layout.dv // layout.unit
    kv, of_queries = layout.num_kv_heads, layout.num_heads // layout.num_kv_heads * wide
    counts = kv * of_queries, kv * wide, kv * narrow
    if kind == OUTPUT:
        return 0, piece, layout.num_heads * narrow
    if kind == SPLIT:
        return sum(counts[:of]), piece, counts[of]
    before, of_head = (0, of_queries, of_queries + wide)[of], (of_queries, wide, narrow)[of]
    head, index = divmod(piece, of_head)
    return 0, head * (of_queries + wide + narrow) + before + index, sum(counts)


def _spans(sequence: SequenceLayout) -> list[list[int]]:
    lines, before = [], 0
    for rank in range(sequence.world):
        first, *rest = sequence.spans(rank)
        rows, second = sequence.local_length(rank), rest[0].start if rest else 0
        lines.append([before, rows, first.stop - first.start, first.start, second])
        before += rows
    return lines


@cached_tables(256)
def exchange_tables(
    layout: HeadLayout, sequence: SequenceLayout, rank: int, kind: str, device: torch.device
) -> ExchangeTables:
    """The tables of ``rank``; ``kind`` is FUSED, OUTPUT, SPLIT or APART."""
    world, groups = layout.world, range(layout.groups)

    def tensor(lines: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        return torch.tensor(lines, dtype=torch.int32, device=device)

    slots = [[_heads(layout.part(r, g), layout, kind) for g in groups] for r in range(world)]
    counts = [[len(s) for s in by_group] for by_group in slots]
    most = max(sum(c) for c in counts)
    push = []
    for by_group in slots:
        entries = [head for group in by_group for head in group]
        tensors = [of << 24 if kind == SPLIT else 0 for of, _ in entries]
        units = [_unit(layout, kind, of, head)[1] for of, head in entries]
        codes = [tensor | unit for tensor, unit in zip(tensors, units, strict=True)]
        push.append([len(entries), *codes, *[-1] * (most - len(entries))])
    arrive: list[list[int]] = []
    for group in slots[rank]:
        before = len(arrive)
        if kind not in (SPLIT, APART):
            arrive += [[of, before, slot, len(group)] for slot, (of, _) in enumerate(group)]
            continue
        per = [sum(of == kind_ for of, _ in group) for kind_ in range(3)]
        taken = [0, 0, 0]
        for of, _ in group:
            arrive.append([of, before + sum(per[:of]), taken[of], per[of]])
            taken[of] += 1
    group_slots = tuple(max(counts[r][g] for r in range(world)) for g in groups)
    rows = []
    for g in groups:
        sources: dict[tuple[int, int], list[int]] = {}
        for r in range(world):
            for j, head in enumerate(slots[r][g]):
                sources.setdefault(head, []).append(r * group_slots[g] + j)
        several = max(len(s) for s in sources.values())
        padded = {head: [*s, *[-1] * (several - len(s))] for head, s in sources.items()}
        rows.append([[*_unit(layout, kind, *head), *s] for head, s in padded.items()])
    return ExchangeTables(
        spans=tensor(_spans(sequence)),
        push=tensor(push),
        arrive=tensor(arrive),
        rows=tuple(tensor(lines) for lines in rows),
        slots_of=tuple(tensor([counts[r][g] for r in range(world)]) for g in groups),
        max_rows=max(sequence.local_length(r) for r in range(world)),
        max_slots=most,
        group_slots=group_slots,
        own_slots=tuple(counts[rank]),
        columns=(layout.output_columns if kind == OUTPUT else layout.qkv_rows) // layout.unit,
    )
