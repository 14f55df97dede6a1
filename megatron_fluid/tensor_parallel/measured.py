"""The fastest backend by shape, as measured. `python -m benchmarks.tune.tp_table` writes
measured.json from result files."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path

__all__ = ["TABLE", "Entry", "measured_backend", "nearest_backend", "read_table"]

TABLE = Path(__file__).with_name("measured.json")

Entry = tuple[str, int, str, int, int, int, str]
"""GPU, ranks, "gather" or "scatter", M, N and K of the GEMM of one rank, backend."""

# A measured shape serves another whose M, N and K are each within a factor of 2 of its own: log2.
_NEAR = 1.0


@functools.cache
def read_table() -> tuple[Entry, ...]:
    """The entries of measured.json."""
    return tuple(tuple(entry) for entry in json.loads(TABLE.read_text()))  # type: ignore[misc]


@functools.lru_cache(maxsize=4096)  # the host time of every call counts for small GEMMs
def measured_backend(gpu: str, ranks: int, operation: str, m: int, n: int, k: int) -> str | None:
    """`nearest_backend` of measured.json."""
    return nearest_backend(read_table(), gpu, ranks, operation, (m, n, k))


def nearest_backend(
    table: Iterable[Entry], gpu: str, ranks: int, operation: str, shape: tuple[int, int, int]
) -> str | None:
    """Return the backend of the nearest measured shape (M, N, K), or None where none is near. The
    distance is the largest ratio of M, N and K, then the product of all three.

    >>> nearest_backend([("H200", 4, "gather", 1024, 512, 512, "fused")],
    ...                 "H200", 4, "gather", (2048, 512, 512))
    'fused'
    """
    best: tuple[float, float, str] | None = None
    for *case, m, n, k, backend in table:
        if case != [gpu, ranks, operation]:
            continue
        pairs = zip(shape, (m, n, k), strict=True)
        apart = [abs(math.log2(found / known)) for found, known in pairs if found]
        largest, total = max(apart), sum(apart)
        if largest <= _NEAR and (best is None or (largest, total) < best[:2]):
            best = largest, total, backend
    return None if best is None else best[2]
