"""Code of a test that runs in a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["acts_in_backward"]


def acts_in_backward(x: Tensor, act: Callable[[], object]) -> Tensor:
    """A copy of x; `act` is called in its backward, which hands the gradient on."""
    copy: Tensor = _Acting.apply(x, act)  # type: ignore[no-untyped-call]
    return copy


class _Acting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], object]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.act()
        return grad, None
