"""What `import megatron_fluid` offers: every name resolves, and type checkers see the same names as
users."""

import ast
import importlib
from pathlib import Path

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
    assert name in dir(megatron_fluid)
    assert name in importlib.import_module(module).__all__


def test_the_names_of_the_documents_are_there() -> None:
    assert set(NAMES) >= {
        "MoEBaseline",
        "MultiCardOverlapContext",
        "TransformerLayer",
        "get_backward_scheduler",
        "get_fluid_custom_layers",
        "moe_multicard_p2p_overlap_forward",
    }


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
    with pytest.raises(AttributeError, match="no attribute 'MoeLayer'"):
        megatron_fluid.MoeLayer  # noqa: B018
