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
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_fluid.backward.main_grad import set_ready_report

__all__ = ["ParameterGathers", "backward_post_hook"]


class _Members:
    """Parameters of one bucket group that become ready together.

    A tensor's hash is computed by Python: Megatron asks for that of each parameter several times in
    a backward, which here is done once for all backward passes. Only the last parameter goes
    through `register_grad_ready`, which compares the counts and starts the reduction; to be counted
    is all that it would have done with the others.
    """

    def __init__(self, group: Any, params: Sequence[Tensor]) -> None:
        self.group, self._params = group, params
        self._others = dict.fromkeys(params[:-1], 1)
        own = getattr(type(group), "register_grad_ready", None)
        module = "megatron.core.distributed.param_and_grad_buffer"
        self._is_megatrons = getattr(own, "__module__", None) == module
        self._distinct = len({*self._others, params[-1]}) == len(params)

    def register(self, force_all_reduce: bool) -> None:
        """Do what `register_grad_ready` of each would do."""
        group, params = self.group, self._params
        if self._is_megatrons and self._distinct and "register_grad_ready" not in group.__dict__:
            counts = group.per_param_grad_ready_counts
            together = counts | self._others
            if len(together) == len(counts) + len(self._others):  # none is counted so far
                counts.update(self._others)
                params = params[-1:]
        for param in params:
            group.register_grad_ready(param, force_all_reduce)


def _members_of(ddp: Any, params: Sequence[Tensor]) -> Sequence[_Members]:
    """`params` by bucket group, without those of none; kept with `ddp`, whose groups hold the
    parameters, too."""
    known: dict[int, tuple[Sequence[Tensor], list[_Members]]]
    known = ddp.__dict__.setdefault("_fluid_members", {})
    found = known.get(id(params[0]))
    same = found is not None and len(found[0]) == len(params)
    if found is not None and same and all(map(operator.is_, found[0], params)):
        return found[1]
    groups: dict[int, tuple[Any, list[Tensor]]] = {}
    for param in params:
        if (group := ddp.param_to_bucket_group.get(param)) is not None:
            groups.setdefault(id(group), (group, []))[1].append(param)
    members = [_Members(*each) for each in groups.values()]
    known[id(params[0])] = tuple(params), members
    return members


class _Report:
    """What the hooks of one DistributedDataParallel would do with gradients in main_grad."""

    def __init__(self, ddp: Any) -> None:
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        self._ddp = weakref.ref(ddp)
        self._is_graph_capturing = is_graph_capturing

    def accepts(self) -> bool:
        return not self._is_graph_capturing()

    def accepts_in_graphs(self) -> bool:
        # After a replay the hooks run for each parameter, and find no .grad: with overlapped
        # reductions they refuse that, but for Megatron's own ("local") graphs.
        ddp = self._ddp()
        if ddp is None:
            return False
        local = getattr(ddp.config, "cuda_graph_impl", None) == "local"
        return local or not ddp.ddp_config.overlap_grad_reduce

    def __call__(self, params: Sequence[Tensor]) -> None:
        ddp = self._ddp()
        if ddp is None or not ddp.ddp_config.overlap_grad_reduce:
            return
        for members in _members_of(ddp, params):
            # A group counts in the last microbatch alone.
            if getattr(members.group, "is_last_microbatch", True):
                members.register(ddp.force_all_reduce)

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
