"""The tensors and the settings of one call of attention, and the attention of one head group
between its exchanges: the kernel's graph, which is kept from forward to backward.

Legend: attention.overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.layouts import HeadPart
from megatron_fluid.attention.packed import Norm, RotaryTable, pack_backward, split, split_apart

__all__ = [
    "AttentionCall",
    "AttentionState",
    "AttentionWeights",
    "GroupState",
    "RowShards",
    "attend",
    "attend_backward",
    "core_name",
    "flat",
    "names_of",
    "run_kernel",
    "weight_gradient",
]

_ENGINE: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


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

    Where weights have ``core`` tensors, the kernel is also given ``part`` and ``core``.

    ``qkv_gradient`` and ``output_gradient`` compute dW of a projection, as ``weight_gradient``
    does; others may put it elsewhere (Megatron's main_grad) and give what stands in for it.

    ``shards``: x is this rank's part of the rows [s, B, H], which are gathered in forward, and
    again in backward where a weight's gradient reads them. y is all of them.
    """

    exchange: HeadExchange
    kernel: CoreKernel
    case: CoreCase
    table: RotaryTable | None = None
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


@dataclass
class _Kept:
    """What an attention kernel's graph saves under saved-tensor hooks (checkpoints, offloading).

    The node around that graph saves these tensors instead. The graph's own backward is another pass
    of autograd's engine: under a checkpoint every head group would recompute the whole forward with
    its exchanges, and the hooks could free nothing, because the graph's leaves hold the tensors.
    """

    tensors: list[Tensor] = field(default_factory=list)
    count: int = 0

    def pack(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.detach())
        self.count += 1
        return self.count - 1

    def unpack(self, index: int) -> Tensor:
        return self.tensors[index]


@dataclass
class GroupState:
    """One head group's share of what backward needs."""

    raw: Tensor | None  # packed [S, B, C] before q/k norm; None without
    # q, k, v of the kernel, emptied where ``kept`` has them, and what else it reads
    leaves: tuple[Tensor, ...]
    attended: GradientEdge  # where the graph of the kernel's result begins
    shape: torch.Size  # of that result
    kept: _Kept | None = None


@dataclass
class AttentionState:
    """What backward needs of a call. Between forward and backward autograd saves the tensors
    (``release``, ``restore``), except those in the graph of an attention kernel."""

    groups: list[GroupState]
    gathered: Tensor | None  # [s, B, Hq D]: the attention output of all heads on this rank's rows
    gate: Tensor | None = None  # [s, B, Hq D]: the output gate, before its sigmoid

    def release(self) -> list[Tensor | None]:
        """Hand over the tensors, for autograd to save."""
        tensors: list[Tensor | None] = [self.gathered, self.gate]
        self.gathered = self.gate = None
        for group in self.groups:
            tensors.append(group.raw)
            group.raw = None
            if group.kept is not None:
                tensors += group.kept.tensors
                group.kept.tensors = []
        return tensors

    def restore(self, tensors: Sequence[Any]) -> None:
        """Take back what ``release`` handed over."""
        given = iter(tensors)
        self.gathered, self.gate = next(given), next(given)
        for group in self.groups:
            group.raw = next(given)
            if group.kept is not None:
                group.kept.tensors = [next(given) for _ in range(group.kept.count)]


def attend(
    call: AttentionCall, part: HeadPart, packed: Tensor, core: tuple[Tensor, ...], keep: bool
) -> tuple[Tensor, GroupState | None]:
    """Attend a packed buffer's heads: the result, and with ``keep`` what its backward needs."""
    q, k, v = split_apart(packed, part) if call.exchange.apart else split(packed, part)
    if not keep:
        return run_kernel(call, part, q, k, v, core), None
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    core = tuple(t.detach().requires_grad_() for t in core)
    kept = None if torch._C._autograd._top_saved_tensors_default_hooks(False) is None else _Kept()
    with torch.enable_grad():
        if kept is None:
            attended = run_kernel(call, part, q, k, v, core)
        else:
            with saved_tensors_hooks(kept.pack, kept.unpack):
                attended = run_kernel(call, part, q, k, v, core)
    for leaf in (q, k, v) if kept is not None else ():
        leaf.data = leaf.new_empty(0)
    state = GroupState(None, (q, k, v, *core), get_gradient_edge(attended), attended.shape, kept)
    return attended.detach(), state


def run_kernel(
    call: AttentionCall,
    part: HeadPart,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    core: tuple[Tensor, ...] = (),
) -> Tensor:
    """Attend q, k and v as ``packed.split`` gives them: [S, B', h, D]."""
    if q.numel() == 0:  # of all of them, as autograd asks for
        return q * (1.0 + k.sum() + v.sum() + sum(t.sum() * 0.0 for t in core))
    more: dict[str, Any] = {"part": part, "core": core} if core else {}
    return call.kernel(q, k, v, call.case, **more)


def attend_backward(
    call: AttentionCall,
    part: HeadPart,
    weights: AttentionWeights,
    group: GroupState,
    gradient: Tensor,
    retain: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, tuple[Tensor, ...]]:
    """The packed gradient [S, B, C] before rotation and norm, from the attention output's, those of
    the norms' weights, and those of what else the kernel reads."""
    shaped = gradient.view(group.shape)
    # What torch.autograd.grad does, at less cost on the host.
    of_qkv = _ENGINE.run_backward(
        (group.attended,), (shaped,), retain, False, group.leaves, False, accumulate_grad=False
    )
    packed = gradient.new_empty((gradient.shape[0], gradient.shape[1], part.width))
    norm = call.norm(weights)
    dq, dk, dv, *of_core = of_qkv
    of_norms = pack_backward((dq, dk, dv), part, call.table, packed, norm, group.raw)
    return packed, of_norms, tuple(of_core)
