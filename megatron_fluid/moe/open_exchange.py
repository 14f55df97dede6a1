"""Dispatch and combine as two differentiable functions over any transport, with experts of any kind
between them.

    opened = OpenExchange(transport)
    rows = opened.dispatch(x, probs)                       # rows arrive, sorted by expert
    y = opened.combine(experts(rows.tokens, rows.counts, rows.probs))

The transport moves gradients along the same routes (moe/transport.py):

    forward:  dispatch x and probs -> experts -> combine y
    backward: dispatch dy -> backward of the experts -> combine dx and dprobs

An exchange that a dispatch opens is answered by the combine that follows, in the forward as in the
backward. All rows have arrived before the experts see one, so that what they are is their caller's
affair: nothing here multiplies.

Shapes: N expert rows of this rank, El local experts, H hidden. What x, probs and y are, the
transport says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.functions import once_differentiable
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.experts import merge_rows
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["DispatchedRows", "OpenExchange"]


@dataclass(slots=True)
class DispatchedRows:
    """What a dispatch brings the experts of this rank.

    Attributes:
        tokens: rows of expert 0, of expert 1, ... [N, H]
        probs: of each row, in the dtype that was given. [N]
        counts: rows of each expert, on the host. [El]
    """

    tokens: Tensor
    probs: Tensor
    counts: list[int]


class OpenExchange:
    """One call of a layer: its dispatch, and then its combine. Used once.

    Args:
        transport: of this call alone. The host must know the row counts.
    """

    def __init__(self, transport: TokenTransport) -> None:
        self._transport = transport
        self._forward: tuple[Exchange, list[Segment]] | None = None
        self._backward: tuple[Exchange, list[Segment]] | None = None
        self._groups: list[RowGroups] = []
        self._counts: list[int] = []
        self._result: tuple[torch.Size, torch.dtype, torch.device] | None = None

    def dispatch(self, x: Tensor, probs: Tensor) -> DispatchedRows:
        """Send x and probs to the experts; differentiable in both. Collective."""
        assert not self._groups, "an exchange is opened once"
        dtype = probs.dtype
        x, accepted = self._transport.accept(x, probs)
        probs = _required(accepted)
        tokens, row_probs = _Dispatch.apply(x, probs, self)
        return DispatchedRows(tokens, row_probs.to(dtype), self._counts)

    def combine(self, rows: Tensor) -> Tensor:
        """Send what the experts made of the rows [N, H] back and sum it; differentiable.
        Collective. `dispatch` has opened the exchange."""
        return _Combine.apply(rows, self)

    # ---- the moves, without autograd

    def _open_forward(self, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._transport.start(x, probs)
        exchange = self._transport.forward(x, probs, keep=False)
        segments = list(exchange.segments())
        self._forward = exchange, segments
        self._groups = [segment.groups for segment in segments]
        pairs = [(segment.rows, _required(segment.probs)) for segment in segments]
        rows, row_probs, merged = merge_rows(pairs, self._groups)
        assert merged.ends is not None, "the host knows the row counts"
        del pairs
        _drop_rows(segments)
        self._counts = _counts(merged.ends)
        row_probs = row_probs[: rows.shape[0]].to(probs.dtype)
        # Neither output may be a view of an input: experts may write where their rows are.
        return _fresh(rows, x), _fresh(row_probs, probs)

    def _close_forward(self, rows: Tensor) -> Tensor:
        assert self._forward is not None, "a dispatch comes first, and is answered once"
        (exchange, segments), self._forward = self._forward, None
        return self._send_back(exchange, segments, rows, None)[0]

    def _open_backward(self, grad: Tensor) -> Tensor:
        exchange = self._transport.backward(grad.contiguous(), keep=False)
        segments = list(exchange.segments())
        self._backward = exchange, segments
        # Gradients of the results travel without company: the second of a pair is empty.
        pairs = [(segment.rows, segment.rows[:, :0]) for segment in segments]
        _drop_rows(segments)
        return _fresh(merge_rows(pairs, self._groups)[0], grad)

    def _close_backward(self, rows: Tensor, probs: Tensor) -> list[Tensor]:
        if self._backward is None:
            # The experts' results had no gradient on any rank; their inputs have one all the same.
            assert self._result is not None
            shape, dtype, device = self._result
            self._open_backward(torch.zeros(shape, dtype=dtype, device=device))
        assert self._backward is not None
        (exchange, segments), self._backward = self._backward, None
        return self._send_back(exchange, segments, rows, probs)

    def _send_back(
        self, exchange: Exchange, segments: list[Segment], rows: Tensor, probs: Tensor | None
    ) -> list[Tensor]:
        parts = _split_rows(rows, self._groups)
        prob_parts = None if probs is None else _split_rows(probs, self._groups)
        for index, segment in enumerate(segments):
            row_grad = None if prob_parts is None else prob_parts[index]
            exchange.combine_rows(segment, parts[index], row_grad)
        exchange.finish()
        return exchange.results


class _Dispatch(torch.autograd.Function):
    """x, probs -> the experts' rows and their probabilities. Its backward is a combine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, opened: OpenExchange) -> tuple[Tensor, Tensor]:
        ctx.opened, ctx.dtype = opened, probs.dtype
        return opened._open_forward(x.detach(), probs.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dprobs = ctx.opened._close_backward(grad.contiguous(), grad_probs.contiguous())
        return dx, dprobs.to(ctx.dtype), None


class _Combine(torch.autograd.Function):
    """The experts' results -> y. Its backward is a dispatch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, opened: OpenExchange) -> Tensor:
        ctx.opened = opened
        y = opened._close_forward(rows.detach().contiguous())
        opened._result = y.shape, y.dtype, y.device
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.opened._open_backward(grad), None


def _split_rows(rows: Tensor, groups: Sequence[RowGroups]) -> list[Tensor]:
    """Rows sorted by expert, sources within, as one tensor a source: what merge_rows turned
    round."""
    if len(groups) == 1:
        return [rows]
    counts = [_counts(group.ends or ()) for group in groups]
    blocks = rows.split([count for by_source in zip(*counts, strict=True) for count in by_source])
    return [torch.cat(blocks[source :: len(groups)]) for source in range(len(groups))]


def _counts(ends: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _drop_rows(segments: Sequence[Segment]) -> None:
    """Leave of segments what a combine asks of them, so that rows live no longer than their
    users."""
    for segment in segments:
        segment.rows, segment.probs = segment.rows[:0].clone(), None


def _fresh(tensor: Tensor, given: Tensor) -> Tensor:
    """tensor, or a copy where it lies in the memory of `given`."""
    mine, theirs = tensor.untyped_storage(), given.untyped_storage()
    return tensor.clone() if mine.data_ptr() == theirs.data_ptr() else tensor


def _required(probs: Tensor | None) -> Tensor:
    assert probs is not None, "probabilities travel with the rows"
    return probs
