"""Which tier a test belongs to, read off what its code reaches.

A test is followed through its fixtures and through every function of `tests` and `tools` that it
names. `run_ranks` and its kin make it `world`, a host compiler `compile`, a program of its own
`process`. Only what the package itself starts for a test is written at it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.machine import NEEDS_INTERPRETER

__all__ = ["tiers"]

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
