"""Loaded before every test module: looks at the machine, and gives every test its tier.

Without a GPU kernels run under Triton's interpreter: chosen here, before a test imports Triton.
"""

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: workers and ranks share the cores, and more threads of each only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.machine import GPUS, INTERPRETED, NEEDS_INTERPRETER  # noqa: E402

_MOST_WORKERS = 8  # each holds torch, and its server of ranks Megatron: about 1.5 GB together
_SECONDS = ("world", "process", "interpreter")  # tiers whose tests take a few seconds each
_WAITS = "tests/unit/comm/test_agreement.py"  # of the fast tier, but each waits for an absent rank

# A test is followed through its fixtures and through every function of `tests` and `tools` that it
# names: what it reaches gives it a tier. Only what the package itself starts is written at a test.
_FOLLOWED = ("tests.", "tools.", "tests")
_REACHED = {
    "run_ranks": "world", "run_ranks_outcomes": "world", "subprocess": "process",
    "run_code": "process", "typecheck": "process", "compile_for_host": "compile",
    "kernel_cases": "compile",
}  # fmt: skip

_MEGATRON = ("megatron", "megatron.core", "megatron.training")

# Else every rank and program would compile the package anew: half a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if not GPUS:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if INTERPRETED and importlib.util.find_spec("triton") is not None:
    importlib.import_module("tests.support.interpreter")
# Here and for all ranks and programs that tests start: those that see no GPU run Megatron on the
# CPU.
os.environ.setdefault("MEGATRON_FLUID_CPU", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: three workers for two cores, because tests of lost ranks wait most of their time;
    but one process where tests would share GPUs."""
    return 0 if GPUS else min(len(os.sched_getaffinity(0)) * 3 // 2 or 1, _MOST_WORKERS)


class _Module(pytest.Module):
    """A test module. One that imports Megatron is skipped where that is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except (self.CollectError, pytest.skip.Exception) as error:
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) == str(self.path):
                    del sys.modules[name]  # else others would import from what is there of it
            why = error.__cause__
            if isinstance(why, ModuleNotFoundError) and why.name in _MEGATRON:
                pytest.skip(f"{self.name}: {why}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Without the collector of garbage: there is next to none, but what imports keep."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor does a test look through it again
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its tiers, and say which may run side by side: whole files, but every
    long compilation by itself. What takes longest begins first."""
    parallel = config.pluginmanager.hasplugin("xdist")
    for item in items:
        for tier in _tiers(item):
            item.add_marker(tier)
        if item.nodeid.startswith("tests/gpu/"):
            item.add_marker("gpu")
        if parallel and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    if parallel and getattr(config.option, "dist", "no") != "no":
        weight = {_group(item): 0 for item in items}
        for item in items:
            weight[_group(item)] += _weight(item)
        items.sort(key=lambda item: (-weight[_group(item)], _group(item)))  # stable within a group


@pytest.fixture(autouse=True)
def _forgotten_with_its_test() -> Generator[None]:
    """A process keeps its configuration, and the record of a wait that failed, which each later
    backward would raise."""
    yield
    if (config := sys.modules.get("megatron_fluid.config")) is not None:
        config.set_config(None)
    if (failed_waits := sys.modules.get("megatron_fluid.comm.failed_waits")) is not None:
        for errors in failed_waits._watched:
            if errors.failed():
                failed_waits.forget(errors)


def _group(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    return f"{file}::{item.name}" if _compiles_long(item) else file


def _compiles_long(item: pytest.Item) -> bool:
    return all(item.get_closest_marker(tier) for tier in ("compile", "slow"))


def _weight(item: pytest.Item) -> int:
    """About how many seconds a test takes: only the order of the groups hangs on it."""
    if _compiles_long(item):
        return 100
    if item.get_closest_marker("slow"):
        return 20
    if any(item.get_closest_marker(tier) for tier in _SECONDS):
        return 3
    return 1 if item.nodeid.startswith(_WAITS) else 0


def _tiers(item: pytest.Item) -> set[str]:
    """The tiers of `item`, beside those written at it: world, compile, process, interpreter."""
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
