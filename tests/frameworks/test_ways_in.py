"""Ways by which the package gets into a process that nobody wrote an import into, or two get in."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.fresh_program import run_code

pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of this text, in a folder of its own."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "ignore", str(program)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def forked(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """As `run`, in a process that has imported torch."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{textwrap.dedent(code)}"
    return run_code(code, environment={**os.environ, **variables})


# Megatron itself takes seconds to import: a module of its name does.
CHILDREN = """
    import multiprocessing, sys

    def look(queue):
        queue.put(["megatron_fluid" in sys.modules, sys.argv[1:]])

    if __name__ == "__main__":
        import megatron_fluid
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            child = context.Process(target=look, args=(queue,))
            child.start()
            print(method, queue.get(timeout=600))
            child.join()
"""


def test_children_of_a_program_that_imports_it_under_main_import_it_too(tmp_path: Path) -> None:
    done = run(CHILDREN, tmp_path)
    assert done.stdout == "spawn [True, []]\nforkserver [True, []]\n", done.stderr
    done = run(CHILDREN, tmp_path, MEGATRON_FLUID="off")
    assert done.stdout == "spawn [False, []]\nforkserver [False, []]\n", done.stderr


def test_switched_off_the_command_line_loses_its_flags(tmp_path: Path) -> None:
    words = "--lr 1 --fluid-graph --fluid-moe-backend local -x --no-fluid-graph --fluid-timeout=3"
    code = f"""
        import sys
        sys.argv[1:] = {words.split()!r}
        import megatron_fluid
        print(sys.argv[1:])
    """
    done = forked(code, tmp_path, MEGATRON_FLUID="off", RANK="0")
    assert done.stdout == "['--lr', '1', '-x']\n"
    assert "MEGATRON_FLUID=off leaves out --fluid-graph --fluid-moe-backend --no-" in done.stderr
    assert forked(code, tmp_path, MEGATRON_FLUID="on").stdout == f"{words.split()}\n"


def test_a_second_copy_is_refused_by_name(tmp_path: Path) -> None:
    """The copies of a wheel and of a source tree."""
    for part in ("megatron_fluid", "patches"):
        (tmp_path / "copy" / part).parent.mkdir(exist_ok=True)
        (tmp_path / "copy" / part).symlink_to(ROOT / part)
    code = f"""
        import sys
        import megatron_fluid
        for name in [name for name in sys.modules if name.startswith("megatron_fluid")]:
            del sys.modules[name]
        sys.path.insert(0, {str(tmp_path / "copy")!r})
        try:
            import megatron_fluid
        except ImportError as error:
            print(error)
    """
    done = forked(code, tmp_path)
    first, second = ROOT / "megatron_fluid", tmp_path / "copy" / "megatron_fluid"
    assert f"is loaded already, from {first / '__init__.py'}" in done.stdout, done.stderr
    assert f"this copy is {second / '__init__.py'}. Keep one" in done.stdout


def test_functions_that_other_packages_imported_before_are_replaced_there(tmp_path: Path) -> None:
    """As verl and ms-swift hold Megatron's finalize_model_grads."""
    (tmp_path / "framework.py").write_text(
        "from megatron.core.distributed import finalize_model_grads\n"
    )
    code = """
        import framework
        stock = [framework.finalize_model_grads]
        import megatron_fluid
        from megatron.core.distributed import finalize_model_grads
        print(framework.finalize_model_grads is finalize_model_grads is not stock[0])
        megatron_fluid.patches.revert()
        print(framework.finalize_model_grads is stock[0])
    """
    done = forked(code, tmp_path)
    assert done.stdout.split() == ["True", "True"], done.stderr
