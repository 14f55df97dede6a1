"""CUDA kernels compiled by NVRTC, side by side in background threads, and kept in Triton's cache
folder (TRITON_CACHE_DIR, by default ~/.triton/cache), where one process of a host compiles for all.
NVRTC is called through cuda.bindings; torch's CUDA builds depend on both. It needs no GPU.

    start(units)                  # when a layer is built
    code = machine_code(unit)     # at first use: waits for the rest
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fluid.errors import FluidError

__all__ = ["Unit", "machine_code", "start", "version"]


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


_POLL_S, _LONGEST_WAIT_S = 0.05, 120.0  # of a wait for another process that compiles
_lock = threading.Lock()
_started: dict[Unit, Future[bytes]] = {}


@functools.cache
def _slots() -> threading.Semaphore:
    """As many compilations at a time as this process may use CPUs."""
    return threading.Semaphore(len(os.sched_getaffinity(0)))


def _say(text: str) -> None:
    print(f"megatron_fluid: {text}", file=sys.stderr, flush=True)


def start(units: Iterable[Unit]) -> list[Future[bytes]]:
    """Begin to compile what is in no cache, in the background. Return futures of machine code."""
    # Not first in the threads: an import fails there if the main thread is importing a submodule.
    import triton  # noqa: F401

    futures = []
    with _lock:
        for unit in units:
            future = _started.get(unit)
            if future is None:
                future = _started[unit] = Future()
                # A daemon: a process that ends does not wait for the compiler.
                threading.Thread(target=_run, args=(unit, future), daemon=True).start()
            futures.append(future)
    return futures


def machine_code(unit: Unit) -> bytes:
    """Return the machine code of `unit` once it is there.

    Raises:
        FluidError: NVRTC cannot be loaded, or refuses the source.
    """
    [future] = start([unit])
    return future.result()


def _run(unit: Unit, future: Future[bytes]) -> None:
    try:
        code = _obtain(unit)
    except BaseException as error:  # raised again by whoever waits for the future
        with _lock:
            del _started[unit]  # the next use tries again
        future.set_exception(error)
    else:
        future.set_result(code)


def _obtain(unit: Unit) -> bytes:
    import triton

    folder = Path(triton.knobs.cache.dir) / "megatron_fluid"
    kept = folder / f"{unit.key}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    with _lock_of_host(kept.with_suffix(".lock")):
        with contextlib.suppress(OSError):
            return kept.read_bytes()  # written by the process that had the lock before
        with _slots():
            begin = time.monotonic()
            code = unit.compile()
            took = time.monotonic() - begin
        try:
            _write(kept, code)
            _say(f"compiled {unit.name} in {took:.1f} s, kept in {folder}")
        except OSError as error:
            _say(
                f"compiled {unit.name} in {took:.1f} s; it cannot be kept in {folder} "
                f"({error.strerror}), so that each process compiles it: set TRITON_CACHE_DIR"
            )
    return code


def _write(path: Path, code: bytes) -> None:
    """Write a file that appears whole or not at all, even if the machine goes down."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(code)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@contextlib.contextmanager
def _lock_of_host(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; after _LONGEST_WAIT_S, or where the file system cannot lock, the
    body runs without it: then several processes compile the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        end = time.monotonic() + _LONGEST_WAIT_S
        while time.monotonic() < end:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:
                break
        else:
            _say(f"waited {_LONGEST_WAIT_S:g} s for another process that compiles {path.stem[:12]}")
        yield
    finally:
        with contextlib.suppress(OSError):  # not by close alone: forked processes share the file
            fcntl.flock(number, fcntl.LOCK_UN)
        os.close(number)
