"""The exchange of one rank that has all heads in one group: nothing moves, every projection is one
GEMM, and its result is taken as it stands.

Legend: attention.exchange.protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.attention.exchange.protocol import (
    HeadExchange,
    Pending,
    Prepare,
    Projection,
    matmul,
)
from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout

__all__ = ["LocalExchange"]


@dataclass
class _Heads:
    """All heads, packed [S, B, C]; let go when they are taken."""

    buffer: Tensor | None
    part: HeadPart

    def pending(self) -> Sequence[Pending]:
        return ()

    def take(self, group: int, prepare: Prepare | None = None) -> tuple[Tensor | None, Tensor]:
        buffer, self.buffer = self.buffer, None
        assert buffer is not None, "a head group is taken once"
        if prepare is None:
            return None, buffer
        target = buffer if prepare.norm is None else torch.empty_like(buffer)
        prepare.apply(buffer, target, self.part)
        return None if target is buffer else buffer, target


@dataclass
class _Rows:
    buffer: Tensor

    def pending(self) -> Sequence[Pending]:
        return ()


class LocalExchange(HeadExchange):
    """``HeadExchange`` of one rank and one head group.

    Args:
        heads: ``single``.
        sequence: of one rank.
    """

    rank = 0
    group = None

    def __init__(self, heads: HeadLayout, sequence: SequenceLayout) -> None:
        assert heads.single and sequence.world == 1, "one rank and one head group"
        self.heads, self.sequence = heads, sequence
        self._part = heads.part(0)
        self._all = slice(0, sequence.length)

    def project(self, operation: str, x: Tensor, projection: Projection, chunks: int = 1) -> _Heads:
        buffer = x.new_empty((x.shape[0], x.shape[1], projection.matrix.shape[1]))
        matmul(x, projection, buffer)
        return _Heads(buffer, self._part)

    def send_heads(self, operation: str, whole: Tensor, of_output: bool) -> _Heads:
        return _Heads(whole, self._part)

    def send_rows(
        self, operation: str, group: int, buffer: Tensor, of_output: bool, chunks: int = 1
    ) -> _Rows:
        return _Rows(buffer)

    def collect(self, returning: Sequence[_Rows], of_output: bool) -> list[tuple[slice, Tensor]]:
        return [(self._all, returning[0].buffer)]
