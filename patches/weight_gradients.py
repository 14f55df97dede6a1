"""Where the weight gradients of Megatron's linears go: into `main_grad` with gradient accumulation
fusion, else to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad, mark_added_to_main_grad

__all__ = ["into_main_grad", "weight_gradient_of"]


def into_main_grad(weight: Tensor, fused: bool) -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """The delivery of dW = dc^T a into main_grad, of rows a [M, K] and dc [M, N].

    It gives what autograd is to have in dW's place, so that Megatron's hooks fire; None where no
    hook waits for the mark that main_grad has the gradient.

    Args:
        weight: the parameter, [N, K].
        fused: whether gradient accumulation fusion is on; without it there is no such delivery.
    """
    if not fused or not hasattr(weight, "main_grad"):
        return None

    def deliver(a: Tensor, dc: Tensor) -> Tensor | None:
        overwrite = getattr(weight, "overwrite_main_grad", False)
        add_product_to_main_grad(weight.main_grad, dc, a, overwrite=overwrite)
        # Without the mark nobody would know that what autograd is given is not the gradient.
        marked = hasattr(weight, "grad_added_to_main_grad")
        return mark_added_to_main_grad(weight) if marked else None

    return deliver


def weight_gradient_of(
    linear: Any, compute: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """dW of a linear from dy and x, as `compute` gives it or, with gradient accumulation fusion,
    delivered into main_grad."""
    fused = getattr(linear, "gradient_accumulation_fusion", None)
    fused = bool(linear.fuse_wgrad_accumulation if fused is None else fused)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        deliver = into_main_grad(linear.weight, fused)
        if deliver is None:
            return compute(dy, x)
        stand_in = deliver(x.flatten(0, 1), dy.flatten(0, 1))
        # None where nobody looks for a mark (not Megatron's DistributedDataParallel): the queue of
        # weight gradients delivers tensors.
        return torch.zeros_like(linear.weight) if stand_in is None else stand_in

    return gradient
