"""Data flows one way through the package, and only the Megatron wing knows Megatron. Read from the
source, so that an import inside a function counts too.
"""

import ast
import functools
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fresh_program import run_code

ROOT = Path(__file__).resolve().parents[3]

# Ground first. A module may import from its own room and from floors below it, not from its
# neighbours or from above.
FLOORS = (
    ("errors",), ("config", "topology", "profiling"), ("cuda",), ("comm",), ("plan",), ("kernels",),
    ("backward",), ("moe", "attention", "tensor_parallel", "low_latency"), ("transformer_layer",),
    ("patches",), ("cli", "run"),
)  # fmt: skip


# The same inside the Megatron wing. The table (`__init__`) names replacements by strings, which the
# engine imports when it applies them.
WING = "megatron_fluid.patches"
WING_FLOORS = (
    ("engine", "limits", "dataset_helpers", "known_settings")
    + ("fused_weight_gradients",)
    + ("children", "features", "step_log"),
    ("cpu", "failed_waits", "optimizer_step", "profile_steps", "versions"),
    ("__init__", "iteration_graph"),
    ("arguments", "gradient_readiness", "overlap_decision"),
    ("linears", "moe"),
    ("attention",),
    ("layer_specs", "startup_report"),
)


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package, by the name it is imported by."""
    for folder, prefix in (
        (ROOT / "megatron_fluid", "megatron_fluid"),
        (ROOT / "patches", "megatron_fluid.patches"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((prefix, *parts)).removesuffix(".__init__"), path


@functools.cache
def imported(path: Path) -> list[str]:
    """The modules that a file imports anywhere, also by `importlib.import_module("...")`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "find_spec")
        ):
            texts = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            found += [text for text in texts if isinstance(text, str)]
    return found


MODULES = dict(modules())


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules of the package that each of them imports, inside functions and for the type
    checker, too. `from package import module` is an import of the module."""
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = edges[module] = set()
        for name in imported(path):
            if name not in MODULES:
                name = name.rpartition(".")[0]
            if name in MODULES:
                names.add(name)
    return edges


def test_only_patches_imports_megatron() -> None:
    assert not [
        (module, name)
        for module, path in MODULES.items()
        if not module.startswith(WING)
        for name in imported(path)
        if name.partition(".")[0] == "megatron"
    ]


@pytest.mark.parametrize(("root", "floors"), [("megatron_fluid", FLOORS), (WING, WING_FLOORS)])
def test_every_module_has_a_floor_and_imports_go_down(
    root: str, floors: tuple[tuple[str, ...], ...]
) -> None:
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}

    def room(module: str) -> str:
        return module.removeprefix(root).strip(".").split(".")[0] or "__init__"

    inside = {
        module: [name for name in imports if name.startswith(root) and name != "megatron_fluid"]
        for module, imports in graph().items()
        if module.startswith(root) and module != "megatron_fluid"
    }
    assert not [module for module in inside if room(module) not in floor], "put them on a floor"
    upward = [
        f"{module} imports {name}"
        for module, imports in inside.items()
        for name in imports
        if room(name) != room(module) and floor[room(name)] >= floor[room(module)]
    ]
    assert not upward


def test_no_module_imports_itself_by_way_of_others() -> None:
    graphlib.TopologicalSorter(graph()).prepare()


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import megatron_fluid, sys; "
        "print([m for m in ('torch', 'triton', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_alone_is_enough_where_there_is_nothing_to_patch() -> None:
    code = (
        "import sys; sys.modules['megatron'] = sys.modules['wrapt'] = None\n"
        "import megatron_fluid; megatron_fluid.MoELayer"
    )
    done = run_code(code, environment=os.environ)
    assert done.returncode == 0, done.stderr


def test_the_core_imports_where_megatron_is_absent() -> None:
    names = sorted(
        n for n in MODULES if not n.startswith("megatron_fluid.patches.") and "__main__" not in n
    )
    code = (
        # `import megatron` now fails, as where it is not installed
        "import sys; sys.modules['megatron'] = None\n"
        "import megatron_fluid\n"
        "from megatron_fluid import patches\n"
        "assert not patches.megatron_installed()\n"
        "assert {row.state for row in patches.report()} == {'armed'}\n"
        f"for name in {names}: __import__(name)\n"
    )
    done = run_code(code, environment=os.environ)
    assert done.returncode == 0, done.stderr


def test_test_modules_that_need_megatron_are_skipped_where_it_is_absent() -> None:
    # One says so, one imports from that, and one imports Megatron by way of an example.
    names = ("distributed/test_megatron_training", "distributed/test_pretrain_example")
    files = [f"tests/{name}.py" for name in (*names, "unit/examples/test_around_a_run")]
    code = (
        "import sys, pytest; sys.modules['megatron'] = None\n"
        f"raise SystemExit(pytest.main(['--collect-only', '-p', 'no:cacheprovider', *{files}]))"
    )
    done = run_code(code, environment=os.environ)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "3 skipped" in done.stdout
