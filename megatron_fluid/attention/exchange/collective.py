"""Heads over one all-to-all collective each way, on any device: nothing is overlapped.

Legend: attention.exchange.protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.exchange.protocol import (
    HeadExchange,
    RowsInFlight,
    add_columns,
    wide_dtype,
)
from megatron_fluid.attention.exchange.rounds import HeadsByPeer
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.tables import position_order
from megatron_fluid.comm.waits import group_waits
from megatron_fluid.errors import ConfigError

__all__ = ["CollectiveExchange"]


class CollectiveExchange(HeadExchange):
    """``HeadExchange`` over ``all_to_all_single``, in one head group. The connection is the
    context-parallel group.

    Raises:
        ConfigError: more head groups than one.
    """

    def __init__(
        self, connection: dist.ProcessGroup, heads: HeadLayout, sequence: SequenceLayout
    ) -> None:
        super().__init__(connection, heads, sequence)
        if heads.groups != 1:  # one collective moves all heads
            raise ConfigError.of("head_groups", heads.groups, "1 with overlap=False")
        self.group, self.rank = connection, connection.rank()
        self._parts = [heads.part(rank) for rank in range(heads.world)]
        self._rows = [sequence.local_length(rank) for rank in range(heads.world)]

    def _all_to_all(self, send: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All-to-all along the first dimension, of so many rows to and from each rank."""
        send, out = send.contiguous(), send.new_empty((sum(received), *send.shape[1:]))
        group_waits(self.group).collective(
            "attention all-to-all",
            lambda: dist.all_to_all_single(
                out, send, received, sent, group=self.group, async_op=True
            ),
        )
        return out

    def send_heads(self, operation: str, whole: Tensor, of_output: bool) -> HeadsByPeer:
        if not (of_output or self.heads.disjoint):
            columns = [cut for part in self._parts for cut in part.columns(of_output)]
            whole = torch.cat([whole[..., cut] for cut in columns], -1)
        world = self.heads.world
        send = whole.unflatten(2, (world, -1)).permute(2, 0, 1, 3).flatten(0, 1)
        received = self._all_to_all(send, [self._rows[self.rank]] * world, self._rows)
        if self.sequence.kind != "contiguous":
            shards, received = received, torch.empty_like(received)
            received[position_order(self.sequence, shards.device)] = shards
        return HeadsByPeer(self, [(received, {})])

    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> RowsInFlight:
        shards, world = buffer, self.heads.world
        if self.sequence.kind != "contiguous":
            shards = buffer[position_order(self.sequence, buffer.device)]
        received = self._all_to_all(shards, self._rows, [self._rows[self.rank]] * world)
        return RowsInFlight(buffer, received.unflatten(0, (world, self._rows[self.rank])).unbind())

    def collect(
        self, returning: Sequence[RowsInFlight], of_output: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        [back] = returning
        pieces, rows = back.arrivals, slice(0, self._rows[self.rank])
        if of_output or self.heads.disjoint:
            yield rows, torch.cat(pieces, -1)
        else:
            shape = (*pieces[0].shape[:2], self.heads.qkv_rows)
            wide = pieces[0].new_zeros(shape, dtype=wide_dtype(pieces[0].dtype))
            for part, piece in zip(self._parts, pieces, strict=True):
                add_columns(wide, part, piece, of_output, True)
            yield rows, wide.to(pieces[0].dtype)
