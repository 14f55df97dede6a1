"""Where the weight gradients of Megatron's linears go: into `main_grad` with gradient accumulation
fusion, else to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad, mark_added_to_main_grad

__all__ = ["into_main_grad", "rows_gradient_of", "weight_gradient_of"]


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
        return mark_added_to_main_grad([weight])[0] if marked else None

    return deliver


def weight_gradient_of(
    linear: Any, compute: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """dW of a linear from dy and x, as `compute` gives it or, with gradient accumulation fusion,
    delivered into main_grad."""
    fused = _is_fused(linear)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        deliver = into_main_grad(linear.weight, fused)
        if deliver is None:
            return compute(dy, x)
        stand_in = deliver(x.flatten(0, 1), dy.flatten(0, 1))
        # None where nobody looks for a mark (not Megatron's DistributedDataParallel): the queue of
        # weight gradients delivers tensors.
        return torch.zeros_like(linear.weight) if stand_in is None else stand_in

    return gradient


def rows_gradient_of(linear: Any, rows: slice) -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """The delivery of dW of some rows of a linear's weight into those of main_grad, from inputs a
    [M, K] and dc [M, rows]; None without gradient accumulation fusion.

    What it gives stands in for the rows' gradient: autograd completes it to the weight's, whose
    hooks fire.
    """
    weight = linear.weight
    if not _is_fused(linear) or not hasattr(weight, "main_grad"):
        return None

    def deliver(a: Tensor, dc: Tensor) -> Tensor | None:
        if getattr(weight, "overwrite_main_grad", False):
            weight.main_grad.zero_()  # the other rows' gradient is other ranks'
        add_product_to_main_grad(weight.main_grad[rows], dc, a, overwrite=False)
        if hasattr(weight, "grad_added_to_main_grad"):
            mark_added_to_main_grad([weight])
        return torch.zeros_like(weight[rows])

    return deliver


def _is_fused(linear: Any) -> bool:
    """Whether gradient accumulation fusion is on for one of Megatron's linears."""
    fused = getattr(linear, "gradient_accumulation_fusion", None)
    return bool(linear.fuse_wgrad_accumulation if fused is None else fused)
