"""Parts of a CUDA source that know no GPU, compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

__all__ = ["COMPILER", "between", "compile_for_host"]

COMPILER = shutil.which("g++") or shutil.which("clang++")


def between(source: str, start: str, end: str) -> str:
    """From `start` to before the first `end` in `source`."""
    return source[source.index(start) : source.index(end)]


def compile_for_host(text: str, folder: Path) -> ctypes.CDLL:
    """Device functions and what calls them, as a library made in `folder`."""
    file, library = folder / "code.cpp", folder / "code.so"
    text = text.replace("__device__ __forceinline__", "inline")
    file.write_text(f"#include <algorithm>\nusing std::max;\nusing std::min;\n{text}")
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(file)],
        check=True,
    )
    return ctypes.CDLL(str(library))
