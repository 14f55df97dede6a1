"""Keeps the memory that a training step on a CPU frees, for the next step.

By default glibc gives large freed blocks back to the kernel, and the next step faults in every page
of them again. Measured: docs/tuning_notes.md#experts-over-several-hosts-on-cpus
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_ALL, _MOST_OF_OLD_GLIBC = 2**31 - 1, 32 * 2**20
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "glibc.malloc")


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees.

    Returns:
        False if the C library has no mallopt, or the user set thresholds by glibc's environment
        variables.
    """
    given = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if any(name in text for name in _USERS for text in given):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    if not mallopt(_TRIM_THRESHOLD, _ALL):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _ALL) or mallopt(_MMAP_THRESHOLD, _MOST_OF_OLD_GLIBC))
