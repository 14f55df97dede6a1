"""The signature of a patch's target read from its source file, without importing it.

So that all patches are checked when the first of them is applied, although most of their modules
are imported later, some of them only in the middle of a run.
"""

import ast
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fluid.patches.engine import signatures

__all__ = ["signature_in_source"]


def signature_in_source(target: str) -> signatures.Parameters | None:
    """The parameters of "package.module:function" or "package.module:Class.method" as its file
    defines it.

    None where the file does not show it plainly (inherited, made at run time, defined under a
    condition, no such file): the engine then checks it when the module is imported.
    """
    module, _, path = target.partition(":")
    file = _source_file(module)
    if file is None:
        return None
    body: Sequence[ast.stmt] = ast.parse(file.read_bytes()).body
    *classes, function = path.split(".")
    for name in classes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        body = found[-1].body if found else []
    plain = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    ]
    return signatures.of_arguments(plain[-1].args) if plain else None


def _source_file(module: str) -> Path | None:
    """Where the import system would find the module's source. Imports nothing, not even the
    packages around it."""
    search: Sequence[str] | None = sys.path
    origin: str | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), search)
        if spec is None:
            return None
        search, origin = spec.submodule_search_locations, spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None
