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

__all__ = ["backward_post_hook"]


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
        for param in params:
            if (group := groups.get(param)) is not None:
                group.register_grad_ready(param, force_all_reduce)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled parameter takes its attributes along; a report belongs to this process."""
        return _no_report, ()


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
