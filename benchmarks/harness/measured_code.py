"""Which files a suite measures, and a fingerprint of them: a results file carries it, so that
figures of code that has changed since are seen to be old."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["fingerprint", "measured_files"]

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("benchmarks", "megatron_fluid")
_WING = "megatron_fluid.patches"
# Shows or writes figures, is this rule, serves the command line or Megatron on CPUs, parses, prints
# before the first iteration, or draws steps and traces: nothing that a suite times.
_NOT_TIMED = tuple(
    ROOT.joinpath(*place.split("/"))
    for place in (
        "benchmarks/harness/measured_code.py",
        "benchmarks/harness/results.py",
        "benchmarks/report",
        "megatron_fluid/cli",
        "megatron_fluid/profiling/timeline.py",
        "patches/arguments.py",
        "patches/cpu",
        "patches/profile_steps.py",
        "patches/startup_report.py",
    )
)
# What ranks run that divide a linear: elsewhere it is imported and not called.
_OF_DIVIDED_LINEARS = ROOT / "megatron_fluid" / "tensor_parallel"
_BUILD, _CHECK = ("__init__", "__post_init__"), ("check_fields", "check_setting")
# Functions of a timed file that no suite calls, that run after a failure, or that name rows and
# write them.
_UNCALLED = {
    "benchmarks/suites/pretrain.py": ("main", "_run", "_cublas", "of_this_cublas"),
    "megatron_fluid/comm/peer_watch.py": ("explain",),
    "megatron_fluid/moe/sharding.py": ("clip_grad_norm_", "_wide"),
}
# What a suite's program starts by name.
_STARTED = {"pretrain": ("benchmarks.cases.pretrain_rank", _WING), "recipes": (_WING,)}


def fingerprint(suite: str, rows: Iterable[Mapping[str, Any]] = ()) -> str | None:
    """Return a hash of the code that `suite` measures, None where there is no such suite. Of Python
    files comments and docstrings do not count, nor checks of settings: a measured run passed them.
    The code of divided linears counts for the suites of it, and where a row's `layout` has some.
    """
    files = measured_files(suite)
    if not files:
        return None
    divided = any("tp" in row["config"].get("layout", "") for row in rows)
    if not (divided or suite.startswith("tp_")):
        files = [file for file in files if not file.is_relative_to(_OF_DIVIDED_LINEARS)]
    found = hashlib.sha256()
    for file in files:
        name, text = file.relative_to(ROOT).as_posix(), file.read_bytes()
        found.update(name.encode() + b"\0")
        found.update(_code(text, _UNCALLED.get(name, ())) if file.suffix == ".py" else text)
    return found.hexdigest()[:16]


@functools.cache
def _code(text: bytes, uncalled: tuple[str, ...] = ()) -> bytes:
    tree, holds = ast.parse(text), ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, holds) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(_WithoutChecks(uncalled).visit(tree)).encode()


class _WithoutChecks(ast.NodeTransformer):
    """Leaves out the checks of settings, which are made when an object is built: of the functions
    in _BUILD every `if` without `else` that raises, and may name values for the message before,
    loops of nothing else, and calls of the functions in _CHECK; these, and the `uncalled`."""

    def __init__(self, uncalled: tuple[str, ...]) -> None:
        self._names = (*_CHECK, *uncalled)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        if node.name in self._names:
            return None
        self.generic_visit(node)
        if node.name in _BUILD:
            node.body = [part for part in node.body if not _checks(part)] or [ast.Pass()]
        return node


def _checks(node: ast.stmt) -> bool:
    """Whether a statement does nothing but check."""
    if isinstance(node, ast.Expr):
        called = node.value.func if isinstance(node.value, ast.Call) else None
        return isinstance(called, ast.Attribute) and called.attr in _CHECK
    if isinstance(node, ast.For):
        named = [isinstance(part, ast.Assign) for part in node.body]
        inner = (part for part, is_name in zip(node.body, named, strict=True) if not is_name)
        return not all(named) and not node.orelse and all(map(_checks, inner))
    if not isinstance(node, ast.If) or node.orelse:
        return False
    binds = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test))
    named = [isinstance(part, ast.Assign) for part in node.body[:-1]]
    return not binds and all(named) and isinstance(node.body[-1], ast.Raise)


def measured_files(suite: str) -> list[Path]:
    """Return the suite's program and every file of the library that it imports, directly or not,
    kernels in CUDA included, but for folders of which nothing is timed."""
    program = _path(f"benchmarks.suites.{suite}")
    if program is None:
        return []
    found: set[Path] = set()
    patches: Sequence[Path] = tuple((ROOT / "patches").rglob("*.py"))
    todo = [program, *filter(None, map(_path, _STARTED.get(suite, ())))]
    while todo:
        path = todo.pop()
        if path in found or any(path.is_relative_to(folder) for folder in _NOT_TIMED):
            continue
        found.add(path)
        if patches and path.is_relative_to(ROOT / "patches"):
            todo += patches  # its table names modules in strings
            patches = ()
        if path.parent.name == "sm90":
            kernels = ROOT / "megatron_fluid" / "kernels"
            found |= {*kernels.rglob("*.cu"), *kernels.rglob("*.cuh")}
        todo += _imports(path)
    return sorted(found - {_path("megatron_fluid")})  # type: ignore[arg-type]


def _path(module: str) -> Path | None:
    """The file of a module of the repository."""
    parts = module.split(".")
    base = ROOT / "patches" if module.startswith(_WING) else ROOT / parts[0]
    base = base.joinpath(*parts[2 if module.startswith(_WING) else 1 :])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if parts[0] in _PACKAGES and path.is_file():
            return path
    return None


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    """The repository's files that a file imports anywhere but for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(filter(None, map(_path, _names(tree))))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        public = _public() if node.module == "megatron_fluid" else {}
        for alias in node.names:
            yield public.get(alias.name, f"{node.module}.{alias.name}")  # where it is a module
        yield node.module
    elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


@functools.cache
def _public() -> dict[str, str]:
    from megatron_fluid import _PUBLIC

    return dict(_PUBLIC)
