"""How the fp8 grouped GEMM for Hopper deals rows out to tiles: the source's own code, compiled for
the host."""

from __future__ import annotations

import ctypes
import random

import pytest

from megatron_fluid.kernels.fp8_grouped_gemm.launch import FP8_GROUPED
from megatron_fluid.kernels.sm90.launch import HEADER
from tests.support.host_code import COMPILER, between, compile_for_host

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

_HARNESS = """
extern "C" int tiles(const int* ends, int experts, int rows, int width, int first, int step,
                     int* out, int room) {
  Walk walk = {ends, rows, experts, (width + 2 * BLOCK - 1) / (2 * BLOCK), 0, 0, 0};
  Tile tile = {};
  int count = 0;
  for (int number = first; count < room && walk.find(number, tile); number += step, count++) {
    const int found[] = {number, tile.expert, tile.row, tile.rows, tile.feature, tile.slabs};
    for (int i = 0; i < 6; i++) out[count * 6 + i] = found[i];
  }
  return count;
}
"""
_ROOM = 100_000


@pytest.fixture(scope="module")
def walk() -> ctypes.CDLL:
    source, header = FP8_GROUPED.path.read_text(), HEADER.read_text()
    text = between(source, "constexpr int MOST_UNITS", "#include")
    text += between(header, "typedef unsigned int u32;", "struct alignas(64) TensorMap")
    text += between(source, "constexpr int CONSUMERS", "// What all of a block's threads know")
    return compile_for_host(text + _HARNESS)


def _tiles(
    walk: ctypes.CDLL, counts: list[int], width: int, first: int = 0, step: int = 1
) -> list[tuple[int, ...]]:
    ends = (ctypes.c_int * len(counts))(*(sum(counts[: e + 1]) for e in range(len(counts))))
    out = (ctypes.c_int * (6 * _ROOM))()
    found = walk.tiles(ends, len(counts), sum(counts), width, first, step, out, _ROOM)
    assert found < _ROOM
    return [tuple(out[6 * i : 6 * i + 6]) for i in range(found)]


def _counts() -> list[list[int]]:
    draw = random.Random(3)
    return [[*range(270), 1023, 4097], [0, 0, 5, 0], [draw.randrange(700) for _ in range(256)], [1]]


@pytest.mark.parametrize("width", [128, 256, 384, 1024])
def test_every_row_is_in_one_tile_of_each_pair_of_blocks(walk: ctypes.CDLL, width: int) -> None:
    for counts in _counts():
        tiles = _tiles(walk, counts, width)
        assert [tile[0] for tile in tiles] == list(range(len(tiles)))
        strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for _, expert, row, many, feature, slabs in tiles:
            assert 1 <= slabs <= 3 and (slabs - 1) * 64 < many <= slabs * 64
            strips.setdefault((expert, feature), []).append((row, row + many))
        start = 0
        for expert, count in enumerate(counts):
            for feature in range(0, width, 256):
                bounds = [start]
                for begin, end in sorted(strips.pop((expert, feature), [])):
                    assert begin == bounds[-1]
                    bounds.append(end)
                assert bounds[-1] == start + count
            start += count
        assert not strips


def test_clusters_that_take_every_other_tile_take_them_all(walk: ctypes.CDLL) -> None:
    counts = [300, 0, 65, 1000]
    whole = _tiles(walk, counts, 384)
    parts = [_tiles(walk, counts, 384, first, 3) for first in range(3)]
    assert sorted(tile for part in parts for tile in part) == whole
