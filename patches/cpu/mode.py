"""Whether CPU mode is on, and how a row of its patches is made."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_fluid.patches.engine import signatures
from megatron_fluid.patches.engine.patch import Patch
from megatron_fluid.patches.engine.switches import asked

__all__ = ["GROUP", "cpu_mode_active", "cpu_patch", "hint_at_cpu_mode", "replaces"]

GROUP = "CPU mode"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST, _LARGEST_OF_OLD_GLIBC = 2**31 - 1, 32 * 2**20
_SET_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "glibc.malloc")


@functools.cache
def cpu_mode_active() -> bool:
    """Whether CPU mode applies: the user asks for it, and this process has no GPU. Rank 0 says so.
    Decided once, since the answer must not change during a run."""
    if not asked("cpu"):
        return False
    import torch

    if torch.cuda.is_available():
        return False
    _keep_freed_memory()
    # Torch would warn that it sees no CUDA runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Megatron warns where the CPU's generator moves in place of a GPU's: here they are the same.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # Not in helpers, such as those that write files. While one that is spawned imports the main
    # module, it does not know yet that it has a parent.
    if multiprocessing.current_process().name == "MainProcess":
        _say(
            "CPU mode, as --fluid-cpu or MEGATRON_FLUID_CPU asks: no GPU is found, Megatron "
            "computes on CPU cores over gloo"
        )
    return True


def _keep_freed_memory() -> None:
    """Let this process keep the memory that a training step frees, for the next step. By default
    glibc gives large blocks back to the kernel, and the next step faults in each of their pages.
    Thresholds that the user has set hold. Measured:
    docs/tuning_notes.md#experts-over-several-hosts-on-cpus
    """
    environment = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if any(name in text for name in _SET_BY_THE_USER for text in environment):
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _LARGEST)
        if not mallopt(_MMAP_THRESHOLD, _LARGEST):
            mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD_GLIBC)


def hint_at_cpu_mode() -> None:
    """Say on rank 0 how to train without a GPU, if none is found and CPU mode is not asked for.
    Megatron's own error about CUDA follows."""
    import torch

    if not cpu_mode_active() and not torch.cuda.is_available():
        _say(
            "no GPU is found. --fluid-cpu (or MEGATRON_FLUID_CPU=1) lets Megatron train on the CPU"
        )


def _say(text: str) -> None:
    """Print a line on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_fluid: {text}", file=sys.stderr, flush=True)


def cpu_patch(
    name: str, target: str, replacement: Any, reason: str, signature: str | None = None
) -> Patch:
    """A patch of CPU mode; one of torch's is applied when Megatron is imported."""
    trigger = None if target.startswith("megatron.") else "megatron.core"
    condition = "with --fluid-cpu on a machine without a GPU"
    return Patch(
        f"cpu-{name}",
        target,
        replacement,
        reason,
        signature,
        trigger,
        when=cpu_mode_active,
        condition=condition,
        group=GROUP,
    )


def replaces(
    table: list[Patch], name: str, target: str, reason: str, checked: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate `function(original, ...)`: append a patch that puts it in the place of `target` to
    `table`, and return the patch's factory. If `checked`, the target must have the function's other
    parameters."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def factory(original: Any) -> Any:
            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            return replacement

        others = signatures.of(functools.partial(function, None))
        signature = signatures.describe(others) if checked else None
        table.append(cpu_patch(name, target, factory, reason, signature))
        return factory

    return enter
