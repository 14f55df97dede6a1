"""Attention between two exchanges, for frameworks that project by themselves: q, k, v in, attention
output out, both by rows.

q, k and v travel in one exchange, each key/value head once to each rank that needs it, and
gradients of shared heads are summed in fp32. With several head groups the output of one returns
while the next is attended, and in backward its gradients while the next one's are computed.

Legend: attention.exchange.protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.exchange.protocol import HeadExchange, RowsInFlight
from megatron_fluid.attention.layouts import HeadPart
from megatron_fluid.attention.packed import Triple
from megatron_fluid.backward.autograd import once_differentiable

__all__ = ["exchanged_attention", "return_rows"]


class _Call:
    """One call's exchange, and what is in flight by head group: output in forward, gradients in
    backward."""

    def __init__(self, exchange: HeadExchange) -> None:
        self.exchange = exchange
        self.outputs: list[RowsInFlight] = []
        self.gradients: dict[int, RowsInFlight] = {}


class _ToHeads(torch.autograd.Function):
    """q, k, v of all head groups; backward receives what ``_Leave`` has sent."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor for group in call.exchange.send_qkv(q, k, v) for tensor in group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, ctx.call.gradients = ctx.call.gradients, {}
        return None, *ctx.call.exchange.collect_qkv_gradients([sent[g] for g in sorted(sent)])


class _Leave(torch.autograd.Function):
    """The identity; backward sends a head group's gradients while the next group's are computed."""

    @staticmethod
    def forward(ctx: Any, call: _Call, group: int, q: Tensor, k: Tensor, v: Tensor) -> Triple:
        ctx.call, ctx.group = call, group
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.gradients[ctx.group] = ctx.call.exchange.send_qkv_gradients(ctx.group, *grads)
        return None, None, *grads


class _ToRows(torch.autograd.Function):
    """The outputs of all head groups, which are in flight already; backward sends their gradient to
    the heads."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *ys: Tensor) -> Tensor:
        ctx.call, ctx.shapes = call, [y.shape for y in ys]
        sent, call.outputs = call.outputs, []
        return call.exchange.collect_all(sent, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = ctx.call.exchange.send_heads("attention d-output", grads[0], True)
        return None, *(sent.take(g)[1].view(shape) for g, shape in enumerate(ctx.shapes))


def exchanged_attention(
    exchange: HeadExchange,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Callable[[HeadPart, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention over the whole sequence of rows that ranks hold in parts, differentiable once.

    Args:
        exchange: the transport, with the layouts.
        q, k, v: [s, B, Hq, D], [s, B, Hkv, D] and [s, B, Hkv, Dv], this rank's rows.
        attend: takes the part that is attended, q [S, B, hq, D], k [S, B, hkv, D] and v [S, B, hkv,
            Dv], and returns [S, B, hq, Dv] or [S, B, hq Dv].

    Returns:
        [s, B, Hq Dv].
    """
    call = _Call(exchange)
    arrived: tuple[Tensor, ...] = _ToHeads.apply(call, q, k, v)  # type: ignore[no-untyped-call]

    def attended() -> Iterator[Tensor]:
        for g in range(exchange.heads.groups):
            part = exchange.heads.part(exchange.rank, g)
            heads: Triple = _Leave.apply(call, g, *arrived[3 * g : 3 * g + 3])  # type: ignore[no-untyped-call]
            output = attend(part, *heads)
            yield output.view(*heads[0].shape[:3], heads[2].shape[3])

    return return_rows(exchange, attended())


def return_rows(exchange: HeadExchange, attended: Iterable[Tensor]) -> Tensor:
    """Send the attention output of this rank's heads to the ranks that hold the rows, each head
    group while the next is attended; differentiable once.

    Args:
        attended: [S, B, hq, Dv] of each head group in order.

    Returns:
        [s, B, Hq Dv].
    """
    call, outputs = _Call(exchange), []
    for group, output in enumerate(attended):
        sending = output.detach().contiguous().flatten(2)
        call.outputs.append(exchange.send_rows("attention output", group, sending, True))
        outputs.append(output)
    y: Tensor = _ToRows.apply(call, *outputs)  # type: ignore[no-untyped-call]
    return y
