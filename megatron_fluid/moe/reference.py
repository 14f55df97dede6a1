"""The reference: a mixture of experts in plain torch, on one process, without any exchange,
permutation or grouping.

Everything overlapped is compared with it. It wants the tokens of all ranks and all experts'
weights, and lets autograd do the backward.

Legend: T tokens of all ranks, K top-k, E experts, H hidden, F1 / F widths of the experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fluid.moe.activations import Activation, resolve_activation

__all__ = ["moe_reference"]


def moe_reference(
    tokens: Tensor,
    ids: Tensor,
    probs: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    activation: str | Activation | Callable[[Tensor], Tensor],
) -> Tensor:
    """out[t] = sum over k of fc2(act(fc1(x[t])) * p[t, k]) of expert ids[t, k], skipping ids of -1.

    Args:
        tokens: [T, H]
        ids: [T, K] integers, -1 where a choice is dropped.
        probs: [T, K], or None for ones.
        w1, w2: all experts' weights, [E, F1, H] and [E, H, F].
        activation: as for overlapped_moe.

    Returns:
        [T, H], differentiable with respect to tokens, probs, w1 and w2.
    """
    act = resolve_activation(activation)
    out = torch.zeros_like(tokens)
    for expert in range(w1.shape[0]):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        a = act.forward(tokens[token] @ w1[expert].t())
        if probs is not None:
            a = a * probs[token, choice].unsqueeze(1).to(a.dtype)
        out = out.index_add(0, token, a @ w2[expert].t())
    return out
