"""Parts of a CUDA source that know no GPU, compiled for the host."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["COMPILER", "between", "compile_for_host"]

COMPILER = shutil.which("g++") or shutil.which("clang++")
_FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC")


def between(source: str, start: str, end: str) -> str:
    """From `start` to before the first `end` in `source`."""
    return source[source.index(start) : source.index(end)]


def compile_for_host(text: str) -> ctypes.CDLL:
    """Device functions and what calls them, as a library. It is kept in the user's cache folder
    under a hash of its source, the flags and the compiler, so that it is compiled once."""
    assert COMPILER is not None
    text = text.replace("__device__ __forceinline__", "inline")
    text = f"#include <algorithm>\nusing std::max;\nusing std::min;\n{text}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_fluid"
    parts = (text, *_FLAGS, COMPILER, _version(), platform.machine())
    library = folder / "host_code" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as building:
            file, made = Path(building, "code.cpp"), Path(building, "code.so")
            file.write_text(text)
            subprocess.run([COMPILER, *_FLAGS, "-o", str(made), str(file)], check=True)
            made.replace(library)  # whole or not at all: other tests may look for it
    return ctypes.CDLL(str(library))


@functools.cache
def _version() -> str:
    assert COMPILER is not None
    command = [COMPILER, "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
