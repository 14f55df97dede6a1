"""Self-attention of one rank with one head group: nothing moves, so it is a chain of autograd's own
nodes, which cost the host less than ``overlap``'s one node with a graph inside.

Legend: attention.overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_fluid.attention.call import AttentionCall, AttentionWeights, run_kernel
from megatron_fluid.attention.exchange.protocol import Prepare
from megatron_fluid.attention.packed import Norm, Triple, pack_backward, split
from megatron_fluid.backward.autograd import apply, once_differentiable

__all__ = ["one_rank_attention"]

_dispatch_modes = torch._C._len_torch_dispatch_stack


class _Prepared(torch.autograd.Function):
    """Queries, keys and values as views of packed [S, B, C], normalised and rotated. Takes the
    packed tensor over: without a norm it is rotated in place, but for calls under a dispatch mode,
    which may keep it: selective activation checkpointing returns a saved product in recompute."""

    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, packed: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Triple:
        part = call.exchange.heads.part(0)
        raw, norm = packed.detach(), _norm(call, q_norm, k_norm)
        if norm is not None:
            target = torch.empty_like(raw)
        else:
            target = raw if _dispatch_modes() == 0 else raw.clone()
        Prepare(norm, call.table).apply(raw, target, part)
        ctx.call, ctx.shape = call, packed.shape
        if norm is not None:
            ctx.save_for_backward(packed, q_norm, k_norm)
        return split(target, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        raw, q_norm, k_norm = ctx.saved_tensors or (None, None, None)
        dq, dk, dv = grads
        packed, part = dq.new_empty(ctx.shape), call.exchange.heads.part(0)
        norm = _norm(call, q_norm, k_norm)
        of_norms = pack_backward((dq, dk, dv), part, call.table, packed, norm, raw)
        if norm is None or of_norms is None:
            return None, packed, None, None
        of_q, of_k = (t.to(norm.q_weight.dtype) for t in of_norms)
        return None, packed, of_q, of_k


def _norm(call: AttentionCall, q_norm: Tensor | None, k_norm: Tensor | None) -> Norm | None:
    if q_norm is None or k_norm is None:
        return None
    return Norm(q_norm, k_norm, call.norm_eps)


def one_rank_attention(x: Tensor, weights: AttentionWeights, call: AttentionCall) -> Tensor:
    """``overlap.overlapped_attention`` for one rank and one head group, of a call with
    neither ``shards`` nor an output gate, weight gradients of its own or ``core`` tensors.

    Results have the same bits. No weight gradient is queued.
    """
    part, shape = call.exchange.heads.part(0), x.shape
    # Rows as matrices: of [S, B, H] autograd records a projection as two nodes more.
    packed = linear(x.reshape(-1, shape[2]), weights.w_qkv, weights.b_qkv)
    packed = packed.view(shape[0], shape[1], packed.shape[1])
    if call.table is None and weights.q_norm is None:
        q, k, v = split(packed, part)
    else:
        q, k, v = apply(_Prepared, call, packed, weights.q_norm, weights.k_norm)
    rows = run_kernel(call, part, q, k, v).reshape(-1, part.output_width)
    return linear(rows, weights.w_out, weights.b_out).view(shape)
