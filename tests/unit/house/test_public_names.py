"""What `import megatron_fluid` offers: every name resolves, and type checkers see the same names as
users."""

import ast
import importlib
import inspect
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, is_typeddict

import pytest

import megatron_fluid
from megatron_fluid import patches

NAMES = [name for name in megatron_fluid.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_it_resolves_to_its_modules_own(name: str) -> None:
    module = megatron_fluid._PUBLIC[name]
    if module.startswith("megatron_fluid.patches.") and not patches.megatron_installed():
        pytest.skip("megatron-core is not installed")
    assert getattr(megatron_fluid, name) is getattr(importlib.import_module(module), name)
    assert name in importlib.import_module(module).__all__


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(megatron_fluid.__file__).read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {
        alias.asname: node.module for node in imports for alias in node.names
    } == megatron_fluid._PUBLIC


def test_other_names_are_no_attributes() -> None:
    assert dir(megatron_fluid) == sorted(megatron_fluid.__all__)
    with pytest.raises(AttributeError, match="no attribute 'MoeLayer'") as caught:
        megatron_fluid.MoeLayer  # noqa: B018
    shown = "".join(traceback.format_exception(caught.value))
    assert "Did you mean: 'MoELayer'?" in shown


def _callables(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A public function, or a public class with its own public methods."""
    if is_typeddict(value):
        return
    if not inspect.isclass(value):
        yield name, value
    elif not issubclass(value, Exception):
        yield name, value
        for method, found in vars(value).items():
            kinds = (staticmethod, classmethod, types.FunctionType)
            if not method.startswith("_") and isinstance(found, kinds):
                yield f"{name}.{method}", getattr(value, method)


@pytest.mark.parametrize("room", ["", ".attention", ".low_latency", ".tensor_parallel"])
def test_help_shows_what_can_be_given(room: str) -> None:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    module = importlib.import_module(f"megatron_fluid{room}")
    for name in getattr(module, "__all__", ()):
        if megatron_fluid._PUBLIC.get(name, "").startswith("megatron_fluid.patches."):
            continue  # its parameters are Megatron's
        if callable(value := getattr(module, name)):
            for shown, function in _callables(name, value):
                parameters = inspect.signature(function).parameters.values()
                assert not [p.name for p in parameters if p.kind in variable], shown
