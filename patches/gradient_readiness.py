"""Megatron's DistributedDataParallel learns once in each backward that a gradient is complete.

Megatron hangs a hook on each parameter's AccumulateGrad node. It adds the gradient to main_grad,
and with overlap_grad_reduce it registers the parameter as ready with its bucket group, which starts
the reduction once all of its parameters are registered as often as in the first iteration. Calls of
this package add gradients without a visit of autograd, or after it (megatron_fluid.backward.
readiness): their gate registers what they alone contribute to, and a hook that fires before their
last share leaves the registration to the gate. So a parameter is registered as often as without
this package, whatever ran its layers.

The parameters are not marked with grad_added_to_main_grad. The mark speaks to the hook, which may
have a share of autograd's to add.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_fluid import patches
from megatron_fluid.backward.autograd import (
    ReadyGate,
    gate_with,
    gradient_owner,
    set_gradient_owner,
)
from megatron_fluid.errors import FluidError

__all__ = ["backward_post_hook", "register_grad_ready"]


class _Gate(ReadyGate):
    """Parameters whose gradients one call writes, and how their bucket groups are told."""

    def __init__(self, owner: _Owner, ddp: Any, params: Sequence[Tensor]) -> None:
        super().__init__(params)
        self._owner = owner
        groups: dict[int, tuple[Any, list[Tensor]]] = {}
        for param in dict.fromkeys(params):
            if (group := ddp.param_to_bucket_group.get(param)) is not None:
                groups.setdefault(id(group), (group, []))[1].append(param)
        # All but the last of a group with their count: the last goes through Megatron's method.
        self._groups = [
            (group, members, dict.fromkeys(members[:-1], 1)) for group, members in groups.values()
        ]

    def iteration(self) -> object:
        if not self._groups:
            return None
        # Megatron makes new counts where it zeroes the gradients.
        return getattr(self._groups[0][0], "per_param_grad_ready_counts", None)

    def report(self, pending: Callable[[], set[int]]) -> None:
        ddp = self._owner.ddp()
        if ddp is None or not ddp.ddp_config.overlap_grad_reduce:
            return
        # A group counts in the last microbatch alone.
        counting = [each for each in self._groups if getattr(each[0], "is_last_microbatch", True)]
        left_out = pending() if counting else set()
        for group, members, others in counting:
            if left_out:
                members = [param for param in members if id(param) not in left_out]
            elif _count(group, others):
                members = members[-1:]
            for param in members:
                group.register_grad_ready(param, ddp.force_all_reduce)


def _count(group: Any, others: dict[Tensor, int]) -> bool:
    """Count parameters of a bucket group that are not counted so far, as its method would do:
    whether it is done.

    A tensor's hash is computed by Python, and Megatron asks for that of each parameter several
    times. Only the last parameter of a gate has to go through the method, which compares the counts
    and starts the reduction.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    if getattr(type(group), "register_grad_ready", None) is not Group.register_grad_ready:
        return False
    counts = group.per_param_grad_ready_counts
    if len(counts | others) < len(counts) + len(others):
        return False
    counts.update(others)
    return True


class _Owner:
    """The gradient buffers of one DistributedDataParallel."""

    def __init__(self, ddp: Any) -> None:
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        self.ddp = weakref.ref(ddp)
        self._is_graph_capturing = is_graph_capturing

    def accepts(self) -> bool:
        return not self._is_graph_capturing()

    def accepts_in_graphs(self) -> bool:
        # After a replay the hooks run for each parameter, and find no .grad: with overlapped
        # reductions they refuse that, but for Megatron's own ("local") graphs.
        ddp = self.ddp()
        if ddp is None:
            return False
        local = getattr(ddp.config, "cuda_graph_impl", None) == "local"
        return local or not ddp.ddp_config.overlap_grad_reduce

    def _gates(self) -> dict[int, ReadyGate]:
        """By identity of a parameter. Kept with the model, since they hold its parameters."""
        ddp = self.ddp()
        return {} if ddp is None else ddp.__dict__.setdefault("_fluid_gates", {})

    def gate_of(self, params: Sequence[Tensor]) -> ReadyGate | None:
        gates, ddp = self._gates(), self.ddp()
        gate = gates.get(id(params[0]))
        if gate is not None:
            same = len(gate.params) == len(params) and all(map(operator.is_, gate.params, params))
            return gate if same else None
        if ddp is None or any(gradient_owner(p) is not self or id(p) in gates for p in params):
            return None
        gate = _Gate(self, ddp, params)
        gates.update(dict.fromkeys(map(id, params), gate))
        return gate

    def gate_with(self, param: Tensor) -> ReadyGate | None:
        return self._gates().get(id(param))

    def count_again(self) -> None:
        # As in Megatron's first iteration: reductions start when backward is over, and the counts
        # are those to expect from then on.
        if (ddp := self.ddp()) is not None:
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                group.is_first_batch = True

    def bucket_groups(self, params: Sequence[Tensor]) -> tuple[Any, ...]:
        """The bucket groups of `params`, each once."""
        ddp = self.ddp()
        groups = {} if ddp is None else ddp.param_to_bucket_group
        found = (groups[param] for param in params if param in groups)
        return tuple({id(group): group for group in found}.values())

    def finished(self) -> bool:
        """Whether all gradients of the iteration are reduced (told by Megatron from 0.19 on)."""
        ddp = self.ddp()
        groups = () if ddp is None else ddp.param_to_bucket_group.values()
        return bool(groups) and all(getattr(g, "grad_reduce_finished", False) for g in groups)

    def name_of(self, param: Tensor) -> str:
        """The parameter's name in the model, for errors."""
        ddp = self.ddp()
        named = () if ddp is None else ddp.module.named_parameters()
        return next((name for name, found in named if found is param), "a parameter")

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled parameter takes its attributes along; an owner belongs to this process."""
        return type(None), ()


def backward_post_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedDataParallel._make_backward_post_hook`, which is called for each parameter:
    make the model its owner."""

    @functools.wraps(original)
    def fluid_hook(self: Any, param: Tensor) -> Any:
        if not patches.is_applied("gradient-readiness-count"):
            return original(self, param)
        owner = self.__dict__.get("_fluid_owner")
        if owner is None:
            owner = self._fluid_owner = _Owner(self)
        set_gradient_owner(param, owner)
        return original(self, param)

    return fluid_hook


def register_grad_ready(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `_ParamAndGradBucketGroup.register_grad_ready`: leave parameters with shares that are
    still to come to their gate, and refuse one that is registered after its reduction began."""

    @functools.wraps(original)
    def fluid_register(self: Any, param: Tensor, *args: Any, **kwargs: Any) -> None:
        gate = gate_with(param)
        if gate is not None and gate.waits(param):
            return
        original(self, param, *args, **kwargs)
        if self.is_first_batch or not self.is_last_microbatch:
            return
        found = self.per_param_grad_ready_counts[param]
        if found > (expected := self.golden_per_param_grad_ready_counts.get(param, 0)):
            owner = gradient_owner(param)
            if isinstance(owner, _Owner) and owner.finished():
                return  # a backward between two steps: Megatron reduces nothing of it
            name = owner.name_of(param) if isinstance(owner, _Owner) else "a parameter"
            raise FluidError(
                f"{name}: {found} backward passes of the last microbatch had a gradient for it, "
                f"and {expected} in the first iteration. With --overlap-grad-reduce its reduction "
                f"starts after {expected}, so that the last gradient would be lost. Recomputation "
                "runs a backward pass of its own for each layer: use the parameter in the same "
                "recomputed layers in every iteration, or train without --overlap-grad-reduce"
            )

    return fluid_register
