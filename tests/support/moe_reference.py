"""The reference that every overlapped path is compared with: a mixture of experts in plain torch,
on one process, without exchange, permutation or grouping; autograd computes the backward.

Legend: T tokens of all ranks, K top-k, E experts, H hidden, F1 / F widths of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fluid.moe.activations import Activation, resolve_activation

ROUTINGS = ["random", "empty", "dropped", "one expert", "same expert twice", "nothing"]


def routing(kind: str, tokens: int, experts: int, top_k: int, g: torch.Generator) -> Tensor:
    """ids [T, K] of one of ROUTINGS; "empty": the last two experts get nothing. A token's experts
    are distinct while there are enough of them; the same one twice is a legal choice, too."""
    some = max(experts - 2, 1) if kind == "empty" else experts
    order = torch.rand(tokens, some, generator=g).argsort(1)
    ids = order.repeat(1, -(-top_k // some))[:, :top_k].clone()
    if kind == "dropped":
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    if kind == "one expert":
        ids[:], ids[:, 0] = -1, experts - 1
    if kind == "same expert twice":
        ids[:] = 1
    if kind == "nothing":
        ids[:] = -1
    return ids


def gradients(y: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """y, and the gradient of each leaf."""
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def moe_reference(
    tokens: Tensor, ids: Tensor, probs: Tensor | None, w1: Tensor, w2: Tensor,
    activation: str | Activation | Callable[[Tensor], Tensor],
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """out[t] = sum over k of fc2(act(fc1(x[t])) * p[t, k]) of expert ids[t, k], skipping ids of -1.

    Differentiable in `tokens` [T, H], `probs` [T, K] (None: ones), all experts' weights `w1`
    [E, F1, H] and `w2` [E, H, F], and `biases` [E, F1] and [E, H]; p multiplies the second, too.
    `ids` are [T, K]; `activation` is as for overlapped_moe.
    """
    act = resolve_activation(activation)
    out = torch.zeros_like(tokens)
    for expert in range(w1.shape[0]):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        h = tokens[token] @ w1[expert].t()
        a = act.forward(h if biases is None else h + biases[0][expert])
        p = torch.ones_like(a[:, :1])
        if probs is not None:
            p = probs[token, choice].unsqueeze(1).to(a.dtype)
        y = (a * p) @ w2[expert].t()
        out = out.index_add(0, token, y if biases is None else y + biases[1][expert] * p)
    return out


class ExpertProblem(NamedTuple):
    """One call of an MoE layer, and what it should give.

    ids: [T, K]. leaves: x [T, H], probs [T, K], w1 [E, F1, H], w2 [E, H, F], and with biases
    b1 [E, F1] and b2 [E, H]; each requires a gradient. grad: of the output. [T, H]
    """

    ids: Tensor
    leaves: list[Tensor]
    grad: Tensor

    @classmethod
    def draw(
        cls, ids: Tensor, experts: int, hidden: int, ffn: int, *,
        activation: str | Activation = "swiglu", biased: bool = False,
    ) -> ExpertProblem:  # fmt: skip
        """Normal leaves in fp32 on the device of ids."""
        g = torch.Generator().manual_seed(4)
        tokens, top_k = ids.shape
        wide = 2 * ffn if resolve_activation(activation).gated else ffn
        shapes = [(tokens, hidden), (tokens, top_k)]
        shapes += [(experts, wide, hidden), (experts, hidden, ffn)]
        shapes += [(experts, wide), (experts, hidden)] if biased else []
        drawn = [torch.randn(*shape, generator=g) * 0.4 for shape in (*shapes, (tokens, hidden))]
        *leaves, grad = (tensor.to(ids.device) for tensor in drawn)
        return cls(ids, [leaf.requires_grad_() for leaf in leaves], grad)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """x, ids, probs, w1, w2"""
        x, probs, w1, w2, *_ = self.leaves
        return x, self.ids, probs, w1, w2

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        tables: Any = tuple(self.leaves[4:])
        return tables or None

    def gradients(self, y: Tensor) -> list[Tensor]:
        """y, and the gradient of each leaf."""
        return gradients(y, self.leaves, self.grad)

    def expected(self, activation: str | Activation = "swiglu") -> list[Tensor]:
        """`gradients` in plain torch."""
        return self.gradients(moe_reference(*self.arguments, activation, self.biases))
