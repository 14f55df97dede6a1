"""Variants of a benchmark that run on every rank; one that fails on any is left out on all, and
named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from benchmarks.cases.attention import step_call
from benchmarks.harness.left_out import everywhere

__all__ = ["runnable"]


def _run(module: nn.Module, x: Tensor) -> bool:
    step_call(module, x)()
    return True


def runnable(
    builders: Mapping[str, Callable[[], nn.Module]], wanted: set[str], x: Tensor
) -> dict[str, nn.Module]:
    """The wanted variants (all where none is named) that could be built and have run forward and
    backward of ``x`` everywhere.

    Ranks agree after building and again after running. A rank that fails between the two halves of
    a collective still leaves the others waiting for it until they time out.
    """
    found: dict[str, nn.Module] = {}
    for name, build in builders.items():
        if wanted and name not in wanted:
            continue
        module = everywhere(name, build)
        if module is not None and everywhere(name, functools.partial(_run, module, x)):
            found[name] = module
    return found
