"""Parts of a CUDA source that know no GPU, compiled for the host."""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER = shutil.which("g++") or shutil.which("clang++")


def between(source: str, start: str, end: str) -> str:
    """From `start` to before the first `end` in `source`."""
    return source[source.index(start) : source.index(end)]


def compile_for_host(text: str) -> ctypes.CDLL:
    """Device functions and what calls them, as a library."""
    text = text.replace("__device__ __forceinline__", "inline")
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "code.cpp"), Path(folder, "code.so")
        file.write_text(f"#include <algorithm>\nusing std::max;\nusing std::min;\n{text}")
        flags = ("-std=c++17", "-O1", "-shared", "-fPIC")
        subprocess.run([str(COMPILER), *flags, "-o", str(library), str(file)], check=True)
        return ctypes.CDLL(str(library))
