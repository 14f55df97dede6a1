"""Gradients that hold no sums yet, so that the first backward writes them.

To zero a gradient and to read the zeros again moves as many bytes as two gradients have. The owner
of gradient buffers may leave both out for parameters whose gradients one call of this package
writes whole: it marks them fresh (`GradGroup.mark`), and what main_grad holds is then no gradient.

Whoever adds to main_grad or reads it asks before: `begin` a call that can write all of them,
`settle` and `settle_all` anybody else. These write the zeros that are missing.

What is captured in a CUDA graph always adds: a replay asks nobody, and there may be several in an
iteration. Its gradients are then never fresh again (`captured`). But for a graph of a whole
iteration (`whole_iteration`), whose owner knows when it is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "GradGroup",
    "any_fresh",
    "begin",
    "group_of",
    "group_with",
    "settle",
    "settle_all",
    "whole_iteration",
    "written",
]

_NAME = "fluid_grad_group"
# The groups that are fresh, by identity: of none, as in all microbatches but the first, nobody
# looks at a parameter.
_fresh: dict[int, weakref.ref[GradGroup]] = {}
# Of a graph of a whole iteration that is captured now: the groups that it writes.
_whole: list[GradGroup] | None = None


class GradGroup:
    """Parameters whose gradients one call writes: all of them are fresh, or none.

    Args:
        params: each with a dense main_grad. They know their group from now on.

    Attributes:
        captured: whether a CUDA graph adds to the gradients, whose replays nobody sees: the group
            is not to be marked.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self.captured = tuple(params), False
        for param in self.params:
            setattr(param, _NAME, self)

    @property
    def fresh(self) -> bool:
        return id(self) in _fresh

    def mark(self) -> None:
        """From now on the gradients hold no sums."""
        key = id(self)
        _fresh[key] = weakref.ref(self, lambda _: _fresh.pop(key, None))  # type: ignore[arg-type]

    def clear(self) -> None:
        """The gradients have been written, or zeroed."""
        _fresh.pop(id(self), None)

    def settle(self) -> None:
        """Write zeros where the gradients hold no sums."""
        if self.fresh:
            _zero([param.main_grad for param in self.params])  # type: ignore[attr-defined]
            self.clear()

    def dissolve(self) -> None:
        """Settle, and be nobody's group."""
        self.settle()
        for param in self.params:
            if group_with(param) is self:
                delattr(param, _NAME)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled parameter takes its attributes along; a mark belongs to this process."""
        return _no_group, ()


def _no_group() -> None:
    return None


def any_fresh() -> bool:
    return bool(_fresh)


def group_with(param: Tensor) -> GradGroup | None:
    """The group that a parameter is in."""
    return getattr(param, _NAME, None)


def group_of(params: Sequence[Tensor]) -> GradGroup | None:
    """The group of exactly these parameters, in any order."""
    group = group_with(params[0])
    if group is None or len(params) != len(group.params):
        return None
    # Of a hundred parameters: map, whose loop is in C.
    return group if {*map(getattr, params, repeat(_NAME), repeat(None))} == {group} else None


def begin(params: Sequence[Tensor]) -> bool:
    """Whether a call is to write the gradients of `params` without a look at what main_grad holds.

    Where it is, the call says `written` after its last launch. Where not, it adds: zeros that were
    missing have been written.
    """
    graphed = _capturing(params[0])
    if graphed and _whole is None:
        settle_all()
        _never_again(params)
    if not _fresh:
        return False
    group = group_of(params)
    if group is not None and group.fresh:
        return True
    settle(params)
    return False


def written(params: Sequence[Tensor]) -> None:
    """The gradients of `params`, a group that `begin` has answered for, are on their way."""
    if (group := group_with(params[0])) is not None:
        group.clear()
        if _whole is not None and _capturing(params[0]):
            _whole.append(group)


def _never_again(params: Sequence[Tensor]) -> None:
    """A graph has been captured that adds to the gradients of `params`."""
    groups = {group_with(param) for param in params}
    if None in groups:
        alone = [param for param in params if group_with(param) is None]
        groups = groups - {None} | {GradGroup(alone)}
    for group in groups:
        if group is not None:
            group.captured = True


@contextmanager
def whole_iteration() -> Iterator[list[GradGroup]]:
    """The time in which a CUDA graph of a whole iteration is captured, or the iteration runs: gives
    the groups that the graph will write, to be read behind it. Each replay follows upon their
    marks, or upon zeros, and its owner clears the marks."""
    global _whole
    _whole = found = list[GradGroup]()
    try:
        yield found
    finally:
        _whole = None


def settle(params: Iterable[Tensor]) -> None:
    """Write zeros into gradients of `params`, and of those in a group with them, that hold no
    sums."""
    if _fresh:
        for group in {*map(getattr, params, repeat(_NAME), repeat(None))}:
            if group is not None:
                group.settle()


def settle_all() -> None:
    """Write zeros into all gradients of this process that hold no sums."""
    groups = [group for ref in list(_fresh.values()) if (group := ref()) is not None]
    if groups:
        _zero([param.main_grad for group in groups for param in group.params])  # type: ignore[attr-defined]
    for group in groups:
        group.clear()


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _zero(grads: list[Tensor]) -> None:
    """Write zeros now. A CUDA graph that is captured meanwhile must not hold them: its replays
    add."""
    if not _capturing(grads[0]):
        torch._foreach_zero_(grads)
        return
    from megatron_fluid.cuda import driver_api

    with driver_api.relaxed_capture():
        aside = _idle_stream(grads[0].device)
        with torch.cuda.stream(aside):
            for grad in grads:
                grad.zero_()
        aside.synchronize()


def _idle_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is not captured: torch hands out the same 32 in turns, and the graph may be
    captured on some of them."""
    for _ in range(64):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    raise RuntimeError("every stream takes part in a capture; none is left to zero gradients on")
