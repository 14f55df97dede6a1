"""NVRTC, which torch brings along: CUDA source to machine code, with a cache on disk.

The machine code is kept in the user's cache folder by the hash of everything it depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_fluid.errors import FluidError

__all__ = ["compile_cached", "load"]


def compile_cached(
    file: str, text: bytes, headers: Mapping[str, bytes], options: Sequence[str]
) -> bytes:
    """Return the machine code of source `text`, from the cache if it is there.

    Args:
        file: the name of the source in messages.
        headers: what the source may include, by name.
        options: of nvrtcCompileProgram.

    Raises:
        FluidError: NVRTC cannot be loaded, or refuses the source.
    """
    library = load()
    version = (ctypes.c_int * 2)()
    library.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    settings = repr(([*options], *version)).encode()
    key = hashlib.sha256(b"\0".join([text, *headers.values(), settings])).hexdigest()
    code = _kept(key)
    if code is None:
        code = _compile(library, file, text, headers, options)
        _keep(key, code)
    return code


def load() -> ctypes.CDLL:
    """Load NVRTC of torch's CUDA version.

    Raises:
        FluidError: it is neither on the library path nor in NVIDIA's wheel.
    """
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    # The wheel's name has a suffix up to CUDA 12.
    package = "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
    candidates = [name]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(package) or []
        candidates += [str(f.locate()) for f in files if f.name == name]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise FluidError(f"NVRTC: found no {name}, which comes with torch (pip install {package})")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron_fluid"


def _kept(key: str) -> bytes | None:
    """Return what was kept under `key` if it is there, readable and whole."""
    try:
        content = (_cache_folder() / f"{key}.cubin").read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    checksum, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _keep(key: str, code: bytes) -> None:
    """Write `code` to the cache; several ranks may do so at the same time.

    If the folder is not writable, each process compiles the kernels again.
    """
    written = None
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            written = file.name
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(written, folder / f"{key}.cubin")
    except (OSError, RuntimeError):
        if written is not None:
            Path(written).unlink(missing_ok=True)


def _compile(
    library: ctypes.CDLL,
    file: str,
    text: bytes,
    headers: Mapping[str, bytes],
    options: Sequence[str],
) -> bytes:
    def check(status: int, what: str) -> None:
        if status:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            error = library.nvrtcGetErrorString(status).decode()
            raise FluidError(f"NVRTC: {what}: {error}{log()}")

    def log() -> str:
        size = ctypes.c_size_t()
        if not program.value or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
            return ""
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        return "\n" + text.value.decode(errors="replace")

    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*[name.encode() for name in headers])
    arguments = (ctypes.byref(program), text, file.encode(), len(headers), contents, names)
    check(library.nvrtcCreateProgram(*arguments), "nvrtcCreateProgram")
    try:
        flags = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        check(library.nvrtcCompileProgram(program, len(options), flags), f"compiling {file}")
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
