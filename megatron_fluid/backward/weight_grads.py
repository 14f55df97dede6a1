"""Deferred weight gradients: queued in backward, run during an exchange, delivered before
backward() returns.

A layer's backward has two parts: dX, which the layer below waits for, and dW, which nobody does.
With the scheduler enabled a layer queues its dW, and the next exchange of any layer runs it while
bytes move::

    [dX of layer 2] -> [exchange of layer 2 || dW of layer 2, fc1] -> [dX of layer 1] -> ...

Forgetting loses nothing: the first task of a backward registers a callback with the autograd
engine, which flushes what is left before backward() returns. A gradient reaches its parameter
through the parameter's own AccumulateGrad node, so gradient accumulation, several optimizers and
hooks work as ever.

Limits under torch's DDP: a deferred weight may be used once per forward, and `static_graph` and
`find_unused_parameters` must be off (DDP marks a parameter ready at its first gradient). Megatron's
DDP has no such limit (megatron_fluid.backward.autograd). In a process that uses FSDP2 dW is
computed at once.

Ownership: a task holds its tensors itself (never a pooled buffer that a later layer may overwrite),
and a backward's tasks belong to that backward alone. If it fails, they vanish with it and cannot
leak into the next.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fluid.backward.autograd import apply, gate_with

__all__ = [
    "Exchange",
    "WeightGradScheduler",
    "deliver_gradients",
    "get_backward_scheduler",
    "sharded_by_fsdp",
    "weight_grad_task",
]


class Exchange(Protocol):
    """An exchange in flight (see comm.p2p_rounds.PendingRound)."""

    def done(self) -> bool: ...


def weight_grad_task(
    name: str,
    params: Sequence[Tensor],
    compute: Callable[[], Sequence[Tensor] | None],
    stream: torch.cuda.Stream | None = None,
) -> Callable[[], None]:
    """Return a function that computes gradients and delivers them. The gate of the parameters waits
    for it from now on.

    Args:
        name, params, compute: see WeightGradScheduler.submit.
        stream: where it runs, whatever stream it is called on; None: on that one.
    """

    def run() -> None:
        with torch.no_grad():
            gradients = compute()
        if gradients is None:
            return
        if (found := len(gradients)) != len(params):
            raise RuntimeError(f"{name}: {found} gradients for {len(params)} parameters")
        deliver_gradients(params, gradients)

    def run_on_stream() -> None:
        assert stream is not None
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    task = run if stream is None else run_on_stream
    gate = gate_with(params[0]) if params else None
    return task if gate is None else gate.deferred(task)


class _Deliver(torch.autograd.Function):
    """Whose backward gives the parameters that it was called with gradients from elsewhere."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        # Not new_empty, which copies a parameter whose class only wraps tensors.
        return torch.empty((), dtype=params[0].dtype, device=params[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Tensors that nobody else holds become .grad without a copy.
        return None, *(gradient.detach() for gradient in ctx.gradients)


def deliver_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to leaves as their own backward would.

    They go through the leaves' AccumulateGrad nodes, so tensor hooks and those of Megatron's
    DistributedDataParallel (which hang on that node) fire with the gradient in place: once for each
    use of the leaf. All in one backward: to start one takes longer than a leaf does.

    Args:
        params: leaves. [any shape] Those that meanwhile require no gradient are left out, as
            autograd leaves them out.
        gradients: one for each, of the same shape.
    """
    wanted = [param.requires_grad for param in params]
    if not all(wanted):
        params, gradients = list(compress(params, wanted)), list(compress(gradients, wanted))
    if not params:
        return
    with torch.enable_grad():
        root = apply(_Deliver, gradients, *params)
    torch.autograd.backward(root, root.detach())


class _Batch:
    """The queued tasks of one backward pass. Only that backward's engine callback keeps it
    alive."""

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], None]] = deque()
        self.thread = threading.get_ident()

    def run_one(self) -> bool:
        """Run the oldest task; False if there is none. A failing task takes the rest with it:
        backward has failed."""
        try:
            task = self.tasks.popleft()
        except IndexError:
            return False
        try:
            task()
        except BaseException:
            # The traceback keeps this object alive, and the engine will not flush: what is left
            # must not run later.
            self.tasks.clear()
            raise
        return True

    def flush(self) -> None:
        while self.run_one():
            pass


def _compiled_backward() -> bool:
    """Whether torch's compiled autograd runs this backward, which never calls what is queued for
    its end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def sharded_by_fsdp() -> bool:
    """Whether modules of this process are under torch's FSDP2, which reduces a module's gradients
    as soon as the gradients of its inputs are there: later ones would be lost."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    return bool(getattr(fsdp, "cls_to_fsdp_cls", None))


class WeightGradScheduler:
    """Queue of weight gradients to run during exchanges. `get_backward_scheduler` gives the
    process-wide one.

    Layers ask `is_enabled()` in forward: if it is, they keep their weights out of the autograd
    graph and `submit` dW in backward; if not, they compute dW during their own exchange and return
    it to autograd. What is decided in forward holds for that call's backward, whatever is switched
    in between. While it is enabled, `torch.autograd.grad` with respect to such a weight finds it
    unused, and `.backward(inputs=...)` leaves its `.grad` as it was; `.backward()` fills `.grad`.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._lock = threading.Lock()
        self._batches: weakref.WeakValueDictionary[int, _Batch] = weakref.WeakValueDictionary()

    def enable(self) -> None:
        """Defer the weight gradients of forwards from now on."""
        self.enabled = True

    def disable(self) -> None:
        """Defer no more, and run what is queued."""
        self.enabled = False
        self.finish_batch()

    def is_enabled(self) -> bool:
        """Whether weight gradients are deferred. Some are not even then: see Readiness.bypass."""
        return self.enabled

    def pending(self) -> int:
        """Number of queued tasks: 0 whenever no backward is running."""
        batches = map(self._batches.get, self._keys())
        return sum(len(batch.tasks) for batch in batches if batch is not None)

    def submit(
        self, name: str, params: Sequence[Tensor], compute: Callable[[], Sequence[Tensor] | None]
    ) -> None:
        """Queue the gradients of `params`. Called from inside a backward; elsewhere, or disabled,
        they run at once.

        Args:
            name: what is computed, for errors.
            params: leaves that require gradients.
            compute: gives one gradient for each of params, in their shapes, or None where it has
                delivered them itself; called once, without gradient mode. It owns the tensors that
                it reads.
        """
        # On the stream it is queued from: what it reads was made there, and the allocator knows
        # those tensors by it.
        stream = torch.cuda.current_stream() if any(param.is_cuda for param in params) else None
        graph_task = torch._C._current_graph_task_id()
        run = weight_grad_task(name, params, compute, stream)
        at_once = sharded_by_fsdp() or _compiled_backward()
        if graph_task == -1 or not self.enabled or at_once:
            run()
            return
        with self._lock:
            batch = self._batches.get(graph_task)
            if batch is None:
                batch = self._batches[graph_task] = _Batch()
                # The closure is the only strong reference. A backward that fails destroys it, and
                # the tasks with it.
                torch.autograd.Variable._execution_engine.queue_callback(batch.flush)  # type: ignore[attr-defined]
        batch.tasks.append(run)

    def run_during(self, pending: Sequence[Exchange], max_tasks: int | None = None) -> int:
        """Run this thread's queued tasks while exchanges are in flight. Layers call it right after
        they started one.

        Args:
            pending: the exchanges; once all are done nothing more is taken from the queue.
            max_tasks: at most so many; None for no bound.

        Returns:
            How many tasks ran.
        """
        ran = 0
        for key in self._keys():
            batch = self._batches.get(key)
            if batch is None or batch.thread != threading.get_ident():
                # another thread's backward could return before what was taken from it is done
                continue
            while batch.tasks and (max_tasks is None or ran < max_tasks):
                if all(exchange.done() for exchange in pending):
                    return ran
                ran += batch.run_one()
        return ran

    def finish_batch(self) -> None:
        """Run everything that is queued. Idempotent; after backward() has returned there is nothing
        left to do."""
        for key in self._keys():
            if (batch := self._batches.get(key)) is not None:
                batch.flush()

    def _keys(self) -> list[int]:
        # Keys and not batches: a list of batches in a frame would outlive a failed backward with
        # its traceback.
        with self._lock:
            return sorted(self._batches.keys())


_scheduler = WeightGradScheduler()


def get_backward_scheduler() -> WeightGradScheduler:
    """The process-wide scheduler, disabled until `enable()`.

    ``scheduler = get_backward_scheduler(); scheduler.enable(); loss.backward();
    scheduler.finish_batch()``
    """
    return _scheduler
