"""Megatron's DistributedDataParallel is notified of all expert gradients of a layer at once.

Megatron hangs a hook on each parameter's AccumulateGrad node. It adds the gradient to main_grad,
and with overlap_grad_reduce it reports the parameter to its bucket group, which starts the
reduction once all of them are ready. The experts' kernels add to main_grad themselves, with
gradient accumulation fusion and without, so that the report is all that is left to do, and needs no
visit of autograd (megatron_fluid.backward.main_grad).

The parameters are not marked with grad_added_to_main_grad. The mark speaks to the hook, which does
not run; and a microbatch that goes through autograd after all must not find it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_fluid.backward.main_grad import set_ready_report

__all__ = ["ParameterGathers", "backward_post_hook"]


class _Report:
    """What the hooks of one DistributedDataParallel would do with gradients in main_grad."""

    def __init__(self, ddp: Any) -> None:
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        self._ddp = weakref.ref(ddp)
        self._is_graph_capturing = is_graph_capturing

    def accepts(self) -> bool:
        return not self._is_graph_capturing()

    def __call__(self, params: Sequence[Tensor]) -> None:
        ddp = self._ddp()
        if ddp is None or not ddp.ddp_config.overlap_grad_reduce:
            return
        groups, force_all_reduce = ddp.param_to_bucket_group, ddp.force_all_reduce
        # A group counts in the last microbatch alone. Asked once: a layer has hundreds of
        # parameters in a few groups.
        counting: dict[int, bool] = {}
        for param in params:
            if (group := groups.get(param)) is None:
                continue
            counts = counting.get(id(group))
            if counts is None:
                counts = counting[id(group)] = getattr(group, "is_last_microbatch", True)
            if counts:
                group.register_grad_ready(param, force_all_reduce)

    def bucket_groups(self, params: Sequence[Tensor]) -> tuple[Any, ...]:
        """The bucket groups of `params`, each once."""
        ddp = self._ddp()
        groups = {} if ddp is None else ddp.param_to_bucket_group
        found = (groups[param] for param in params if param in groups)
        return tuple({id(group): group for group in found}.values())

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled parameter takes its attributes along; a report belongs to this process."""
        return _no_report, ()


class ParameterGathers:
    """Whether the parameters of a layer are gathered already, of its few bucket groups: Megatron's
    hook asks for each of some hundred parameters, in every microbatch."""

    def __init__(self) -> None:
        self._report: object = None
        self._groups: tuple[Any, ...] = ()

    def finished(self, first: Tensor, params: Callable[[], Sequence[Tensor]]) -> bool:
        """Whether the hooks would find nothing to do. False where that is not known.

        Args:
            first: one of the parameters.
            params: gives all of them.
        """
        report = getattr(first, "ready_report", None)
        if report is not self._report:
            self._report = report
            self._groups = report.bucket_groups(params()) if isinstance(report, _Report) else ()
        return bool(self._groups) and all(
            group.param_gather_dispatched and group.param_gather_handle is None
            for group in self._groups
        )


def _no_report() -> None:
    return None


def backward_post_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedDataParallel._make_backward_post_hook`, which is called for each parameter:
    leave a report with it too."""

    @functools.wraps(original)
    def fluid_hook(self: Any, param: Tensor) -> Any:
        report = self.__dict__.get("_fluid_report")
        if report is None:
            report = self._fluid_report = _Report(self)
        set_ready_report(param, report)
        return original(self, param)

    return fluid_hook
