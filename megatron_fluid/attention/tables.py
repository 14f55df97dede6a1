"""Tables on a device: a cache that outlives the CUDA graphs reading it, and the tables of the
kernels of the symmetric exchange.

A piece is a head; where heads of values have a width of their own, it is ``HeadLayout.unit``
columns of one. Tables are for pieces of one of these tensors: the fused QKV columns (for each
key/value head its n queries, its key, its value), the attention output's Hq heads, or q, k and v
apart ("split", as Megatron has them between projection and attention). "apart" sends fused columns,
and lays q, k and v out one after the other in the target.

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
from megatron_fluid.cuda.devices import capturing
from megatron_fluid.errors import FluidError

__all__ = [
    "APART",
    "FUSED",
    "OUTPUT",
    "SPLIT",
    "ExchangeTables",
    "cached_tables",
    "exchange_tables",
    "keep",
    "position_order",
]

FUSED, OUTPUT, SPLIT, APART = "fused", "output", "split", "apart"

_captured: dict[int, object] = {}
"""What captures have read, by identity. A graph holds its addresses, and this process may replay it
as long as it runs."""


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


type _Piece = tuple[int, int]  # kind, number among the pieces of all heads of this kind


def _tensors(layout: HeadLayout, kind: str) -> list[list[_Piece]]:
    """The pieces of the sequence-parallel tensor or tensors, in their order."""
    wide, narrow = layout.head_dim // layout.unit, layout.dv // layout.unit
    if kind == OUTPUT:
        return [[(0, i) for i in range(layout.num_heads * narrow)]]
    kv = range(layout.num_kv_heads)
    counts = (layout.num_heads // len(kv) * wide, wide, narrow)  # of one key/value head
    if kind == SPLIT:
        return [[(of, i) for i in range(len(kv) * n)] for of, n in enumerate(counts)]
    return [[(of, head * n + i) for head in kv for of, n in enumerate(counts) for i in range(n)]]


def _slots(part: HeadPart, layout: HeadLayout, kind: str) -> list[_Piece]:
    """The piece in each slot of a part."""
    [whole] = _tensors(layout, OUTPUT if kind == OUTPUT else FUSED)
    cuts, unit = part.columns(kind == OUTPUT), layout.unit
    return [piece for cut in cuts for piece in whole[cut.start // unit : cut.stop // unit]]


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

    slots = [[_slots(layout.part(r, g), layout, kind) for g in groups] for r in range(world)]
    counts = [[len(s) for s in by_group] for by_group in slots]
    most = max(sum(c) for c in counts)
    # (pieces in earlier tensors, number in its own, pieces of that) of each
    places: dict[_Piece, tuple[int, int, int]] = {}
    for whole in _tensors(layout, kind):
        before = len(places)
        places |= {piece: (before, i, len(whole)) for i, piece in enumerate(whole)}
    push = []
    for by_group in slots:
        pieces = [piece for group in by_group for piece in group]
        codes = [(piece[0] << 24 if kind == SPLIT else 0) | places[piece][1] for piece in pieces]
        push.append([len(codes), *codes, *[-1] * (most - len(codes))])
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
        sources: dict[_Piece, list[int]] = {}
        for r in range(world):
            for j, piece in enumerate(slots[r][g]):
                sources.setdefault(piece, []).append(r * group_slots[g] + j)
        several = max(len(s) for s in sources.values())
        padded = {piece: [*s, *[-1] * (several - len(s))] for piece, s in sources.items()}
        rows.append([[*places[piece], *s] for piece, s in padded.items()])
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
