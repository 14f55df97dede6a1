"""Kernels compiled side by side in background threads, each once a host and user: the code comes
from the cache on disk where it is there, or from the rank that compiles it.

    start(units)                  # when a layer is built
    code = machine_code(unit)     # at first use: waits for the rest
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from megatron_fluid.cuda.kernel_cache import KernelCache, say
from megatron_fluid.cuda.nvrtc import Unit

__all__ = ["machine_code", "start"]

_lock = threading.Lock()
_started: dict[Unit, Future[bytes]] = {}


@functools.cache
def _cache() -> KernelCache:
    return KernelCache()


@functools.cache
def _slots() -> threading.Semaphore:
    """As many compilations at a time as this process may use CPUs."""
    return threading.Semaphore(len(os.sched_getaffinity(0)))


class _Batch:
    """Units that were started together: one line reports what was compiled of them."""

    def __init__(self, cache: KernelCache, left: int) -> None:
        self._cache, self._left = cache, left
        self._begin, self._lock = time.monotonic(), threading.Lock()
        self._compiled: list[str] = []

    def compile(self, unit: Unit) -> bytes:
        with _slots():
            code = unit.compile()
        self._compiled.append(unit.name)
        return code

    def run(self, unit: Unit, future: Future[bytes]) -> None:
        error: BaseException | None = None
        try:
            code = self._cache.obtain(unit.key, functools.partial(self.compile, unit))
        except BaseException as found:  # whoever waits for it raises it
            error = found
        with self._lock:
            self._left -= 1
            if not self._left and self._compiled:
                took = time.monotonic() - self._begin
                names = ", ".join(self._compiled)
                kept = self._cache.writable()
                say(f"compiled {names} in {took:.1f} s, kept in {_short(kept)}")
        if error is None:
            future.set_result(code)
            return
        with _lock:
            del _started[unit]  # the next use tries again
        future.set_exception(error)


def start(units: Iterable[Unit]) -> list[Future[bytes]]:
    """Begin to compile what is in no cache, in the background. Return the machine codes to come."""
    with _lock:
        wanted = list(units)
        new = [unit for unit in dict.fromkeys(wanted) if unit not in _started]
        batch = _Batch(_cache(), len(new))
        for unit in new:
            _started[unit] = Future()
        found = [_started[unit] for unit in wanted]
    for unit, future in zip(wanted, found, strict=True):
        if unit in new:
            new.remove(unit)
            # A daemon: a process that ends does not wait for the compiler.
            threading.Thread(target=batch.run, args=(unit, future), daemon=True).start()
    return found


def machine_code(unit: Unit) -> bytes:
    """Return the machine code of `unit`, when it is there.

    Raises:
        FluidError: NVRTC cannot be loaded, or refuses the source.
    """
    [future] = start([unit])
    return future.result()


def _short(path: Path) -> str:
    text, home = str(path), os.path.expanduser("~")
    return f"~{text[len(home) :]}" if text.startswith(f"{home}/") else text
