"""NVRTC through cuda.bindings, both of which torch's CUDA builds depend on: CUDA source to machine
code. It needs no GPU."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

from megatron_fluid.errors import FluidError

__all__ = ["Unit", "version"]


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
        names = [name.encode() for name, _ in self.headers]
        texts = [text for _, text in self.headers]
        options = [option.encode() for option in self.options]
        program = _call(
            "nvrtcCreateProgram", self.text, self.name.encode(), len(names), texts, names
        )
        try:
            try:
                _call("nvrtcCompileProgram", program, len(options), options)
            except FluidError as error:
                log = _text("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise FluidError(f"compiling {self.name}: {error}\n{log}") from None
            return _text("nvrtcGetCUBIN", program)
        finally:
            _call("nvrtcDestroyProgram", program)


def version() -> tuple[int, int]:
    """NVRTC's version.

    Raises:
        FluidError: it cannot be loaded.
    """
    major, minor = _call("nvrtcVersion")
    return major, minor


@functools.cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _call(name: str, *arguments: object) -> Any:
    """Call NVRTC's function `name`; return its result, or a list if it has several."""
    try:
        status, *results = getattr(_nvrtc(), name)(*arguments)
    except (ImportError, RuntimeError) as error:  # RuntimeError: cuda.bindings finds no library
        raise FluidError(
            f"NVRTC cannot be loaded: {error}; torch's CUDA builds bring it "
            "(pip install cuda-bindings nvidia-cuda-nvrtc)"
        ) from None
    if status:
        raise FluidError(f"{name}: {status.name} ({int(status)})")
    return results[0] if len(results) == 1 else results


def _text(name: str, program: Any) -> bytes:
    """What NVRTC's function `name` writes."""
    text = bytearray(_call(f"{name}Size", program))
    _call(name, program, text)
    return bytes(text)
