"""Which tiles the gated product is computed in."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WIDE_DEPTH", "wide_tiles_pay"]

_LONG_UNITS = 48  # of kernel.cu
WIDE_DEPTH, _WIDE_END, _WIDE_ROWS = 4096, 2048, (192, 1536)
# Number of tiles of an expert with so many units of 32 rows: of at most 8 units, of at most 9.
_TILES = [(-(-units // 8), max(-(-units // 9), units // 8)) for units in range(_LONG_UNITS)]


def wide_tiles_pay(ends: Sequence[int], depth: int) -> bool:
    """Return whether the gated product takes less time in tiles of up to nine units.

    The model: a tile costs three units more than its own, and a wide one _WIDE_END on top. Short
    depths and mean row counts outside _WIDE_ROWS are answered without counting.
    Measured: docs/tuning_notes.md#grouped-gemm
    """
    if depth < WIDE_DEPTH or not _WIDE_ROWS[0] * len(ends) <= ends[-1] < _WIDE_ROWS[1] * len(ends):
        return False
    narrow = wide = start = 0
    for end in ends:
        units = end - start + 31 >> 5
        of_8, of_9 = _TILES[units] if units < _LONG_UNITS else (-(-units // 8),) * 2
        narrow, wide, start = narrow + of_8, wide + of_9, end
    return wide * (3 * depth + _WIDE_END) < narrow * 3 * depth
