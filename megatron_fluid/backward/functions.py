"""Autograd Functions with less Python around them: a fine-grained layer of a millisecond passes
through several."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable as torch_once_differentiable

from megatron_fluid.comm.failed_waits import check_after_backward, tells_peers

__all__ = ["apply", "backward_is_recorded", "goes_on_to", "graph_is_kept", "once_differentiable"]

# Of autograd's threads: whether once_differentiable has turned gradients off.
_recorded = threading.local()


def apply(function: type[Function], *arguments: Any) -> Any:
    """function.apply(*arguments), for a Function without setup_context that starts kernels.

    Function.apply first looks for functorch's transforms and their tensors. Those have no memory
    that a kernel could be given, so that nothing is lost by going straight to the base class.
    """
    return super(Function, function).apply(*arguments)  # type: ignore[misc]


def graph_is_kept() -> bool:
    """Inside a backward: whether what was saved for it may be asked for again (retain_graph). True
    where this torch does not say.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def goes_on_to(edge: tuple[Any, int]) -> bool:
    """Inside a backward: whether it goes on along this one of ctx.next_functions; not where others
    alone were asked for, by torch.autograd.grad or backward(inputs=...).
    """
    return bool(torch._C._will_engine_execute_node(edge[0]))


def backward_is_recorded() -> bool:
    """Inside a backward: whether it is itself recorded, to be differentiated again
    (create_graph)."""
    return torch.is_grad_enabled() or getattr(_recorded, "on", False)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.function.once_differentiable, which is gone through only where it makes a
    difference: where the backward is itself recorded (create_graph). What that gives is then
    refused by a second backward, always.

    An error is reported to the ranks that wait for this one. At the end of a backward with such a
    Function, waits that are known to have failed raise (megatron_fluid.comm.failed_waits).
    """
    guarded = torch_once_differentiable(backward)

    @tells_peers
    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        check_after_backward()
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        before, _recorded.on = getattr(_recorded, "on", False), True
        try:
            return guarded(ctx, *map(_not_constant, grads))
        finally:
            _recorded.on = before

    return wrapper


def _not_constant(grad: Any) -> Any:
    """A gradient that requires a gradient: from constants, as that of a sum is, torch's own
    once_differentiable gives constants, though they come from what was saved, too, and a second
    backward would leave the Function out without a word.
    """
    if not isinstance(grad, torch.Tensor) or grad.requires_grad or not grad.is_floating_point():
        return grad
    return grad.detach().requires_grad_()
