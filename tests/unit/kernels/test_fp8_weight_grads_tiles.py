"""How the kernel of fp8 weight gradients deals matrices out to tiles: the source's own code,
compiled for the host."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter

import pytest

from megatron_fluid.kernels.fp8_weight_grads.launch import FP8_WEIGHT_GRADS
from megatron_fluid.kernels.sm90.launch import HEADER
from tests.support.host_code import COMPILER, between, compile_for_host

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

_HARNESS = """
template <bool ADDS>
int find_all(const int* ends, int experts, int places, int high, int wide, int first, int step,
             int* out, int room) {
  Walk<ADDS> walk = {ends, places, experts, high / SLAB, (wide + 2 * BLOCK - 1) / (2 * BLOCK),
                     0, 0, 0, 0};
  Tile tile = {};
  int count = 0;
  for (int number = first; count < room && walk.find(number, tile); number += step, count++) {
    const int found[] = {number, tile.expert, tile.block, tile.blocks, tile.row, tile.slabs,
                         tile.feature};
    for (int i = 0; i < 7; i++) out[count * 7 + i] = found[i];
  }
  return count;
}
extern "C" int tiles(int adds, const int* ends, int experts, int places, int high, int wide,
                     int first, int step, int* out, int room) {
  return adds ? find_all<true>(ends, experts, places, high, wide, first, step, out, room)
              : find_all<false>(ends, experts, places, high, wide, first, step, out, room);
}
"""
_ROOM = 100_000


@pytest.fixture(scope="module")
def walk() -> ctypes.CDLL:
    source, header = FP8_WEIGHT_GRADS.path.read_text(), HEADER.read_text()
    text = between(source, "constexpr int MOST_UNITS", "#include")
    text += between(header, "typedef unsigned int u32;", "struct alignas(64) TensorMap")
    text += between(source, "constexpr int CONSUMERS", "// What a block's warps share")
    return compile_for_host(text + _HARNESS)


def _blocks(counts: list[int]) -> list[int]:
    return [-(-count // 128) for count in counts]


def _tiles(
    walk: ctypes.CDLL,
    counts: list[int],
    high: int,
    wide: int,
    adds: bool,
    first: int = 0,
    step: int = 1,
    places: int | None = None,
) -> list[tuple[int, ...]]:
    ends = (ctypes.c_int * len(counts))(*itertools.accumulate(counts))
    out = (ctypes.c_int * (7 * _ROOM))()
    if places is None:
        places = 128 * sum(_blocks(counts))
    found = walk.tiles(adds, ends, len(counts), places, high, wide, first, step, out, _ROOM)
    assert found < _ROOM
    return [tuple(out[7 * i : 7 * i + 7]) for i in range(found)]


_COUNTS = [
    [*range(0, 400, 13), 1023, 0, 4097],
    [0, 0, 5, 0],
    [random.Random(3).randrange(700) for _ in range(300)],
    [1],
    [0],
]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("high", "wide"), [(128, 128), (640, 256), (4096, 384), (256, 1152)])
def test_every_slab_of_each_pair_of_blocks_is_in_one_tile_with_all_blocks_of_its_expert(
    walk: ctypes.CDLL, high: int, wide: int, adds: bool
) -> None:
    for counts in _COUNTS:
        tiles = _tiles(walk, counts, high, wide, adds)
        assert [tile[0] for tile in tiles] == list(range(len(tiles)))
        blocks = _blocks(counts)
        starts = [0, *itertools.accumulate(blocks)]
        found: Counter[tuple[int, int, int]] = Counter()
        for _, expert, block, depth, row, slabs, feature in tiles:
            assert (block, depth) == (starts[expert], blocks[expert])
            assert 1 <= slabs <= 3
            found.update((expert, row + 64 * slab, feature) for slab in range(slabs))
        assert found == Counter(
            (expert, row, feature)
            for expert, depth in enumerate(blocks)
            if depth or not adds
            for row in range(0, high, 64)
            for feature in range(0, wide, 256)
        )


@pytest.mark.parametrize("adds", [False, True])
def test_clusters_that_take_every_other_tile_take_them_all(walk: ctypes.CDLL, adds: bool) -> None:
    counts = [300, 0, 65, 1000]
    whole = _tiles(walk, counts, 640, 384, adds)
    parts = [_tiles(walk, counts, 640, 384, adds, first, 3) for first in range(3)]
    assert sorted(tile for part in parts for tile in part) == whole


def test_offsets_beyond_the_places_lead_to_no_block_beyond_them(walk: ctypes.CDLL) -> None:
    for counts in ([100, 1000, 2**30], [300, -200, 5, 1000]):
        for _, _, block, blocks, *_ in _tiles(walk, counts, 128, 128, False, places=512):
            assert 0 <= block <= block + blocks <= 4
