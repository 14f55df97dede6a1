"""Which tier a test belongs to, read off what its code reaches, and a check of the fast tier.

A test is followed through its fixtures and through every function of `tests` and `tools` that it
names. `run_ranks` and its kin make it `world`, a host compiler `compile`, a program of its own
`process`. Only what the package itself starts for a test is written at it. A test of the fast tier
that runs a kernel under the interpreter, starts a Python program or compiles fails and says which
marker it lacks, so `make test-fast` stays quick.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.machine import NEEDS_INTERPRETER

__all__ = ["SLOW_TIERS", "WorkCounter", "tiers"]

SLOW_TIERS = ("world", "compile", "process", "interpreter", "slow", "gpu")
"""What `make test-fast` leaves out."""

_FOLLOWED = ("tests.", "tools.", "tests")
_REACHED = {
    "run_ranks": "world",
    "run_ranks_outcomes": "world",
    "subprocess": "process",
    "run_code": "process",
    "typecheck": "process",
    "compile_for_host": "compile",
    "kernel_cases": "compile",
}


def tiers(item: pytest.Item) -> set[str]:
    """The tiers of `item`, beside those that are written at it: world, compile, process,
    interpreter."""
    found = {"world"} if item.get_closest_marker("world_size") else set()
    if NEEDS_INTERPRETER.mark in item.iter_markers("skipif"):
        found.add("interpreter")
    function = getattr(item, "function", None)
    if function is None:
        return found
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    if (hypothesis := getattr(function, "hypothesis", None)) is not None:
        function = hypothesis.inner_test  # what `given` took
    functions = [function, *(last[-1].func for last in definitions.values() if last)]
    return found.union(*(_tiers_of(inspect.unwrap(f)) for f in functions))


@functools.cache
def _tiers_of(function: Any) -> frozenset[str]:
    """The tiers of what `function` names, and of what that names in turn."""
    found: set[str] = set()
    seen: set[Any] = set()
    open_ = [function]
    while open_:
        current = inspect.unwrap(open_.pop())
        code = getattr(current, "__code__", None)
        if code is None or code in seen or not current.__module__.startswith(_FOLLOWED):
            continue
        seen.add(code)
        for name in _names(code):
            if name in _REACHED:
                found.add(_REACHED[name])
            value = current.__globals__.get(name)
            if isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
                open_.append(value)
    return frozenset(found)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that code uses, also in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class WorkCounter:
    """Counts, in this process, what no test of the fast tier does: the marker of each kind of work
    and how often it was done."""

    def __init__(self) -> None:
        self.done = {"interpreter": 0, "process": 0, "compile": 0}
        self._wrapped = False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and str(arguments[0]) == sys.executable:
            self.done["process"] += 1

    def start(self) -> dict[str, int]:
        """The counts before a test. What is not imported yet is not counted: test modules import at
        collection."""
        interpreter = sys.modules.get("triton.runtime.interpreter")
        if interpreter is not None and not self._wrapped:
            self._wrapped = True
            self._count(interpreter.GridExecutor, "__call__", "interpreter")
            if (build := sys.modules.get("megatron_fluid.cuda.kernel_build")) is not None:
                self._count(build.Unit, "compile", "compile")
        return dict(self.done)

    def _count(self, owner: Any, name: str, tier: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.done[tier] += 1
            return real(*args, **kwargs)

        setattr(owner, name, counted)

    def markers_lacking(self, item: pytest.Item, before: dict[str, int]) -> list[str]:
        """The markers that a test of the fast tier would need for what it did since `before`."""
        if any(item.get_closest_marker(tier) for tier in SLOW_TIERS):
            return []
        return [tier for tier, count in self.done.items() if count > before[tier]]
