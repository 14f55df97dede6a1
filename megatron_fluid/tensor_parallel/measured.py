"""The fastest backend by shape, as measured. `python -m benchmarks.tune.tp_table` writes
measured.json from result files."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from importlib.resources import files

__all__ = ["TABLE", "Entry", "measured_backend", "nearest_backend", "read_table"]

TABLE = files("megatron_fluid.tensor_parallel") / "measured.json"

Entry = tuple[str, int, str, int, int, int, str]
"""GPU, ranks, "gather" or "scatter", M, N and K of the GEMM of one rank, backend."""


@functools.cache
def read_table() -> tuple[Entry, ...]:
    """The entries of measured.json."""
    return tuple(tuple(entry) for entry in json.loads(TABLE.read_text()))  # type: ignore[misc]


@functools.lru_cache(maxsize=4096)  # the host time of every call counts for small GEMMs
def measured_backend(gpu: str, ranks: int, operation: str, m: int, n: int, k: int) -> str:
    """`nearest_backend` of measured.json."""
    return nearest_backend(read_table(), gpu, ranks, operation, (m, n, k))


def nearest_backend(
    table: Iterable[Entry], gpu: str, ranks: int, operation: str, shape: tuple[int, int, int]
) -> str:
    """Return the backend of the nearest measured shape (M, N, K): by the largest ratio of M, N and
    K, then by the product of all three. "collective" where M, N or K is less than half of any that
    was measured: overlap costs the host more there than it saves.

    A GPU that was not measured has the entries of those that were, and a number of ranks those of
    the nearest number.

    >>> nearest_backend([("H200", 4, "gather", 1024, 512, 512, "fused")],
    ...                 "H200", 4, "gather", (2048, 512, 512))
    'fused'
    """
    if not all(shape):
        return "collective"
    entries = [entry for entry in table if entry[2] == operation]
    entries = [entry for entry in entries if entry[0] == gpu] or entries
    measured = min({entry[1] for entry in entries}, key=lambda n: (abs(math.log2(n / ranks)), n))
    best = math.inf, math.inf, "collective"
    for entry in entries:
        smaller = [math.log2(n / size) for n, size in zip(entry[3:6], shape, strict=True)]
        if entry[1] == measured and max(smaller) <= 1:
            apart = [abs(ratio) for ratio in smaller]
            best = min(best, (max(apart), sum(apart), entry[6]))
    return best[2]
