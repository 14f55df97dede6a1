"""Autograd Functions with less Python around them: a fine-grained layer of a millisecond passes through several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable as torch_once_differentiable

__all__ = ["apply", "graph_is_kept", "once_differentiable"]


def apply(function: type[Function], *arguments: Any) -> Any:
    """function.apply(*arguments), for a Function without setup_context that starts kernels.

    Function.apply first looks for functorch's transforms and their tensors. Those have no memory that a kernel could be
    given, so that nothing is lost by going straight to the base class.
    """
    return super(Function, function).apply(*arguments)  # type: ignore[misc]


def graph_is_kept() -> bool:
    """Inside a backward: whether what was saved for it may be asked for again (retain_graph). True where this torch does
    not tell.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.function.once_differentiable, which is gone through only where it makes a difference: where the
    backward is itself recorded (create_graph).
    """
    guarded = torch_once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return wrapper
