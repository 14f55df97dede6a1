"""When the gradients of a parameter are complete.

The owner of gradient buffers (Megatron's DistributedDataParallel) starts to reduce gradients once
it is told that they are complete. Autograd tells it when it runs a parameter's AccumulateGrad node:
once in each backward, after all uses of the parameter.

Weights of this package are often no inputs of the graph: autograd visits every input of a function,
which costs the host some 10 microseconds each, and a deferred gradient would come too late for it.
So a `ReadyGate` counts the calls with such weights, up in forward and down in backward, and reports
once nothing is left in this backward: no call, no queued gradient, no visit of autograd. Autograd
knows which calls belong to the running backward, so that a call whose backward never runs, or runs
in another backward (recomputation has one of its own), is not waited for.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fluid.backward.functions import goes_on_to

__all__ = [
    "GradientOwner",
    "ReadyGate",
    "Readiness",
    "counted",
    "gate_with",
    "gradient_owner",
    "readiness_of",
    "set_gradient_owner",
]

_OWNER = "fluid_gradient_owner"
_main_grad_dtype = operator.attrgetter("main_grad.dtype")
_OF_AUTOGRAD = tuple(
    map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks", "grad"))
)
_running = torch._C._current_graph_task_id  # -1 outside of backward passes
_will_run = torch._C._will_engine_execute_node


class GradientOwner(Protocol):
    """The owner of gradient buffers, as backward passes see it."""

    def accepts(self) -> bool:
        """Whether gradients may be reported now. Not while a layer's CUDA graph is captured, whose
        backward asks autograd for the gradient of each parameter."""

    def accepts_in_graphs(self) -> bool:
        """Where it does not accept: whether a captured backward may add gradients to main_grad and
        give autograd none, because the owner is told at each replay."""

    def gate_of(self, params: Sequence[Tensor]) -> ReadyGate | None:
        """The gate of exactly these parameters, made at the first call; None where one of them has
        another owner or gate."""

    def gate_with(self, param: Tensor) -> ReadyGate | None:
        """The gate that a parameter is in."""

    def count_again(self) -> None:
        """From this iteration on another number of backward passes may have a gradient for the
        same parameter. Called in forward, on all ranks alike."""


@dataclass(slots=True)
class _Backward:
    """What a gate knows of one backward.

    Attributes:
        queued: gradients that are not computed yet.
        visited: identities of parameters to which autograd has added its share.
    """

    queued: int = 0
    visited: set[int] = field(default_factory=set)


class ReadyGate:
    """Parameters that become ready together, once in each backward.

    Args:
        params: leaves, whose owner makes the gate and implements `report`.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = tuple(params)
        # By node of a call: the backward in which it has been left.
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._backwards: dict[int, _Backward] = {}
        self._visits: list[Any] = []
        self._delivering = False

    def report(self, pending: Callable[[], set[int]]) -> None:
        """The gradients of this backward are in main_grad. `pending` gives the identities of the
        parameters that autograd has not visited yet: their owner is told by that visit."""
        raise NotImplementedError

    def enter(self, node: Any) -> None:
        """A call has been recorded.

        Args:
            node: ctx of its function. `anchor` is the place, among its next_functions, of the graph
                anchor that says whether gradients of leaves are wanted.
        """
        self._calls[node] = -1

    def leave(self, node: Any) -> None:
        """Inside the backward of a call: its gradients are added, or queued."""
        task = self._calls[node] = _running()
        self._settle(task)

    def deferred(self, run: Callable[[], None]) -> Callable[[], None]:
        """Count `run`, which will compute and deliver gradients of this backward: the function to
        call in its place."""
        task = _running()
        backward = self._backwards.setdefault(task, _Backward())
        backward.queued += 1

        def counted_run() -> None:
            self._delivering = True  # its own visits of autograd are a part of it
            try:
                run()
            finally:
                self._delivering = False
            backward.queued -= 1
            self._settle(task)

        return counted_run

    def waits(self, param: Tensor) -> bool:
        """Autograd has added its share of the gradient of `param`: whether other shares of this
        backward are still to come. The gate then reports the parameter with the last of them."""
        if self._delivering:
            return True
        task = _running()
        waits = self._busy(task)
        if waits:
            self._backwards.setdefault(task, _Backward()).visited.add(id(param))
        return waits

    def _busy(self, task: int) -> bool:
        """Whether a call or a queued gradient of a backward is left."""
        backward = self._backwards.get(task)
        if backward is not None and backward.queued:
            return True
        # A ctx may outlive its node, and then has no next_functions.
        return task == _running() != -1 and any(
            left != task and _will_run(node) and goes_on_to(node.next_functions[node.anchor])
            for node, left in self._calls.items()
        )

    def _settle(self, task: int) -> None:
        """Report, unless something is left."""
        if self._busy(task):
            return
        backward = self._backwards.pop(task, None)
        visited = set() if backward is None else backward.visited

        def pending() -> set[int]:
            if task != _running() or task == -1:
                return set()
            if not self._visits:
                with torch.enable_grad():
                    views = [param.expand_as(param) for param in self.params]
                self._visits = [view.grad_fn.next_functions[0][0] for view in views]  # type: ignore[union-attr]
            runs = zip(self.params, map(_will_run, self._visits), strict=True)
            return {id(param) for param, will_run in runs if will_run} - visited

        self.report(pending)


@dataclass(frozen=True, slots=True)
class Readiness:
    """How gradients of the weights of one call are delivered, and counted.

    Attributes:
        gates: one for each projection whose gradients are counted.
        bypass: whether the weights may be left out of the graph.
        direct: whether they are, and the gradients added to main_grad.
        captured: whether a CUDA graph is captured whose replays add to main_grad: autograd, which
            asks for each parameter's gradient, is given None.
    """

    gates: tuple[ReadyGate, ...] = ()
    bypass: bool = True
    direct: bool = False
    captured: bool = False

    def enter(self, node: Any) -> None:
        for gate in self.gates:
            gate.enter(node)

    def leave(self, node: Any) -> None:
        for gate in self.gates:
            gate.leave(node)


def set_gradient_owner(param: Tensor, owner: GradientOwner) -> None:
    """Let `owner` be told when gradients of `param` are complete that autograd does not know of."""
    setattr(param, _OWNER, owner)


def gradient_owner(param: Tensor) -> GradientOwner | None:
    """The owner that `set_gradient_owner` left with a parameter."""
    return getattr(param, _OWNER, None)


def gate_with(param: Tensor) -> ReadyGate | None:
    """The gate that a parameter is in."""
    owner = gradient_owner(param)
    return None if owner is None else owner.gate_with(param)


def readiness_of(*groups: Sequence[Tensor]) -> Readiness:
    """How gradients of these leaves are delivered. Each group is written by one call."""
    owners = [owner for group in groups if (owner := gradient_owner(group[0])) is not None]
    if not owners:
        return Readiness()
    owner = owners[0]
    if not owner.accepts():
        captured = owner.accepts_in_graphs() and all(map(_takes_main_grads, groups))
        return Readiness(bypass=False, captured=captured)
    gates = [gate for group in groups if (gate := owner.gate_of(group)) is not None]
    if len(gates) < len(groups):  # autograd serves what is shared with other calls in parts
        return Readiness(bypass=False)
    return Readiness(tuple(gates), direct=all(map(_takes_main_grads, groups)))


def _takes_main_grads(params: Sequence[Tensor]) -> bool:
    """Whether all have a main_grad of fp32 (another dtype is for the owner to round to), and no
    hook or gradient of their own, which autograd alone serves."""
    # Of a hundred parameters in every call: map and count, whose loops are in C.
    try:
        found = [list(map(_main_grad_dtype, params)).count(torch.float32)]
    except AttributeError:  # one has no main_grad, or none yet
        return False
    found += [list(map(attribute, params)).count(None) for attribute in _OF_AUTOGRAD]
    return found.count(len(params)) == len(found)


def counted(params: Sequence[Tensor], run: Callable[[], None]) -> Callable[[], None]:
    """Count `run`, which will deliver gradients of `params`, with their gate: what to call in its
    place."""
    gate = gate_with(params[0]) if params else None
    return run if gate is None else gate.deferred(run)
