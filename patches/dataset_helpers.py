"""Megatron compiles its C++ dataset helpers with `make` when training starts; the wheel has them
compiled, but no Makefile."""

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["compile_helpers"]


def compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """Skip `make` where there is no Makefile and the compiled helpers can be imported; else leave
    it to Megatron."""

    @functools.wraps(original)
    def fluid_compile_helpers() -> None:
        package = importlib.util.find_spec("megatron.core.datasets")
        folders = list(package.submodule_search_locations or ()) if package else []
        has_makefile = any(os.path.exists(Path(folder, "Makefile")) for folder in folders)
        if has_makefile or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return fluid_compile_helpers
