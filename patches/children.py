"""Processes that Python's multiprocessing starts by "spawn" or "forkserver". They import the main
module under another name, so that an `import megatron_fluid` under `if __name__ == "__main__"`, or
by `python -m megatron_fluid.run`, is not repeated in them."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["reach_children"]

# What a child runs before it imports anything of the program. Flags are read from sys.argv, which
# multiprocessing sets later, as it does sys.path.
_CODE = """
import sys
sys.argv = {argv!r}
sys.path.append({folder!r})
try:
    import megatron_fluid
except ImportError as error:
    print("megatron_fluid: Megatron stays unpatched in a child:", error, file=sys.stderr)
"""


class _Import:
    """Runs that code where it is unpickled. folder: where this package lies."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (_CODE.format(argv=sys.argv, folder=self.folder),)


def reach_children() -> None:
    """Let children of this process import this package before their main module."""
    import wrapt

    wrapt.register_post_import_hook(_add_import, "multiprocessing.spawn")


def _add_import(spawn: ModuleType) -> None:
    original = spawn.get_preparation_data
    package = Path(str(sys.modules["megatron_fluid"].__file__))
    first = {"megatron_fluid": _Import(str(package.parents[1]))}

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        """What a child unpickles first."""
        return first | original(name)

    spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]
