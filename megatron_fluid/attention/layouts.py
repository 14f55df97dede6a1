"""Who holds which heads and which positions, under Ulysses sequence parallelism.

Legend: S sequence, W ranks, H hidden, D head dim, Dv that of values (D but for latent attention),
Hq query heads, Hkv key/value heads, n query heads of one key/value head.

Between layers a rank holds a shard of the positions and every head (sequence-parallel); inside
attention it holds every position and a share of the heads (head-parallel). The fused QKV weight is
[(Hq + 2 Hkv) D, H] in Megatron's row order: for each key/value head its n query heads, then its
key, then its value. A rank's share of that weight is a contiguous block of rows whenever W divides
Hkv, so its part of the projection is one GEMM whose result is sent as it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = ["HeadLayout", "HeadPart", "SequenceLayout"]


@dataclass(frozen=True)
class HeadPart:
    """The heads that one rank attends in one head group, and where their weights stand.

    A packed activation of this part has ``width`` columns: for each key/value head its query heads,
    its key and its value (``[kv, n + 2, D]`` where Dv is D).
    """

    q_heads: range
    kv_heads: range
    qkv_rows: tuple[slice, ...]  # rows of the fused QKV weight, in packed order
    head_dim: int
    value_dim: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Tables are found by parts, several times a call."""
        return hash((self.q_heads, self.kv_heads, self.qkv_rows, self.head_dim, self.value_dim))

    @cached_property
    def width(self) -> int:
        return sum(heads * width for heads, width in self.shapes)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, width of one) of queries, keys and values."""
        pairs = len(self.kv_heads)
        return (len(self.q_heads), self.head_dim), (pairs, self.head_dim), (pairs, self.value_dim)

    @property
    def output_width(self) -> int:
        return len(self.q_heads) * self.value_dim

    @property
    def head_slice(self) -> slice:
        """Its query heads among all."""
        return slice(self.q_heads.start, self.q_heads.stop)

    @property
    def output_columns(self) -> slice:
        """Columns of the output projection's weight [H, Hq Dv] that this part's attention output
        multiplies."""
        return slice(self.q_heads.start * self.value_dim, self.q_heads.stop * self.value_dim)

    def columns(self, of_output: bool) -> tuple[slice, ...]:
        """Where this part's columns stand among those of all heads: of the attention output, or
        fused query/key/value columns."""
        return (self.output_columns,) if of_output else self.qkv_rows

    def weight(self, fused: Tensor) -> Tensor:
        """The part's rows of a fused QKV weight [(Hq + 2 Hkv) D, ...] or bias: a view if they are
        contiguous, else a copy."""
        if len(self.qkv_rows) == 1:
            return fused[self.qkv_rows[0]]
        return torch.cat([fused[rows] for rows in self.qkv_rows])


@dataclass(frozen=True)
class HeadLayout:
    """The distribution of heads over the ranks of a context-parallel group.

    Args:
        num_heads: query heads; W must divide it.
        num_kv_heads: key/value heads; must divide ``num_heads``, and be a multiple or a divisor of
            W. Heads that several ranks need are projected for each of them, and their gradients
            summed.
        head_dim: D.
        world: W.
        groups: head groups a rank's heads are cut into, along key/value heads; each is exchanged
            and attended on its own, so that one moves while another is computed. At most the
            key/value heads of a rank.
        value_dim: Dv; None: D.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    world: int
    groups: int = 1
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("num_heads", "num_kv_heads", "head_dim", "world", "groups", "value_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError.of(name, value, "an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            allowed = f"divisors of num_heads {self.num_heads}"
            raise ConfigError.of("num_kv_heads", self.num_kv_heads, allowed)
        if self.num_heads % self.world:
            ranks = f"the context-parallel size {self.world}"
            allowed = f"multiples of {ranks}, as attention is head-parallel"
            raise ConfigError.of("num_heads", self.num_heads, allowed)
        if not self.disjoint and self.world % self.num_kv_heads:
            allowed = f"multiples and divisors of the context-parallel size {self.world}"
            raise ConfigError.of("num_kv_heads", self.num_kv_heads, allowed)
        if self.groups > self.most_groups:
            found = f"{self.num_kv_heads} key/value heads on {self.world} ranks"
            allowed = f"1 to {self.most_groups} with {found}, as a key/value head is not cut"
            raise ConfigError.of("head_groups", self.groups, allowed)

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused QKV weight."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.dv

    @property
    def dv(self) -> int:
        """Dv, the width of a head of values and of the output."""
        assert self.value_dim is not None
        return self.value_dim

    @property
    def output_columns(self) -> int:
        """Columns of the attention output of all heads."""
        return self.num_heads * self.dv

    @property
    def unit(self) -> int:
        """The widest piece that all heads are made of: D where Dv is D."""
        return math.gcd(self.head_dim, self.dv)

    @property
    def single(self) -> bool:
        """Whether one part is the whole of the projections: one rank and one head group."""
        return self.world == 1 and self.groups == 1

    @property
    def disjoint(self) -> bool:
        """Whether the parts cut the fused QKV weight into contiguous blocks, none shared by two
        ranks."""
        return self.num_kv_heads % self.world == 0

    @property
    def most_groups(self) -> int:
        """The most head groups that a rank's heads can be cut into."""
        return self.num_kv_heads // self.world if self.disjoint else 1

    @cached_property
    def _parts(self) -> tuple[tuple[HeadPart, ...], ...]:
        groups, ranks = range(self.groups), range(self.world)
        return tuple(tuple(self._make(rank, group) for group in groups) for rank in ranks)

    def part(self, rank: int, group: int = 0) -> HeadPart:
        """The heads that ``rank`` attends in head group ``group``."""
        return self._parts[rank][group]

    def _make(self, rank: int, group: int) -> HeadPart:
        n, dim, dv = self.num_heads // self.num_kv_heads, self.head_dim, self.dv
        of_kv = (n + 1) * dim + dv  # rows of a key/value head with its queries
        if self.disjoint:
            each = self.num_kv_heads // self.world
            low, high = (rank * each + each * g // self.groups for g in (group, group + 1))
            kv_heads, q_heads = range(low, high), range(low * n, high * n)
            rows: tuple[slice, ...] = (slice(low * of_kv, high * of_kv),)
        else:
            each = self.num_heads // self.world
            q_heads = range(rank * each, (rank + 1) * each)
            kv = q_heads.start // n
            kv_heads = range(kv, kv + 1)
            query, key = kv * of_kv + q_heads.start % n * dim, kv * of_kv + n * dim
            value = key + dim
            rows = slice(query, query + each * dim), slice(key, value), slice(value, value + dv)
        return HeadPart(q_heads, kv_heads, rows, dim, dv)


@dataclass(frozen=True)
class SequenceLayout:
    """The distribution of a sequence's positions over the ranks of a context-parallel group.

    Args:
        length: S, positions of the whole sequence; 0 or more.
        world: W.
        kind: "contiguous": rank r holds the r-th of W consecutive shards. "zigzag": the sequence is
            cut into 2 W chunks and rank r holds chunk r, then chunk 2 W - 1 - r (Megatron's layout,
            which balances a causal mask over ring attention).

    Where the cut is not even, the first shards (chunks) are one position longer.
    """

    length: int
    world: int
    kind: str = "contiguous"

    def __post_init__(self) -> None:
        # A table by length must never find the 4.0 of another call in the place of a 4.
        if isinstance(self.length, bool | Tensor) or not hasattr(self.length, "__index__"):
            raise ConfigError.of("sequence_length", self.length, "an integer, or None")
        if self.kind not in ("contiguous", "zigzag"):
            raise ConfigError.of("sequence_layout", self.kind, "'contiguous', 'zigzag'")
        if self.length < 0 or self.world < 1:
            found = f"{self.length} on {self.world} ranks"
            raise ConfigError.of("sequence_length", found, "0 or more on 1 or more ranks")

    @cached_property
    def _spans(self) -> tuple[tuple[slice, ...], ...]:
        # One rank has the whole sequence in one piece, whatever the layout.
        straight = self.kind == "contiguous" or self.world == 1
        pieces = self.world if straight else 2 * self.world
        cuts = [self._cut(i, pieces) for i in range(pieces + 1)]
        chunk = [slice(a, b) for a, b in pairwise(cuts)]
        if straight:
            return tuple((chunk[rank],) for rank in range(self.world))
        return tuple((chunk[rank], chunk[2 * self.world - 1 - rank]) for rank in range(self.world))

    def _cut(self, index: int, pieces: int) -> int:
        each, longer = divmod(self.length, pieces)
        return index * each + min(index, longer)

    def spans(self, rank: int) -> tuple[slice, ...]:
        """The positions of ``rank`` as slices of the sequence, in the order in which it holds
        them."""
        return self._spans[rank]

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sum(span.stop - span.start for span in spans) for spans in self._spans)

    def local_length(self, rank: int) -> int:
        return self._lengths[rank]

    def chunk(self, rank: int, index: int, count: int) -> slice:
        """The ``index``-th of ``count`` nearly equal pieces of the rank's local rows."""
        rows = self.local_length(rank)
        return slice(rows * index // count, rows * (index + 1) // count)

    def pieces(self, rank: int, rows: slice | None = None) -> list[tuple[slice, slice]]:
        """(local rows, positions) pairs that cover the rank's local ``rows`` (all by default); each
        is consecutive in both."""
        low, high = (0, self.local_length(rank)) if rows is None else (rows.start, rows.stop)
        result, start = [], 0
        for span in self._spans[rank]:
            stop = start + span.stop - span.start
            a, b = max(low, start), min(high, stop)
            if a < b:
                result.append((slice(a, b), slice(span.start + a - start, span.start + b - start)))
            start = stop
        return result

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of the rank's local rows, int64 [local_length]."""
        spans = self._spans[rank]
        return torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of all ranks' rows, rank after rank, int64 [S]: shards concatenated are the
        sequence indexed by this."""
        return torch.cat([self.positions(rank, device) for rank in range(self.world)])
