"""What this package asks of autograd: Functions with little Python around them (fine-grained layers
of a millisecond pass through several), and when the gradients of a parameter are complete.

The owner of gradient buffers (Megatron's DistributedDataParallel) starts to reduce gradients once
it is told that they are complete. Autograd tells it when it runs a parameter's AccumulateGrad node:
once in each backward, after all uses of the parameter.

This package often leaves weights out of the graph. As an input, each would cost the host about 10
microseconds, and autograd would report a deferred gradient before it is computed. So a `ReadyGate`
counts the calls that use such weights, up in forward and down in backward. It reports once this
backward has no call, no queued gradient and no visit of autograd left. Autograd knows which calls
belong to the running backward. The gate does not wait for a call that never runs backward, or runs
it in another backward (recompute has its own).
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from megatron_fluid.comm.failed_waits import check_after_backward, tells_peers
from megatron_fluid.errors import ConfigError

__all__ = [
    "GradientOwner",
    "ReadyGate",
    "Readiness",
    "apply",
    "gate_with",
    "weights_wanted",
    "gradient_owner",
    "graph_is_kept",
    "once_differentiable",
    "readiness_of",
    "set_gradient_owner",
]

_LOGGER = logging.getLogger("megatron_fluid")


def apply(function: type[Function], *arguments: Any) -> Any:
    """function.apply(*arguments), for a Function without setup_context that starts kernels.

    Function.apply first looks for functorch's transforms, which `tells_peers` has refused.
    torch.compile breaks its graph here, also in a backward that it traces.
    """
    if torch.compiler.is_dynamo_compiling():
        return _outside_the_graph(function, *arguments)
    return super(Function, function).apply(*arguments)  # type: ignore[misc]


_outside_the_graph = torch._disable_dynamo(apply)


def graph_is_kept() -> bool:
    """Inside a backward: whether what was saved for it may be asked for again (retain_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def goes_on_to(edge: tuple[Any, int]) -> bool:
    """Inside a backward: whether it goes on along this one of ctx.next_functions; not where others
    alone were asked for, by torch.autograd.grad or backward(inputs=...).
    """
    return bool(torch._C._will_engine_execute_node(edge[0]))


def weights_wanted(anchor: tuple[Any, int]) -> bool:
    """Inside a backward: whether weights that are kept out of the graph get their gradients.
    anchor: what of ctx.next_functions stands for them. The first time that they get none, a line
    says so."""
    wanted = goes_on_to(anchor)
    if not wanted:
        _say_left_out()
    return wanted


@functools.cache
def _say_left_out() -> None:
    _LOGGER.warning(
        "a backward that names what it wants (torch.autograd.grad, backward(inputs=...), pipeline "
        "schedules that split it) gives deferred weights no gradient, nor those under Megatron's "
        "DistributedDataParallel. To get them, call get_backward_scheduler().disable() before the "
        "forward; under Megatron leave --fluid-defer-weight-grads out, and give "
        "--fluid-disable-patch gradient-readiness"
    )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of a Function whose gradients cannot be differentiated again. With
    create_graph it raises ConfigError. torch's wrapper of this name leaves an error for the second
    backward, which misses it where another way leads to the inputs (here: through the router).
    Batched gradients, which have no memory, are refused, too.

    An error is reported to the ranks that wait for this one. At the end of a backward with such a
    Function, waits that are known to have failed raise (megatron_fluid.comm.failed_waits).
    """

    @tells_peers
    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        check_after_backward()
        if torch.is_grad_enabled():
            allowed = "False: gradients of gradients cannot be had"
            raise ConfigError.of(f"{backward.__qualname__}: create_graph", True, allowed)
        for grad in grads:
            if grad is not None and not _has_memory(grad):
                name = f"{backward.__qualname__}: is_grads_batched or vectorize"
                raise ConfigError.of(name, True, "False: one gradient at a time")
        return backward(ctx, *grads)

    return wrapper


# ---- when the gradients of a parameter are complete

_OWNER = "fluid_gradient_owner"
_main_grad_dtype = operator.attrgetter("main_grad.dtype")
_OF_AUTOGRAD = tuple(
    map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks", "grad"))
)
_has_memory = torch._C._has_storage
_running = torch._C._current_graph_task_id  # -1 outside of backward passes
_will_run = torch._C._will_engine_execute_node


class GradientOwner(Protocol):
    """The owner of gradient buffers, as backward passes see it."""

    def accepts(self) -> bool:
        """Whether gradients may be reported now. False while a CUDA graph of a layer is
        captured: that backward asks autograd for the gradient of each parameter."""

    def accepts_in_graphs(self) -> bool:
        """If `accepts()` is False: whether a captured backward may add gradients to main_grad and
        give autograd none, because the owner is told at each replay."""

    def gate_of(self, params: Sequence[Tensor]) -> ReadyGate | None:
        """The gate of exactly these parameters, made at the first call; None where one of them has
        another owner or gate."""

    def gate_with(self, param: Tensor) -> ReadyGate | None:
        """The gate that a parameter is in."""

    def count_again(self) -> None:
        """Expect, from this iteration on, a different number of backward passes with a gradient
        for the same parameter. Called in forward, on all ranks."""


@dataclass(slots=True)
class _Backward:
    """State of a gate in one backward.

    Attributes:
        queued: number of deferred gradients that are not computed yet.
        visited: id() of the parameters whose AccumulateGrad node autograd has run.
    """

    queued: int = 0
    visited: set[int] = field(default_factory=set)


class ReadyGate:
    """Parameters that become ready together, once in each backward.

    Args:
        params: leaf tensors. Their owner makes the gate and implements `report`.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = tuple(params)
        # Node of a call -> id of the backward in which `leave` was called, -1 before.
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._backwards: dict[int, _Backward] = {}
        self._visits: list[Any] = []
        self._delivering = False
        # The iteration in which `takes_main_grads` was True last, and how many hooks of any kind
        # had been registered in the process by then.
        self._took: object = None
        self._hooks = -1

    def report(self, pending: Callable[[], set[int]]) -> None:
        """Called when this backward's gradients are in main_grad. `pending` returns the id() of
        each parameter that autograd has still to visit: that visit tells the owner."""
        raise NotImplementedError

    def iteration(self) -> object:
        """An object that is another one in each iteration; None where the owner does not tell
        iterations apart."""
        return None

    def takes_main_grads(self) -> bool:
        """Whether gradients may be added to main_grad, past autograd. Not looked at again in an
        iteration before somebody registers a hook, since four looks at each of hundreds of
        parameters cost as much as all others of a call."""
        now, hooks = self.iteration(), RemovableHandle.next_id
        if now is None or now is not self._took or hooks != self._hooks:
            if not _takes_main_grads(self.params):
                return False
            self._took, self._hooks = now, hooks
        # Who sets gradients by hand between two microbatches sets all: two looks are enough.
        return all(param.grad is None for param in (*self.params[:1], *self.params[-1:]))

    def enter(self, node: Any) -> None:
        """Count a call in forward.

        Args:
            node: ctx of its function. `node.anchor` is an index into its next_functions: the edge
                that tells whether gradients of leaves are wanted.
        """
        self._calls[node] = -1

    def leave(self, node: Any) -> None:
        """Called in the backward of a call, once its gradients are added or queued."""
        task = self._calls[node] = _running()
        self._report_if_complete(task)

    def deferred(self, run: Callable[[], None]) -> Callable[[], None]:
        """Count `run`, which will compute and deliver gradients of this backward. Returns the
        function to call in its place."""
        task = _running()
        backward = self._backwards.setdefault(task, _Backward())
        backward.queued += 1

        def counted_run() -> None:
            self._delivering = True  # autograd visits made by `run` belong to it
            try:
                run()
            finally:
                self._delivering = False
            backward.queued -= 1
            self._report_if_complete(task)

        return counted_run

    def waits(self, param: Tensor) -> bool:
        """Called when autograd has added to the gradient of `param`. Return whether this backward
        still has other contributions; the gate then reports the parameter after the last."""
        if self._delivering:
            return True
        task = _running()
        waits = self._busy(task)
        if waits:
            self._backwards.setdefault(task, _Backward()).visited.add(id(param))
        return waits

    def _busy(self, task: int) -> bool:
        """Whether a backward has a call or a queued gradient left."""
        backward = self._backwards.get(task)
        if backward is not None and backward.queued:
            return True
        # A ctx may outlive its node, and then has no next_functions.
        return task == _running() != -1 and any(
            left != task and _will_run(node) and goes_on_to(node.next_functions[node.anchor])
            for node, left in self._calls.items()
        )

    def _report_if_complete(self, task: int) -> None:
        """Report, unless a call or a queued gradient is left."""
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
    """How the gradients of one call's weights are delivered and counted.

    Attributes:
        gates: one for each projection whose gradients are counted.
        bypass: whether the weights may be left out of the graph.
        direct: whether they are left out, and the gradients are added to main_grad.
        captured: whether a CUDA graph is being captured whose replays add to main_grad. Autograd
            asks for each parameter's gradient and gets None.
    """

    gates: tuple[ReadyGate, ...] = ()
    bypass: bool = True
    direct: bool = False
    captured: bool = False

    def takes_main_grads(self) -> bool:
        """Asked in backward: whether what `direct` says still holds, and nobody has registered a
        hook since."""
        return self.direct and all(gate.takes_main_grads() for gate in self.gates)

    def enter(self, node: Any) -> None:
        for gate in self.gates:
            gate.enter(node)

    def leave(self, node: Any) -> None:
        for gate in self.gates:
            gate.leave(node)


def set_gradient_owner(param: Tensor, owner: GradientOwner) -> None:
    """Set the owner that is told when gradients of `param` that bypass autograd are complete."""
    setattr(param, _OWNER, owner)


def gradient_owner(param: Tensor) -> GradientOwner | None:
    """The owner that `set_gradient_owner` left with a parameter."""
    return getattr(param, _OWNER, None)


def gate_with(param: Tensor) -> ReadyGate | None:
    """The gate that a parameter is in."""
    owner = gradient_owner(param)
    return None if owner is None else owner.gate_with(param)


_replicated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # seen by _inside_ddp


def _inside_ddp(params: Sequence[Tensor]) -> bool:
    """Whether this forward is inside torch's DDP, which reduces a gradient when it comes for the
    first time in a backward: there would be one for each use. A forward that is recomputed runs
    outside of DDP's: in a backward it is taken for one of those seen that have its parameters."""
    ddp = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        ours = set(map(id, params)) if _replicated and _running() != -1 else set()
        return any(id(p) in ours for ddp in _replicated for p in ddp.parameters())
    _replicated.add(ddp)
    return True


def readiness_of(*groups: Sequence[Tensor]) -> Readiness:
    """How gradients of these leaves are delivered. Each group is written by one call."""
    owners = [owner for group in groups if (owner := gradient_owner(group[0])) is not None]
    if not owners:
        # Their hooks want the sum of all uses, which autograd has and a delivery for each has not.
        # And what a hook sends must come in one order on all ranks: queued ones run as time allows.
        kinds = "_post_accumulate_grad_hooks", "_backward_hooks"
        hooked = any(getattr(p, kind) for group in groups for p in group for kind in kinds)
        return Readiness(bypass=not (hooked or _inside_ddp([*itertools.chain(*groups)])))
    owner = owners[0]
    if not owner.accepts():
        captured = owner.accepts_in_graphs() and all(map(_takes_main_grads, groups))
        return Readiness(bypass=False, captured=captured)
    gates = [gate for group in groups if (gate := owner.gate_of(group)) is not None]
    if len(gates) < len(groups):  # a parameter has another gate: autograd delivers
        return Readiness(bypass=False)
    return Readiness(tuple(gates), direct=all(gate.takes_main_grads() for gate in gates))


def _takes_main_grads(params: Sequence[Tensor]) -> bool:
    """Whether all have an fp32 main_grad (the owner has to round to other dtypes), and no hook and
    no .grad, which only autograd handles."""
    # Runs in every call for about a hundred parameters: map and count loop in C.
    try:
        counts = [list(map(_main_grad_dtype, params)).count(torch.float32)]
    except AttributeError:  # one has no main_grad, or none yet
        return False
    counts += [list(map(attribute, params)).count(None) for attribute in _OF_AUTOGRAD]
    return counts.count(len(params)) == len(counts)
