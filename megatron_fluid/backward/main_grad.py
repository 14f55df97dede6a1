"""Weight gradients that go to `param.main_grad` (Megatron's gradient accumulation fusion).

Autograd visits every parameter of a function, which costs the host some 10 microseconds each: more
than the layer, where an expert's two matrices are parameters of their own. So the owner of the
gradient buffers may leave a `ReadyReport` with its parameters (`set_ready_report`). Such parameters
are no inputs of the function: their gradients are added to main_grad, and one call reports all of
them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "ReadyReport",
    "add_product_to_main_grad",
    "mark_added_to_main_grad",
    "mark_all_added_to_main_grad",
    "ready_report",
    "set_ready_report",
]

_report_of, _main_grad_dtype = map(operator.attrgetter, ("ready_report", "main_grad.dtype"))
_OF_AUTOGRAD = tuple(
    map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks", "grad"))
)


class ReadyReport(Protocol):
    """The owner of gradient buffers, as backward passes see it."""

    def accepts(self) -> bool:
        """Whether gradients may be reported now. Not while a layer's CUDA graph is captured, whose
        backward asks autograd for the gradient of each parameter."""

    def accepts_in_graphs(self) -> bool:
        """Where it does not accept: whether a captured backward may add gradients to main_grad and
        give autograd none, because the owner is told at each replay."""

    def __call__(self, params: Sequence[Tensor]) -> None:
        """The gradients of `params` in this backward are in main_grad. None of them has a .grad."""


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


def set_ready_report(param: Tensor, report: ReadyReport) -> None:
    """Let gradients of `param` bypass autograd: `report` does all that its hooks would do."""
    param.ready_report = report  # type: ignore[attr-defined]


def ready_report(params: Sequence[Tensor]) -> ReadyReport | None:
    """The report that all of `params` share, whose gradients a call may add to main_grad; None
    where one has none, has no main_grad of fp32 (another dtype is for the owner to round to), or
    has a hook or a gradient of its own, which autograd alone serves."""
    report: ReadyReport | None = getattr(params[0], "ready_report", None)
    if report is None:
        return None
    # Of a hundred parameters in every call: map and count, whose loops are in C.
    try:
        dtypes, reports = list(map(_main_grad_dtype, params)), list(map(_report_of, params))
    except AttributeError:  # one has no report or no main_grad, or none yet
        return None
    found = [dtypes.count(torch.float32), reports.count(report)]
    found += [list(map(attribute, params)).count(None) for attribute in _OF_AUTOGRAD]
    return report if found.count(len(params)) == len(found) else None


def mark_added_to_main_grad(param: Tensor) -> Tensor:
    """Tell Megatron's hook that main_grad holds the gradient. Returns what autograd is given in its
    place, so that the hook fires."""
    return mark_all_added_to_main_grad([param])[0]


def mark_all_added_to_main_grad(params: Sequence[Tensor]) -> list[Tensor]:
    """mark_added_to_main_grad for parameters of one shape. The results are views of one tensor that
    nobody reads: a tensor for each would take as much memory as the layer's weights.
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
