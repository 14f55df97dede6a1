"""The tensors and the settings of one call of overlapped attention.

Legend: attention.overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.packed import Norm, RotaryTable

__all__ = [
    "AttentionCall",
    "AttentionWeights",
    "RowShards",
    "core_name",
    "flat",
    "names_of",
    "weight_gradient",
]


@dataclass(frozen=True)
class AttentionWeights:
    """w_qkv [(Hq + 2 Hkv) D, H] in Megatron's row order (with an output gate as in gate.py), w_out
    [H, Hq D]; the rest is optional.

    ``core``: what the attention kernel reads besides queries, keys and values. Its gradients come
    from the kernel's graph.
    """

    w_qkv: Tensor
    w_out: Tensor
    b_qkv: Tensor | None = None
    b_out: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    core: tuple[Tensor, ...] = ()

    def all(self) -> tuple[Tensor | None, ...]:
        """Every member by itself, in the order of ``names_of``."""
        own = self.w_qkv, self.w_out, self.b_qkv, self.b_out, self.q_norm, self.k_norm
        return *own, *self.core

    @classmethod
    def of(cls, members: Sequence[Tensor | None]) -> AttentionWeights:
        """The inverse of ``all``."""
        w_qkv, w_out, b_qkv, b_out, q_norm, k_norm, *rest = members
        assert w_qkv is not None and w_out is not None
        core = tuple(t for t in rest if t is not None)
        return cls(w_qkv, w_out, b_qkv, b_out, q_norm, k_norm, core)


_MEMBERS = ("w_qkv", "w_out", "b_qkv", "b_out", "q_norm", "k_norm")


@functools.cache
def names_of(core: int) -> tuple[str, ...]:
    """Names of ``x`` and of the members of weights with so many ``core`` tensors."""
    return "x", *_MEMBERS, *(core_name(i) for i in range(core))


def core_name(index: int) -> str:
    return f"core {index}"


def flat(tensor: Tensor) -> Tensor:
    """[rows, B, C] as [rows B, C]."""
    return tensor.reshape(-1, tensor.shape[-1])


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [C, K] of y = x W^T from dy [s, B, C] and x [s, B, K]."""
    return torch.mm(flat(dy).t(), flat(x))


class RowShards(Protocol):
    """Rows that the ranks of another group (of sequence parallelism) hold in parts. They attend
    heads of their own of the same rows."""

    def gather(self, x: Tensor) -> Tensor:
        """[s / T, B, H] of each of T ranks -> [s, B, H]."""
        ...

    def scatter_sum(self, dx: Tensor) -> Tensor:
        """[s, B, H], summed over the ranks -> this rank's [s / T, B, H]."""
        ...


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call that is not a tensor to differentiate. ``kernel`` attends ``case``;
    ``name`` is for errors; ``output_gate`` says whether w_qkv holds the rows of one (gate.py).

    Where weights have ``core`` tensors, the kernel's ``run`` is also given ``part`` and ``core``.

    ``qkv_gradient`` and ``output_gradient`` compute dW of a projection, as ``weight_gradient``
    does; others may put it elsewhere (Megatron's main_grad) and give what stands in for it.

    ``shards``: x is this rank's part of the rows [s, B, H], which are gathered in forward, and
    again in backward where a weight's gradient reads them. y is all of them.
    """

    exchange: HeadExchange
    kernel: CoreKernel
    case: CoreCase
    table: RotaryTable | None = None
    output_chunks: int = 1
    dx_chunks: int = 1
    norm_eps: float = 1e-6
    name: str = "attention"
    qkv_gradient: Callable[[Tensor, Tensor], Tensor] = weight_gradient
    output_gradient: Callable[[Tensor, Tensor], Tensor] = weight_gradient
    output_gate: bool = False
    shards: RowShards | None = None

    def norm(self, weights: AttentionWeights) -> Norm | None:
        if weights.q_norm is None or weights.k_norm is None:
            return None
        return Norm(weights.q_norm, weights.k_norm, self.norm_eps)
