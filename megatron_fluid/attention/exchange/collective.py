"""Attention between two exchanges, for frameworks that project by themselves: q, k, v in, attention
output out, both by rows.

What this has over plain all-to-alls is one exchange for q, k and v, without a permutation pass
before or after (over symmetric memory), each key/value head sent once to each rank that needs it,
and gradients of shared heads summed in fp32. With several head groups the output of one returns
while the next is attended, and in backward its gradients while the next one's are computed.

    exchange = SymmetricExchange(...) or CollectiveExchange(...)
    y = exchanged_attention(exchange, q, k, v, attend)

Legend: S sequence, s local rows, B batch, Hq query heads, Hkv key/value heads, hq and hkv those of
a rank's head group, D head dim, W ranks, G head groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.packed import expand_shared
from megatron_fluid.attention.table_cache import cached_tables
from megatron_fluid.backward.functions import once_differentiable

__all__ = ["CollectiveExchange", "CoreExchange", "exchanged_attention"]

Triple = tuple[Tensor, Tensor, Tensor]


class CoreExchange(Protocol):
    """Both directions for q, k, v and for the attention output; each is the other's gradient."""

    rank: int
    heads: HeadLayout

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
        """[s, B, Hq or Hkv, D], this rank's rows -> for each head group [S, B, hq or hkv, D], in
        the order of positions."""
        ...

    def start_gradients(self, group: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Begin the transpose of ``to_heads`` for one head group."""
        ...

    def finish_gradients(self, started: Sequence[Any]) -> Triple:
        """What was begun for every head group -> [s, B, Hq or Hkv, D]; heads that several ranks
        hold are summed."""
        ...

    def output_to_heads(self, y: Tensor) -> list[Tensor]:
        """[s, B, Hq, D] -> for each head group [S, B, hq, D]."""
        ...

    def start_output(self, group: int, y: Tensor) -> Any:
        """Begin the transpose of ``output_to_heads`` for one head group."""
        ...

    def finish_output(self, started: Sequence[Any]) -> Tensor:
        """What was begun for every head group -> [s, B, Hq, D]."""
        ...


class _Call:
    """One call's exchange, and what is under way in it: output in forward, gradients in backward,
    by head group."""

    def __init__(self, exchange: CoreExchange) -> None:
        self.exchange = exchange
        self.outputs: list[Any] = []
        self.gradients: dict[int, Any] = {}


class _ToHeads(torch.autograd.Function):
    """q, k, v of all head groups; in backward it takes in what ``_Leave`` has sent."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor for group in call.exchange.to_heads(q, k, v) for tensor in group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        started, ctx.call.gradients = ctx.call.gradients, {}
        return None, *ctx.call.exchange.finish_gradients(
            [started[group] for group in sorted(started)]
        )


class _Leave(torch.autograd.Function):
    """Nothing in forward; in backward a head group's gradients leave while the next group's are
    computed."""

    @staticmethod
    def forward(ctx: Any, call: _Call, group: int, q: Tensor, k: Tensor, v: Tensor) -> Triple:
        ctx.call, ctx.group = call, group
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.gradients[ctx.group] = ctx.call.exchange.start_gradients(ctx.group, *grads)
        return None, None, *grads


class _ToRows(torch.autograd.Function):
    """The outputs of all head groups, which are under way already; in backward their gradient, by
    head group."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *ys: Tensor) -> Tensor:
        ctx.call = call
        started, call.outputs = call.outputs, []
        return call.exchange.finish_output(started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.exchange.output_to_heads(grads[0])


def exchanged_attention(
    exchange: CoreExchange,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention over the whole sequence of rows that ranks hold in parts, differentiable once.

    Args:
        exchange: the transport, with the layouts.
        q, k, v: [s, B, Hq, D] and [s, B, Hkv, D], this rank's rows.
        attend: takes q [S, B, hq, D] and k, v [S, B, hkv, D] (hq where the heads of a rank share
            key/value heads unequally), and gives [S, B, hq, D] or [S, B, hq D].

    Returns:
        [s, B, Hq D].
    """
    call = _Call(exchange)
    ours: tuple[Tensor, ...] = _ToHeads.apply(call, q, k, v)  # type: ignore[no-untyped-call]
    outputs = []
    for group in range(exchange.heads.groups):
        part = exchange.heads.part(exchange.rank, group)
        heads: Triple = _Leave.apply(call, group, *ours[3 * group : 3 * group + 3])  # type: ignore[no-untyped-call]
        attended = attend(
            heads[0], expand_shared(heads[1], part), expand_shared(heads[2], part)
        ).view(heads[0].shape)
        call.outputs.append(exchange.start_output(group, attended.detach()))
        outputs.append(attended)
    y: Tensor = _ToRows.apply(call, *outputs)  # type: ignore[no-untyped-call]
    return y.flatten(2)


@cached_tables(64)
def _order(sequence: SequenceLayout, device: torch.device) -> Tensor:
    return sequence.order(device)


class CollectiveExchange:
    """``CoreExchange`` over one all-to-all collective of a process group, on any device.

    Args:
        group: the context-parallel group.
        heads: who attends which heads, in one head group.
        sequence: who holds which positions.
    """

    def __init__(
        self, group: dist.ProcessGroup, heads: HeadLayout, sequence: SequenceLayout
    ) -> None:
        self.group, self.heads, self.sequence, self.rank = group, heads, sequence, group.rank()

    def _to_heads(self, by_rank: Sequence[Tensor]) -> Tensor:
        """Rank r's heads of this rank's rows, [s, B, h of r, D] -> this rank's heads, [S, B, h,
        D]."""
        _, batch, count, dim = by_rank[self.rank].shape
        rows = [self.sequence.local_length(r) for r in range(self.heads.world)]
        send = torch.cat([t.reshape(-1) for t in by_rank])
        received = send.new_empty(sum(rows) * batch * count * dim)
        dist.all_to_all_single(
            received,
            send,
            [n * batch * count * dim for n in rows],
            [t.numel() for t in by_rank],
            group=self.group,
        )
        shards = received.view(-1, batch, count, dim)
        if self.sequence.kind == "contiguous":
            return shards
        whole = torch.empty_like(shards)
        whole[_order(self.sequence, shards.device)] = shards
        return whole

    def _to_rows(self, heads: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """This rank's heads [S, B, h, D] -> of this rank's rows, rank r's heads [s, B, h of r, D];
        ``counts`` are their numbers."""
        _, batch, count, dim = heads.shape
        rows = [self.sequence.local_length(r) for r in range(self.heads.world)]
        if self.sequence.kind != "contiguous":
            heads = heads[_order(self.sequence, heads.device)]
        sizes = [rows[self.rank] * batch * n * dim for n in counts]
        received = heads.new_empty(sum(sizes))
        dist.all_to_all_single(
            received,
            heads.reshape(-1),
            sizes,
            [n * batch * count * dim for n in rows],
            group=self.group,
        )
        pieces = received.split(sizes)
        return [p.view(rows[self.rank], batch, n, dim) for p, n in zip(pieces, counts, strict=True)]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
        parts = [self.heads.part(r) for r in range(self.heads.world)]
        by_rank = []
        for part in parts:
            queries = slice(part.q_heads.start, part.q_heads.stop)
            shared = slice(part.kv_heads.start, part.kv_heads.stop)
            by_rank.append(torch.cat([q[:, :, queries], k[:, :, shared], v[:, :, shared]], 2))
        kv = len(parts[self.rank].kv_heads)
        mine = self._to_heads(by_rank).split([len(parts[self.rank].q_heads), kv, kv], 2)
        return [(mine[0].contiguous(), mine[1].contiguous(), mine[2].contiguous())]

    def start_gradients(self, group: int, q: Tensor, k: Tensor, v: Tensor) -> Triple:
        return q, k, v

    def finish_gradients(self, started: Sequence[Triple]) -> Triple:
        [(q, k, v)] = started
        parts = [self.heads.part(r) for r in range(self.heads.world)]
        counts = [len(part.q_heads) + 2 * len(part.kv_heads) for part in parts]
        by_rank = self._to_rows(torch.cat([q, k, v], 2), counts)
        rows, batch, _, dim = by_rank[0].shape
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        dtype = q.dtype if self.heads.disjoint else wide
        queries = q.new_empty((rows, batch, self.heads.num_heads, dim))
        keys, values = (
            q.new_zeros((rows, batch, self.heads.num_kv_heads, dim), dtype=dtype) for _ in range(2)
        )
        for part, piece in zip(parts, by_rank, strict=True):
            kv, shared = len(part.kv_heads), slice(part.kv_heads.start, part.kv_heads.stop)
            of_q, of_k, of_v = piece.split([len(part.q_heads), kv, kv], 2)
            queries[:, :, part.q_heads.start : part.q_heads.stop] = of_q
            keys[:, :, shared] += of_k
            values[:, :, shared] += of_v
        return queries, keys.to(q.dtype), values.to(q.dtype)

    def output_to_heads(self, y: Tensor) -> list[Tensor]:
        parts = [self.heads.part(r).q_heads for r in range(self.heads.world)]
        return [self._to_heads([y[:, :, heads.start : heads.stop] for heads in parts])]

    def start_output(self, group: int, y: Tensor) -> Tensor:
        return y

    def finish_output(self, started: Sequence[Tensor]) -> Tensor:
        [y] = started
        return torch.cat(
            self._to_rows(y, [len(self.heads.part(r).q_heads) for r in range(self.heads.world)]), 2
        )
