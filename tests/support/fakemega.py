"""A small package that stands for Megatron in tests of the patch engine."""

import contextlib
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

MODULES = {
    "__init__": "",
    "base": """
        class Base:
            def inherited(self, x):
                return ("inherited", x)
    """,
    "layers": """
        from fakemega.base import Base

        class Layer(Base):
            def __init__(self, size):
                self.size = size

            def forward(self, x, *, scale=1):
                return self.size * x * scale

            @staticmethod
            def static(x):
                return x

            @classmethod
            def klass(cls, x):
                return (cls.__name__, x)
    """,
    "functions": """
        def double(x):
            return 2 * x
    """,
    "holder": """
        from fakemega.functions import double
        from fakemega.functions import double as twice

        def call(x):
            return double(x)
    """,
    "replacements": """
        def negated(original):
            return lambda *args, **kwargs: -original(*args, **kwargs)
    """,
}


@contextlib.contextmanager
def fake_package(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of a package `fakemega` made under `parent`; it is forgotten at the end."""
    folder = parent / "fakemega"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(parent))
    yield lambda name: importlib.import_module(f"fakemega.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakemega"]:
        del sys.modules[name]
    importlib.import_module(
        "wrapt.importer"
    )._post_import_hooks.clear()  # wrapt fires once a module name
