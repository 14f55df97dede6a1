"""The output gate of attention: the output of every query head is multiplied by the sigmoid of a
projection of the same rows, before the output projection.

The gate never leaves the rank that holds the rows. In the fused weight its rows stand by key/value
head, as Megatron has them: n query heads, their n gates, the key, the value.

Legend: s local rows, B batch, Hq query heads, Hkv key/value heads, n query heads of one key/value
head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.attention.layouts import HeadLayout

__all__ = ["gate_backward", "gated", "join_gate", "split_gate"]


def split_gate(fused: Tensor, heads: HeadLayout) -> tuple[Tensor, Tensor]:
    """A fused weight or bias [(2 Hq + 2 Hkv) D, ...] as those of queries, keys and values [(Hq + 2
    Hkv) D, ...] and of the gate [Hq D, ...]; both copies."""
    n, dim = heads.num_heads // heads.num_kv_heads, heads.head_dim
    by_head = fused.unflatten(0, (heads.num_kv_heads, 2 * n + 2, dim))
    rest = torch.cat([by_head[:, :n], by_head[:, 2 * n :]], 1)
    return rest.flatten(0, 2), by_head[:, n : 2 * n].flatten(0, 2)


def join_gate(of_qkv: Tensor, of_gate: Tensor, heads: HeadLayout) -> Tensor:
    """The inverse of ``split_gate`` for the last dimension of gradients: [s, B, (Hq + 2 Hkv) D] and
    [s, B, Hq D] -> [s, B, (2 Hq + 2 Hkv) D]."""
    n, kv, dim = heads.num_heads // heads.num_kv_heads, heads.num_kv_heads, heads.head_dim
    qkv, gate = of_qkv.unflatten(-1, (kv, n + 2, dim)), of_gate.unflatten(-1, (kv, n, dim))
    return torch.cat([qkv[:, :, :, :n], gate, qkv[:, :, :, n:]], 3).flatten(2)


def _open(gate: Tensor) -> Tensor:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return torch.sigmoid(gate.to(wide))


def gated(attended: Tensor, gate: Tensor) -> Tensor:
    """attended * sigmoid(gate), both [s, B, Hq D]; computed wide, rounded once."""
    return (attended * _open(gate)).to(attended.dtype)


def gate_backward(gradient: Tensor, attended: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gated`` for its output's: of ``attended`` and of ``gate``."""
    opened = _open(gate)
    of_attended = gradient * opened
    of_gate = of_attended * attended * (1 - opened)
    return of_attended.to(attended.dtype), of_gate.to(gate.dtype)
