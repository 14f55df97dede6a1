"""Ulysses attention over plain collectives: one all-to-all in and one out, nothing overlapped.

The baseline of the overlapped form, with the same parameters, kernel, rotation and layouts: one
GEMM for QKV, one fused layout copy into the send buffer, one ``all_to_all_single``, attention on
the received buffer in place, one ``all_to_all_single`` back, one fused layout copy, one GEMM.
Autograd runs the same steps the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_fluid.attention.layouts import HeadPart
from megatron_fluid.attention.overlap import AttentionCall, AttentionWeights
from megatron_fluid.attention.packed import (
    Norm,
    expand_shared,
    normalize,
    pack_backward,
    rotate_,
    split,
)
from megatron_fluid.backward.functions import once_differentiable

__all__ = ["plain_attention"]


def _all_to_all(
    send: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Flat all-to-all with these numbers of elements a rank."""
    if group is None or group.size() == 1:
        return send
    received = send.new_empty(sum(out_sizes))
    dist.all_to_all_single(received, send, list(out_sizes), list(in_sizes), group=group)
    return received


def _sizes(call: AttentionCall, batch: int, columns: Sequence[int]) -> tuple[list[int], list[int]]:
    """Elements per rank of (what this rank sends to the heads' side, what it receives there)."""
    rank, sequence = call.exchange.rank, call.sequence
    send = [sequence.local_length(rank) * batch * c for c in columns]
    receive = [sequence.local_length(p) * batch * columns[rank] for p in range(sequence.world)]
    return send, receive


def _interleave(x: Tensor, columns: Sequence[int]) -> Tensor:
    """[s, B, sum of columns] as one flat run per rank of its [s, B, columns]."""
    if len(set(columns)) == 1:
        return x.view(*x.shape[:2], len(columns), columns[0]).permute(2, 0, 1, 3).reshape(-1)
    return torch.cat([part.reshape(-1) for part in x.split(list(columns), -1)])


def _deinterleave(flat: Tensor, rows: int, batch: int, columns: Sequence[int]) -> Tensor:
    """The inverse of ``_interleave``."""
    if len(set(columns)) == 1:
        return (
            flat.view(len(columns), rows, batch, columns[0])
            .permute(1, 2, 0, 3)
            .reshape(rows, batch, sum(columns))
        )
    parts = flat.split([rows * batch * c for c in columns])
    return torch.cat(
        [part.view(rows, batch, c) for part, c in zip(parts, columns, strict=True)], -1
    )


def _to_positions(buffer: Tensor, call: AttentionCall) -> Tensor:
    """Rows of all ranks, rank after rank, in the order of their positions."""
    if call.sequence.kind == "contiguous":
        return buffer
    result = torch.empty_like(buffer)
    result[call.sequence.order(buffer.device)] = buffer
    return result


def _from_positions(buffer: Tensor, call: AttentionCall) -> Tensor:
    """The inverse of ``_to_positions``."""
    return (
        buffer if call.sequence.kind == "contiguous" else buffer[call.sequence.order(buffer.device)]
    )


class _ToHeads(torch.autograd.Function):
    """Packed projections [s, B, all heads] -> q, k, v of this rank's heads at every position,
    rotated."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        call: AttentionCall,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        part, widths = _mine(call), [call.heads.part(p).width for p in range(call.heads.world)]
        rows, batch, _ = packed.shape
        send, receive = _sizes(call, batch, widths)
        flat = _all_to_all(_interleave(packed, widths), receive, send, group)
        raw = _to_positions(flat.view(call.sequence.length, batch, part.width), call)
        if call.heads.world == 1 and q_norm is None:
            raw = raw.clone()  # nothing was moved: this is the caller's own tensor
        buffer = raw
        if q_norm is not None and k_norm is not None:
            buffer = torch.empty_like(raw)
            normalize(raw, buffer, part, q_norm, k_norm, call.norm_eps)
            ctx.save_for_backward(raw, q_norm, k_norm)
        rotate_(buffer, part, call.table)
        ctx.call, ctx.group, ctx.widths, ctx.rows = call, group, widths, rows
        return split(buffer, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, part = ctx.call, _mine(ctx.call)
        dq, dk, dv = grads
        batch = dq.shape[1] // (len(part.kv_heads) if part.uniform else 1)
        packed = dq.new_empty((dq.shape[0], batch, part.width))
        norm = None
        if ctx.saved_tensors:
            raw, q_norm, k_norm = ctx.saved_tensors
            norm = Norm(raw, q_norm, k_norm, call.norm_eps)
        of_norms = pack_backward(dq, dk, dv, part, call.table, packed, norm)
        of_q = of_k = None
        if norm is not None and of_norms is not None:
            of_q, of_k = (t.to(norm.q_weight.dtype) for t in of_norms)
        send, receive = _sizes(call, batch, ctx.widths)
        flat = _all_to_all(_from_positions(packed, call).reshape(-1), send, receive, ctx.group)
        return _deinterleave(flat, ctx.rows, batch, ctx.widths), of_q, of_k, None, None


class _ToSequence(torch.autograd.Function):
    """Attention output [S, B, columns] of this rank's heads -> [s, B, Hq D] of all heads at this
    rank's positions."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, call: AttentionCall, group: dist.ProcessGroup | None
    ) -> Tensor:
        columns = [call.heads.part(p).output_width for p in range(call.heads.world)]
        batch, rows = attended.shape[1], call.sequence.local_length(call.exchange.rank)
        send, receive = _sizes(call, batch, columns)
        flat = _all_to_all(_from_positions(attended, call).reshape(-1), send, receive, group)
        ctx.call, ctx.group, ctx.columns = call, group, columns
        return _deinterleave(flat, rows, batch, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,) = grads
        send, receive = _sizes(ctx.call, gradient.shape[1], ctx.columns)
        flat = _all_to_all(
            _interleave(gradient.contiguous(), ctx.columns), receive, send, ctx.group
        )
        mine = ctx.columns[ctx.call.exchange.rank]
        return (
            _to_positions(flat.view(ctx.call.sequence.length, gradient.shape[1], mine), ctx.call),
            None,
            None,
        )


def _mine(call: AttentionCall) -> HeadPart:
    return call.heads.part(call.exchange.rank)


def _for_every_rank(fused: Tensor, call: AttentionCall) -> Tensor:
    """Rows of a fused weight or bias, rank after rank; those that ranks share are repeated."""
    if call.heads.disjoint:
        return fused
    return torch.cat([call.heads.part(p).weight(fused) for p in range(call.heads.world)])


def plain_attention(
    x: Tensor, weights: AttentionWeights, call: AttentionCall, group: dist.ProcessGroup | None
) -> Tensor:
    """Self-attention of this rank's rows x [s, B, H] -> [s, B, H] over all-to-all collectives of
    ``group`` (None: one rank).

    Arguments and gradients are those of ``overlap.overlapped_attention``; ``call.heads`` must have
    one head group, and ``call.dx_chunks`` has no meaning here.
    """
    assert call.heads.groups == 1, "the plain form knows no head groups"
    bias = None if weights.b_qkv is None else _for_every_rank(weights.b_qkv, call)
    packed = F.linear(x, _for_every_rank(weights.w_qkv, call), bias)
    q, k, v = _ToHeads.apply(packed, weights.q_norm, weights.k_norm, call, group)  # type: ignore[no-untyped-call]
    part = _mine(call)
    if q.numel():
        attended = call.kernel.run(q, expand_shared(k, part), expand_shared(v, part), call.case)
    else:
        attended = q * 1.0
    attended = attended.reshape(call.sequence.length, x.shape[1], part.output_width)
    gathered: Tensor = _ToSequence.apply(attended, call, group)  # type: ignore[no-untyped-call]
    return F.linear(gathered, weights.w_out, weights.b_out)
