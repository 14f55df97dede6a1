"""Weight gradients that go to `param.main_grad` (Megatron's gradient accumulation fusion)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_product_to_main_grad", "mark_added_to_main_grad"]


def add_product_to_main_grad(
    main_grad: Tensor, left: Tensor, right: Tensor, overwrite: bool = False
) -> None:
    """main_grad += left.T @ right, with the product kept in main_grad's precision, as Megatron's
    fused kernel (apex) computes it.

    Args:
        main_grad: usually fp32. [A, B]
        left, right: in the model's dtype. [N, A], [N, B]
        overwrite: main_grad = instead of +=.
    """
    beta = 0.0 if overwrite else 1.0
    if left.shape[0] == 0:
        if overwrite:
            main_grad.zero_()
    elif main_grad.dtype == left.dtype:
        main_grad.addmm_(left.t(), right, beta=beta)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, left.t(), right, out_dtype=main_grad.dtype, beta=beta, out=main_grad)
    else:
        main_grad.addmm_(left.t().to(main_grad.dtype), right.to(main_grad.dtype), beta=beta)


def mark_added_to_main_grad(params: Sequence[Tensor]) -> list[Tensor]:
    """Tell Megatron's hooks that main_grad holds the gradients of parameters of one shape. Returns
    what autograd is given in their place, so that the hooks fire: views of one tensor that nobody
    reads, since a tensor for each would take as much memory as the layer's weights.
    """
    for param in params:
        param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    zeroed = [getattr(param, "zero_out_wgrad", False) for param in params]
    if any(zeroed):
        made = zip(map(_plain, params), zeroed, strict=True)
        return [tensor.zero_() if zero else tensor for tensor, zero in made]
    if len(params) == 1:
        return [_plain(params[0])]
    return list(_plain(params[0]).expand(len(params), *params[0].shape).unbind(0))


def _plain(param: Tensor) -> Tensor:
    """A new tensor like `param`. empty_like would first copy a parameter whose class only wraps
    tensors (Transformer Engine's GroupedTensor)."""
    return torch.empty(param.shape, dtype=param.dtype, device=param.device)
