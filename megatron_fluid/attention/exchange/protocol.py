"""The protocol of a head exchange: what a transport does between sequence- and head-parallel form.

SP2HP: a rank sends each rank the heads that it attends, and receives its own heads of all rows.
HP2SP, the transpose: a rank sends each peer the peer's rows of its own heads, and receives its own
rows of all heads. Head-parallel buffers are [S, B, columns] in the order of positions,
sequence-parallel ones [s, B, columns].

A transport is one file with a ``HeadExchange``, which implements ``send_heads``, ``send_rows`` and
``collect``, and one row of ``registry.EXCHANGES``.

Legend: S sequence, s local rows, B batch, H hidden, Hq query heads, Hkv key/value heads, hq and hkv
those of a rank's head group, D head dim, W ranks, C columns of a packed part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.attention.packed import (
    Norm,
    RotaryTable,
    Triple,
    normalize,
    pack_gradients,
    rotate_,
    split,
)
from megatron_fluid.backward.weight_grads import Exchange

__all__ = [
    "HeadExchange",
    "HeadsInFlight",
    "Prepare",
    "Projection",
    "RowsInFlight",
    "add_columns",
    "groups_that_pay",
    "matmul",
    "wide_dtype",
]


@dataclass(frozen=True)
class Projection:
    """A projection of rows onto heads: x [r, B, K] -> x @ matrix [K, C] + bias [C].

    ``of_output``: the columns are the heads of the attention output (Hq D); else those of the fused
    QKV weight.
    """

    matrix: Tensor
    bias: Tensor | None
    of_output: bool = False

    def part(self, part: HeadPart) -> Projection:
        """The columns of one part, in its packed order: a view where they are contiguous."""
        cuts = part.columns(self.of_output)
        if len(cuts) == 1:
            bias = None if self.bias is None else self.bias[cuts[0]]
            return Projection(self.matrix[:, cuts[0]], bias, self.of_output)
        bias = None if self.bias is None else part.weight(self.bias)
        return Projection(part.weight(self.matrix.t()).t(), bias)


@dataclass(frozen=True)
class Prepare:
    """What is done to received queries and keys: RMS norm over D, then rotation; each may be
    None."""

    norm: Norm | None = None
    table: RotaryTable | None = None

    def apply(self, raw: Tensor, target: Tensor, part: HeadPart, rows: slice | None = None) -> None:
        """Normalise these rows (None: all) of ``raw`` into ``target`` (the same tensor without a
        norm), and rotate them."""
        norm, table = self.norm, self.table
        if norm is None and table is None:
            return
        if rows is not None:
            raw, target = raw[rows], target[rows]
            table = None if table is None else table.rows(rows)
        if norm is not None:
            normalize(raw, target, part, norm)
        rotate_(target, part, table)


class HeadsInFlight(Protocol):
    """Heads on their way to the ranks that attend them."""

    def pending(self) -> Sequence[Exchange]:
        """What is in flight, for work that may overlap with it."""
        ...

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        """Wait for this rank's heads of a head group, which is taken once. Returns the heads before
        the norm, packed [S, B, C] (None without a norm), and the heads prepared, alike."""
        ...


@dataclass
class RowsInFlight:
    """One head group's rows on their way to the ranks that hold them.

    Attributes:
        buffer: what is sent. [S, B, C]
        arrivals: what the transport receives them by.
        waits: what is in flight, for work that may overlap with it.
    """

    buffer: Tensor
    arrivals: Any
    waits: Sequence[Exchange] = ()


class HeadExchange(ABC):
    """Both directions of the exchange, for one layout of heads and positions.

    Every rank of the group makes the same calls in the same order. Calls raise PeerTimeoutError
    where the transport notices that a peer does not answer.

    Args:
        connection: what all layers of a group share, as ``connect`` returns it.
        heads: who attends which heads.
        sequence: who holds which positions.
    """

    group: Any
    """The process group; None for one rank."""
    rank: int
    heads: HeadLayout
    sequence: SequenceLayout
    late_weight_gradient: ClassVar[bool] = False
    """Whether dW of the output projection overlaps with the return of d-qkv, and not with the
    sending of d-output."""
    apart: bool = False
    """Whether queries, keys and values arrive one after the other (``packed.split_apart``), and not
    by key/value head."""

    def __init__(self, connection: Any, heads: HeadLayout, sequence: SequenceLayout) -> None:
        self.heads, self.sequence = heads, sequence

    @classmethod
    def unsupported_reason(
        cls, group: dist.ProcessGroup, head_dim: int, device_type: str
    ) -> str | None:
        """Return why a group cannot exchange heads of this size on this type of device, or None if
        it can. Collective on GPUs."""
        return None

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> Any:
        """Make what all layers of a group share. Collective the first time."""
        return group

    @classmethod
    def head_groups(
        cls, connection: Any, heads: HeadLayout, length: int, batch: int, itemsize: int
    ) -> int:
        """Return how many head groups pay for a sequence of this length, in values of ``itemsize``
        bytes."""
        return 1

    def project(
        self, operation: str, x: Tensor, projection: Projection, chunks: int = 1
    ) -> HeadsInFlight:
        """Project this rank's rows x [s, B, K], in ``chunks`` where the transport sends pieces, and
        send every rank its heads."""
        whole = x.new_empty((*x.shape[:2], projection.matrix.shape[1]))
        matmul(x, projection, whole)
        return self.send_heads(operation, whole, projection.of_output)

    @abstractmethod
    def send_heads(self, operation: str, whole: Tensor, of_output: bool) -> HeadsInFlight:
        """Send every rank its heads of rows that are projected already, [s, B, all columns]."""

    @abstractmethod
    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> RowsInFlight:
        """Send every peer its rows of ``buffer`` [S, B, C], this rank's heads of a head group."""

    @abstractmethod
    def collect(self, returning: Sequence[Any], of_output: bool) -> Iterable[tuple[slice, Tensor]]:
        """Receive all heads of this rank's rows: yield (rows, whole) as rows of whole [s, B, all
        columns] become complete. ``returning``: of ``send_rows``, every head group in order.

        Gradients of heads that several ranks attend are summed wide and rounded once.
        """

    # Without projections (attention.exchanged): q, k [s, B, Hq or Hkv, D] and v [s, B, Hkv, Dv] of
    # this rank's rows against [S, B, hq or hkv, D or Dv] of a head group.

    def send_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
        """SP2HP of q, k and v: each head group's, contiguous."""
        kv = self.heads.num_kv_heads
        by_kv = q.unflatten(2, (kv, self.heads.num_heads // kv))
        fused = torch.cat([by_kv.flatten(3), k, v], 3).flatten(2)
        sent = self.send_heads("attention qkv", fused, False)
        result = []
        for group in range(self.heads.groups):
            part, (_, packed) = self.heads.part(self.rank, group), sent.take(group)
            q, k, v = (
                t.reshape(*packed.shape[:2], *shape).contiguous()
                for t, shape in zip(split(packed, part), part.shapes, strict=True)
            )
            result.append((q, k, v))
        return result

    def send_qkv_gradients(self, group: int, dq: Tensor, dk: Tensor, dv: Tensor) -> RowsInFlight:
        """HP2SP of one head group's gradients: the transpose of ``send_qkv``."""
        part = self.heads.part(self.rank, group)
        packed = dq.new_empty((*dq.shape[:2], part.width))
        pack_gradients((dq, dk, dv), part, None, packed)
        return self.send_rows("attention d-qkv", group, packed, False)

    def collect_qkv_gradients(self, returning: Sequence[Any]) -> Triple:
        """Receive the gradients of q, k and v; those of shared heads are summed wide."""
        fused = self.collect_all(returning, False)
        shape, kv, dim = fused.shape[:2], self.heads.num_kv_heads, self.heads.head_dim
        sizes = self.heads.num_heads // kv * dim, dim, self.heads.dv
        dq, dk, dv = fused.view(*shape, kv, sum(sizes)).split(sizes, 3)
        return dq.reshape(*shape, self.heads.num_heads, dim), dk.contiguous(), dv.contiguous()

    def collect_all(self, returning: Sequence[Any], of_output: bool) -> Tensor:
        """``collect`` to its end: [s, B, all columns]."""
        *_, (_, whole) = self.collect(returning, of_output)
        return whole


def matmul(x: Tensor, projection: Projection, out: Tensor) -> None:
    """out [r, B, C] = x [r, B, K] @ matrix + bias, in the tensors' dtypes, under autocast too."""
    flat, rows = out.view(-1, out.shape[-1]), x.flatten(0, -2)
    if projection.bias is None:
        torch.mm(rows, projection.matrix, out=flat)
    else:
        torch.addmm(projection.bias, rows, projection.matrix, out=flat)


def groups_that_pay(heads: HeadLayout, sent: int, least: int, numbers: Sequence[int]) -> int:
    """Return the first of these numbers of head groups that the heads can be cut into and that
    leaves messages of at least ``least`` bytes of ``sent``; 1 if there is none."""
    fits = (n for n in numbers if heads.most_groups % n == 0 and sent >= n * least)
    return next(fits, 1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of shared heads are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_columns(
    total: Tensor, part: HeadPart, piece: Tensor, of_output: bool, shared: bool
) -> None:
    """Put (or, for shared heads, add) a part's packed columns where all heads have theirs."""
    start = 0
    for columns in part.columns(of_output):
        mine = piece[..., start : start + columns.stop - columns.start]
        start += columns.stop - columns.start
        if shared:
            total[..., columns] += mine
        else:
            total[..., columns] = mine
