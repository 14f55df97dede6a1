"""docs/frameworks.md: its Python runs, its shell names settings, files, functions that exist."""

import importlib
import os
import re
from pathlib import Path

import pytest

from megatron_fluid.config import environment_settings
from tests.support.fresh_program import run_code

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "frameworks.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = "".join(text for language, text in BLOCKS if language == "bash")


@pytest.mark.parametrize("code", PYTHON)
def test_its_python_runs(code: str) -> None:
    pytest.importorskip("megatron.core")
    done = run_code(code, environment=os.environ)
    assert done.returncode == 0, done.stderr


def test_its_shell_names_what_exists() -> None:
    variables = dict(re.findall(r"^export (MEGATRON_FLUID_\w+)=(\w+)$", SHELL, re.M))
    assert environment_settings(variables) == {"moe_backend": "auto"}
    assert re.findall(r"export (?!MEGATRON)(.*)", SHELL) == [
        "VERL_USE_EXTERNAL_MODULES=megatron_fluid"
    ]
    assert importlib.util.find_spec("megatron_fluid.run") is not None
    (hook,) = re.findall(r"--custom-megatron-init-path (\S+)", SHELL)
    module, _, function = hook.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))
