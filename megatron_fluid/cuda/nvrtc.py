"""NVRTC, which torch brings along: CUDA source to machine code. It needs no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_fluid.errors import FluidError

__all__ = ["Unit", "load", "version"]


@dataclass(frozen=True)
class Unit:
    """A source that is compiled on its own.

    Attributes:
        name: in messages.
        text: the source.
        headers: what it may include: names and texts.
        options: of nvrtcCompileProgram.
    """

    name: str
    text: bytes
    headers: tuple[tuple[str, bytes], ...]
    options: tuple[str, ...]

    @functools.cached_property
    def key(self) -> str:
        """The hash of all that the machine code depends on."""
        whole = (self.text, self.headers, self.options, version())
        return hashlib.sha256(repr(whole).encode()).hexdigest()

    def compile(self) -> bytes:
        """Return the machine code. Other threads run meanwhile.

        Raises:
            FluidError: NVRTC cannot be loaded, or refuses the source.
        """
        return _compile(load(), self.name, self.text, dict(self.headers), self.options)


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


def version() -> tuple[int, int]:
    """NVRTC's version.

    Raises:
        FluidError: it cannot be loaded.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    load().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


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
