"""How the grouped GEMMs for Hopper (bf16, fp8, fp8 weight gradients) deal rows out to tiles: the
sources' own code, compiled for the host. Every row of every expert must be in exactly one tile of
each strip of features, whatever the counts; a GPU would only show it by wrong results."""

import ctypes
import functools
import itertools
import random
from collections import Counter

import pytest

from megatron_fluid.kernels.fp8_grouped_gemm.launch import FP8_GROUPED
from megatron_fluid.kernels.fp8_weight_grads.launch import FP8_WEIGHT_GRADS
from megatron_fluid.kernels.grouped_gemm import tiles
from megatron_fluid.kernels.grouped_gemm.launch import GROUPED
from megatron_fluid.kernels.sm90.launch import HEADER
from tests.support.host_code import COMPILER, between, compile_for_host

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

# The tiles `first`, `first + step`, ... of a walk: the number of each, and those of its members.
_WALKED = """
template <typename W, typename... Members>
int walked(W walk, int first, int step, int* out, int room, Members... members) {
  Tile tile = {};
  int count = 0;
  for (int number = first; count < room && walk.find(number, tile); number += step, count++) {
    const int found[] = {number, tile.*members...};
    for (int value : found) *out++ = value;
  }
  return count;
}
#define TILES(name, function)                                                              \\
  extern "C" int name(const int* ends, int experts, int first, int step, int* out, int room, \\
                      int high, int width, int depth, int reversed, int fresh) {             \\
    return function(ends, experts, first, step, out, room, high, width, depth, reversed, fresh); \\
  }
"""
_GROUPED = """
template <int MODE>
int grouped(const int* ends, int experts, int first, int step, int* out, int room, int high,
            int width, int depth, int reversed, int fresh) {
  Walk<MODE> walk;
  walk.ends = ends;
  walk.rows = Shape<MODE>::GRADS ? depth : high;
  walk.experts = experts;
  walk.across = ((Shape<MODE>::GRADS ? high : width) + 255) / 256;
  walk.down = (width + Shape<MODE>::COLUMNS - 1) / Shape<MODE>::COLUMNS;
  walk.expert = walk.first = walk.start = 0;
  walk.reversed = reversed;
  walk.fresh = fresh;
  return walked(walk, first, step, out, room, &Tile::expert, &Tile::row, &Tile::rows,
                &Tile::feature, &Tile::units, &Tile::column);
}
TILES(forward, grouped<FORWARD>)
TILES(gated, grouped<GATED>)
TILES(wide, grouped<WIDE>)
TILES(weights, grouped<WEIGHTS>)
TILES(sums, grouped<SUMS>)
TILES(long_sums, grouped<LONG_SUMS>)

extern "C" int tiles_of(int units, int wide) {
  return wide ? Walk<WIDE>::tiles_of(units) : Walk<GATED>::tiles_of(units);
}
"""
_FP8 = """
int fp8_rows(const int* ends, int experts, int first, int step, int* out, int room, int high,
             int width, int, int, int) {
  Walk walk = {ends, high, experts, (width + 2 * BLOCK - 1) / (2 * BLOCK), 0, 0, 0};
  return walked(walk, first, step, out, room, &Tile::expert, &Tile::row, &Tile::rows,
                &Tile::feature, &Tile::slabs);
}
TILES(fp8, fp8_rows)
"""
_FP8_WEIGHTS = """
template <bool ADDS>
int fp8_gradients(const int* ends, int experts, int first, int step, int* out, int room, int high,
                  int width, int depth, int, int) {
  Walk<ADDS> walk = {ends, depth, experts, high / SLAB, (width + 2 * BLOCK - 1) / (2 * BLOCK),
                     0, 0, 0, 0};
  return walked(walk, first, step, out, room, &Tile::expert, &Tile::block, &Tile::blocks,
                &Tile::row, &Tile::slabs, &Tile::feature);
}
TILES(fp8_weights, fp8_gradients<false>)
TILES(fp8_sums, fp8_gradients<true>)
"""
_ROOM = 200_000

Found = tuple[int, ...]


@functools.cache
def library(name: str) -> tuple[ctypes.CDLL, int]:
    """The library that has this walk, and how many numbers it gives of a tile."""
    if name == "fp8":
        kernel, harness, columns = FP8_GROUPED, _FP8, 6
    elif name in ("fp8_weights", "fp8_sums"):
        kernel, harness, columns = FP8_WEIGHT_GRADS, _FP8_WEIGHTS, 7
    else:
        kernel, harness, columns = GROUPED, _GROUPED, 7
    source = kernel.path.read_text()
    text = between(source, "constexpr int MOST_UNITS", "#include")
    text += between(HEADER.read_text(), "typedef unsigned int u32;", "struct alignas(64) TensorMap")
    if kernel is GROUPED:
        text += between(source, "constexpr int LONG_UNITS", "// The tiles of one cluster")
        end = "template <int MODE>\n__device__ __forceinline__ void produce"
        text += between(source, "// The tiles of one cluster", end)
    else:
        end = "// What all of a block's" if kernel is FP8_GROUPED else "// What a block's warps"
        text += between(source, "constexpr int CONSUMERS", end)
    return compile_for_host(text + _WALKED + harness), columns


def walk(
    name: str, counts: list[int], high: int, width: int, depth: int = 512, *, first: int = 0,
    step: int = 1, descending: bool = False, fresh: bool = False,
) -> list[Found]:  # fmt: skip
    """(number, expert, ...) of the tiles of experts with so many rows each."""
    found, columns = library(name)
    ends = (ctypes.c_int * len(counts))(*itertools.accumulate(counts))
    out = (ctypes.c_int * (columns * _ROOM))()
    sizes = high, width, depth, descending, fresh
    count = getattr(found, name)(ends, len(counts), first, step, out, _ROOM, *sizes)
    assert count < _ROOM
    flat = out[: columns * count]
    return [tuple(flat[i : i + columns]) for i in range(0, len(flat), columns)]


def _counts() -> list[list[int]]:
    draw = random.Random(3)
    every = [*range(300), *range(1500, 2000), 4076, 4123, 16384, 65536]
    return [every, [0, 0, 5, 0], [draw.randrange(0, 700) for _ in range(256)], [4030, 4123], [1]]


def _most_units(mode: str, rows: int) -> tuple[int, int]:
    """Units of a tile at most, and rows of a unit."""
    if mode == "fp8":
        return 3, 64
    return (8 if mode == "gated" or rows > 47 * 32 else 9), 32


@pytest.mark.parametrize("width", [64, 256, 264, 4096])
@pytest.mark.parametrize("mode", ["forward", "gated", "wide", "fp8"])
def test_every_row_is_in_one_tile_of_each_strip_of_features(mode: str, width: int) -> None:
    width = 2 * width if mode == "fp8" and width == 64 else width  # fp8 has whole blocks of 128
    for counts in _counts():
        counts = counts if width <= 264 else counts[-40:]
        found = walk(mode, counts, sum(counts), width)
        assert [tile[0] for tile in found] == list(range(len(found)))
        strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for _, expert, row, many, feature, units, *_ in found:
            most, unit = _most_units(mode, counts[expert])
            assert 1 <= units <= most and (units - 1) * unit < many <= units * unit
            strips.setdefault((expert, feature), []).append((row, row + many))
        start = 0
        for expert, count in enumerate(counts):
            for feature in range(0, width, 256):
                pieces = sorted(strips.pop((expert, feature), []))
                bounds = [start, *(end for _, end in pieces)]
                assert [begin for begin, _ in pieces] == bounds[:-1] and bounds[-1] == start + count
            start += count
        assert not strips


@pytest.mark.parametrize("mode", ["forward", "gated", "wide"])
def test_rows_find_matrices_that_lie_in_descending_order(mode: str) -> None:
    counts = [0, 300, 5, 0, 70]
    up, down = (walk(mode, counts, 375, 264, descending=d) for d in (False, True))
    assert [(n, 4 - expert, *rest) for n, expert, *rest in up] == [tuple(tile) for tile in down]
    assert {tile[1] for tile in up} == {1, 2, 4}


@pytest.mark.parametrize(("counts", "depth", "expected"), [
    ([500, 520, 540] * 20, 7168, True),  # a second of 17 units would be cut in three
    ([500, 520, 540] * 20, 1024, False),  # too short for what a wide tile costs at its end
    ([280] * 64, 7168, True),
    ([280] * 64, 3072, False),  # fewer by as much, but too little to be won to be counted
    ([280] * 32 + [64] * 64, 7168, False),  # as long as nobody has measured so few rows
    ([512] * 64, 7168, False),  # whole tiles of eight: nothing to gain
    ([0] * 8, 7168, False),
])  # fmt: skip
def test_wide_tiles_are_taken_where_they_are_fewer_by_enough(
    counts: list[int], depth: int, expected: bool
) -> None:
    assert tiles.wide_tiles_pay(list(itertools.accumulate(counts)), depth) == expected


def test_the_host_counts_tiles_as_the_kernel_cuts_them() -> None:
    count, _ = library("wide")
    for units in range(48):
        assert tiles._TILES[units] == (count.tiles_of(units, 0), count.tiles_of(units, 1))
    assert all(count.tiles_of(units, 0) == count.tiles_of(units, 1) for units in range(48, 3000))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("mode", "columns"), [("weights", 256), ("sums", 192), ("long_sums", 256)])
def test_every_part_of_a_gradient_is_in_one_tile(mode: str, columns: int, fresh: bool) -> None:
    counts, high, width = [300, 0, 17], 520, 1000
    tiles = walk(mode, counts, high, width, sum(counts), fresh=fresh)
    found = sorted((expert, feature, column) for _, expert, _, _, feature, _, column in tiles)
    # An expert without rows adds nothing, and is zero where nothing is added to.
    experts = [0, 1, 2] if mode == "weights" or fresh else [0, 2]
    assert found == [
        (e, f, c) for e in experts for f in range(0, high, 256) for c in range(0, width, columns)
    ]
    assert all((row, rows) == (sum(counts[:e]), counts[e]) for _, e, row, rows, *_ in tiles)


def _blocks(counts: list[int]) -> list[int]:
    return [-(-count // 128) for count in counts]


@pytest.mark.parametrize("mode", ["fp8_weights", "fp8_sums"])
@pytest.mark.parametrize(("high", "wide"), [(128, 128), (640, 256), (4096, 384), (256, 1152)])
def test_every_slab_of_each_pair_of_blocks_is_in_one_tile_with_all_blocks_of_its_expert(
    high: int, wide: int, mode: str
) -> None:
    several = [*range(0, 400, 13), 1023, 0, 4097]
    many = [random.Random(3).randrange(700) for _ in range(300)]
    for counts in (several, [0, 0, 5, 0], many, [1], [0]):
        blocks = _blocks(counts)
        found = walk(mode, counts, high, wide, 128 * sum(blocks))
        assert [tile[0] for tile in found] == list(range(len(found)))
        starts = [0, *itertools.accumulate(blocks)]
        slabs_of: Counter[tuple[int, int, int]] = Counter()
        for _, expert, block, depth, row, slabs, feature in found:
            assert (block, depth) == (starts[expert], blocks[expert])
            assert 1 <= slabs <= 3
            slabs_of.update((expert, row + 64 * slab, feature) for slab in range(slabs))
        assert slabs_of == Counter(
            (expert, row, feature)
            for expert, depth in enumerate(blocks)
            if depth or mode == "fp8_weights"
            for row in range(0, high, 64)
            for feature in range(0, wide, 256)
        )


def test_offsets_beyond_the_places_lead_to_no_block_beyond_them() -> None:
    for counts in ([100, 1000, 2**30], [300, -200, 5, 1000]):
        for _, _, block, blocks, *_ in walk("fp8_weights", counts, 128, 128, 512):
            assert 0 <= block <= block + blocks <= 4


@pytest.mark.parametrize("mode", ["forward", "fp8", "fp8_weights", "fp8_sums"])
def test_clusters_find_the_same_tiles_under_the_same_numbers(mode: str) -> None:
    counts = [700, 0, 33, 4100, 2]
    gradients = mode.startswith("fp8_")
    sizes = (640, 384, 128 * sum(_blocks(counts))) if gradients else (sum(counts), 1024, 512)
    whole = walk(mode, counts, *sizes)
    for cluster in range(7):
        assert walk(mode, counts, *sizes, first=cluster, step=7) == whole[cluster::7]
