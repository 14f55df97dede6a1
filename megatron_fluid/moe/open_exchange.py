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

Shapes: T tokens, K top-k, N expert rows of this rank, El local experts, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.autograd import once_differentiable
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.experts import merge_rows, split_rows
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
        self._open: tuple[Exchange, list[Segment]] | None = None  # dispatched, not yet combined
        self._groups: list[RowGroups] = []  # of each segment
        self._result: tuple[torch.Size, torch.dtype, torch.device] | None = None

    def dispatch(self, x: Tensor, probs: Tensor) -> DispatchedRows:
        """Send x [T, H] and probs [T, K] to the experts; differentiable in both. Collective."""
        assert not self._groups, "an exchange is opened once"
        dtype = probs.dtype
        x, probs = self._transport.accept(x, probs)  # type: ignore[assignment]
        tokens, row_probs, counts = _Dispatch.apply(x, probs, self)
        return DispatchedRows(tokens, row_probs.to(dtype), counts)

    def combine(self, rows: Tensor) -> Tensor:
        """Send what the experts made of the rows [N, H] back and sum it: [T, H]; differentiable.
        Collective. `dispatch` has opened the exchange."""
        y = _Combine.apply(rows, self)
        return self._transport.leave(y) if self._transport.permutes else y

    # ---- the moves, without autograd

    def open_forward(self, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Dispatch: rows [N, H], their probabilities [N], and the rows of each expert."""
        self._transport.start(x, probs)
        exchange = self._transport.forward(x, probs, keep=False)
        rows, row_probs, merged = self._arrived(exchange)
        assert merged.ends is not None, "the host knows the row counts"
        row_probs = row_probs[: rows.shape[0]].to(probs.dtype)
        # Neither output may be a view of an input: experts may write where their rows are.
        return _apart(rows, x), _apart(row_probs, probs), merged.counts()

    def open_backward(self, grad: Tensor) -> Tensor:
        """Dispatch gradients of the result: those of the experts' results. [N, H]"""
        exchange = self._transport.backward(grad.contiguous(), keep=False)
        return _apart(self._arrived(exchange)[0], grad)

    def close_forward(self, rows: Tensor) -> Tensor:
        """Combine the experts' results [N, H]."""
        (y,) = self._send_back(rows, None)
        self._result = y.shape, y.dtype, y.device
        return y

    def close_backward(self, rows: Tensor, probs: Tensor) -> list[Tensor]:
        """Combine gradients of the rows [N, H] and of their probabilities [N]: dx, dprobs."""
        assert self._result is not None, "a combine comes before the backward"
        if self._open is None:
            # The experts' results had no gradient on any rank; their inputs have one all the same.
            shape, dtype, device = self._result
            self.open_backward(torch.zeros(shape, dtype=dtype, device=device))
        return self._send_back(rows, probs)

    def _arrived(self, exchange: Exchange) -> tuple[Tensor, Tensor, RowGroups]:
        """All rows of a dispatch in the experts' order, and what travelled with them."""
        segments = list(exchange.segments())
        self._open = exchange, segments
        self._groups = self._groups or [segment.groups for segment in segments]
        # Gradients travel without company: the second of a pair is empty.
        pairs = [(s.rows, s.rows[:, :0] if s.probs is None else s.probs) for s in segments]
        for segment in segments:  # a combine needs no rows, which live no longer than their users
            segment.rows, segment.probs = segment.rows[:0].clone(), None
        return merge_rows(pairs, self._groups)

    def _send_back(self, rows: Tensor, probs: Tensor | None) -> list[Tensor]:
        assert self._open is not None, "a dispatch comes first, and is answered once"
        (exchange, segments), self._open = self._open, None
        parts: list[tuple[Tensor, Tensor | None]]
        if probs is None:
            parts = [(part, None) for part in split_rows(rows, self._groups)]
        else:
            both = split_rows(rows, self._groups), split_rows(probs, self._groups)
            parts = list(zip(*both, strict=True))
        for segment, (part, row_grad) in zip(segments, parts, strict=True):
            exchange.combine_rows(segment, part, row_grad)
        exchange.finish()
        return exchange.results


class _Dispatch(torch.autograd.Function):
    """x, probs -> the experts' rows, their probabilities and counts. Its backward is a combine."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, opened: OpenExchange
    ) -> tuple[Tensor, Tensor, list[int]]:
        ctx.opened, ctx.dtype = opened, probs.dtype
        return opened.open_forward(x.detach(), probs.detach())

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, grad_probs: Tensor, _: None
    ) -> tuple[Tensor, Tensor, None]:
        dx, dprobs = ctx.opened.close_backward(grad.contiguous(), grad_probs.contiguous())
        return dx, dprobs.to(ctx.dtype), None


class _Combine(torch.autograd.Function):
    """The experts' results -> y. Its backward is a dispatch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, opened: OpenExchange) -> Tensor:
        ctx.opened = opened
        return opened.close_forward(rows.detach().contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.opened.open_backward(grad), None


def _apart(tensor: Tensor, other: Tensor) -> Tensor:
    """tensor, or a copy where it lies in the memory of `other`."""
    same = tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return tensor.clone() if same else tensor
