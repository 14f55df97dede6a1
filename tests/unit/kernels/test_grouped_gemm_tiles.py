"""How the grouped GEMM for Hopper deals rows out to tiles: the source's own code, compiled for the
host.

Every row of every expert must be in exactly one tile of each strip of features, whatever the
counts; a GPU would only show it by wrong results.
"""

from __future__ import annotations

import ctypes
import itertools
import random

import pytest

from megatron_fluid.kernels.grouped_gemm import tiles
from megatron_fluid.kernels.grouped_gemm.launch import GROUPED
from megatron_fluid.kernels.sm90.launch import HEADER
from tests.support.host_code import COMPILER, between, compile_for_host

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

_HARNESS = """
template <int MODE>
int tiles(const int* ends, int experts, int high, int width, int depth, int first, int step,
          int reversed, int fresh, int* out, int room) {
  Walk<MODE> walk;
  walk.ends = ends;
  walk.rows = Shape<MODE>::GRADS ? depth : high;
  walk.experts = experts;
  walk.across = ((Shape<MODE>::GRADS ? high : width) + 255) / 256;
  walk.down = (width + Shape<MODE>::COLUMNS - 1) / Shape<MODE>::COLUMNS;
  walk.expert = walk.first = walk.start = 0;
  walk.reversed = reversed;
  walk.fresh = fresh;
  Tile tile = {};
  int count = 0;
  for (int number = first; count < room && walk.find(number, tile); number += step, count++) {
    const int found[] = {number,       tile.expert, tile.row,   tile.rows,
                         tile.feature, tile.units,  tile.column};
    for (int i = 0; i < 7; i++) out[count * 7 + i] = found[i];
  }
  return count;
}
#define TILES(name, mode)                                                                    \\
  extern "C" int name(const int* ends, int experts, int high, int width, int depth,          \\
                      int first, int step, int reversed, int fresh, int* out, int room) {    \\
    return tiles<mode>(ends, experts, high, width, depth, first, step, reversed, fresh, out, \\
                       room);                                                               \\
  }
TILES(forward, FORWARD)
TILES(gated, GATED)
TILES(wide, WIDE)
TILES(weights, WEIGHTS)
TILES(sums, SUMS)
TILES(long_sums, LONG_SUMS)

extern "C" int tiles_of(int units, int wide) {
  return wide ? Walk<WIDE>::tiles_of(units) : Walk<GATED>::tiles_of(units);
}
"""


@pytest.fixture(scope="module")
def walk() -> ctypes.CDLL:
    source = GROUPED.path.read_text()
    text = between(source, "constexpr int MOST_UNITS", "#include")
    text += between(HEADER.read_text(), "typedef unsigned int u32;", "struct alignas(64) TensorMap")
    text += between(source, "constexpr int LONG_UNITS", "// The tiles of one cluster")
    text += between(
        source,
        "// The tiles of one cluster",
        "template <int MODE>\n__device__ __forceinline__ void produce",
    )
    return compile_for_host(text + _HARNESS)


Found = tuple[
    int, int, int, int, int, int, int
]  # number, expert, row, rows, feature, units, column


def _tiles(
    walk: ctypes.CDLL,
    mode: str,
    counts: list[int],
    high: int,
    width: int,
    depth: int,
    first: int = 0,
    step: int = 1,
    descending: bool = False,
    fresh: bool = False,
) -> list[Found]:
    ends = (ctypes.c_int * len(counts))()
    total = 0
    for e, count in enumerate(counts):
        total += count
        ends[e] = total
    room = 200_000
    out = (ctypes.c_int * (7 * room))()
    shape = high, width, depth, first, step, descending, fresh
    found = getattr(walk, mode)(ends, len(counts), *shape, out, room)
    assert found < room
    flat = out[: 7 * found]
    return [tuple(flat[i : i + 7]) for i in range(0, len(flat), 7)]  # type: ignore[misc]


def _counts() -> list[list[int]]:
    draw = random.Random(3)
    every = [*range(300), *range(1500, 2000), 4076, 4123, 16384, 65536]
    return [every, [0, 0, 5, 0], [draw.randrange(0, 700) for _ in range(256)], [4030, 4123], [1]]


@pytest.mark.parametrize("width", [64, 256, 264, 4096])
@pytest.mark.parametrize("mode", ["forward", "gated", "wide"])
def test_every_row_is_in_one_tile_of_each_strip_of_features(
    walk: ctypes.CDLL, mode: str, width: int
) -> None:
    for counts in _counts():
        counts = counts if width <= 264 else counts[-40:]
        rows = sum(counts)
        tiles = _tiles(walk, mode, counts, rows, width, 512)
        assert [tile[0] for tile in tiles] == list(range(len(tiles)))
        strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for _, expert, row, many, feature, units, _ in tiles:
            most = 8 if mode == "gated" or counts[expert] > 47 * 32 else 9
            assert 1 <= units <= most and (units - 1) * 32 < many <= units * 32
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
def test_rows_find_matrices_that_lie_in_descending_order(walk: ctypes.CDLL, mode: str) -> None:
    counts = [0, 300, 5, 0, 70]
    up, down = (_tiles(walk, mode, counts, 375, 264, 512, descending=d) for d in (False, True))
    assert [(n, 4 - expert, *rest) for n, expert, *rest in up] == [tuple(tile) for tile in down]
    assert {tile[1] for tile in up} == {1, 2, 4}


@pytest.mark.parametrize(
    ("counts", "depth", "expected"),
    [
        ([500, 520, 540] * 20, 7168, True),  # a second of 17 units would be cut in three
        ([500, 520, 540] * 20, 1024, False),  # too short for what a wide tile costs at its end
        ([1000, 1030] * 16, 7168, True),
        ([1000, 1030] * 16, 4096, False),
        ([280] * 64, 7168, True),
        (
            [280] * 64,
            3072,
            False,
        ),  # fewer by as much, but too little to be won for the host to count
        ([280] * 32 + [64] * 64, 7168, False),  # as long as nobody has measured so few rows
        ([512] * 64, 7168, False),  # whole tiles of eight: nothing to gain
        ([96, 0, 32], 7168, False),
        ([0] * 8, 7168, False),
        ([4100, 4200], 14336, False),
    ],
)
def test_wide_tiles_are_taken_where_they_are_fewer_by_enough(
    counts: list[int], depth: int, expected: bool
) -> None:
    assert tiles.wide_tiles_pay(list(itertools.accumulate(counts)), depth) == expected


def test_the_host_counts_tiles_as_the_kernel_cuts_them(walk: ctypes.CDLL) -> None:
    for units in range(48):
        assert tiles._TILES[units] == (walk.tiles_of(units, 0), walk.tiles_of(units, 1))
    assert all(walk.tiles_of(units, 0) == walk.tiles_of(units, 1) for units in range(48, 3000))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("mode", "columns"), [("weights", 256), ("sums", 192), ("long_sums", 256)])
def test_every_part_of_a_gradient_is_in_one_tile(
    walk: ctypes.CDLL, mode: str, columns: int, fresh: bool
) -> None:
    counts, high, width = [300, 0, 17], 520, 1000
    tiles = _tiles(walk, mode, counts, high, width, sum(counts), fresh=fresh)
    found = sorted((expert, feature, column) for _, expert, _, _, feature, _, column in tiles)
    # An expert without rows adds nothing, and is zero where nothing is added to.
    experts = [0, 1, 2] if mode == "weights" or fresh else [0, 2]
    assert found == [
        (e, f, c) for e in experts for f in range(0, high, 256) for c in range(0, width, columns)
    ]
    assert all((row, rows) == (sum(counts[:e]), counts[e]) for _, e, row, rows, *_ in tiles)


def test_clusters_find_the_same_tiles_under_the_same_numbers(walk: ctypes.CDLL) -> None:
    counts = [700, 0, 33, 4100, 2]
    whole = _tiles(walk, "forward", counts, sum(counts), 1024, 512)
    for cluster in range(7):
        assert (
            _tiles(walk, "forward", counts, sum(counts), 1024, 512, cluster, 7) == whole[cluster::7]
        )


_LOADS = """
struct TensorMap { int word; };
struct Load { const TensorMap* map; u32 to; int row; };
Load loads[16];
int loaded;
void load_for_both(u32 to, const TensorMap* map, u64*, int, int row) {
  loads[loaded++] = {map, to, row};
}
"""
_LOADS_END = """
extern "C" int load(int units, int block, int row, int* out) {
  TensorMap boxes[3];
  loaded = 0;
  load_tokens(0, boxes, nullptr, 0, row, units, block);
  for (int i = 0; i < loaded; i++) {
    out[3 * i] = 32 << (loads[i].map - boxes);
    out[3 * i + 1] = loads[i].to;
    out[3 * i + 2] = loads[i].row;
  }
  return loaded;
}
"""


@pytest.mark.parametrize("units", range(1, 10))
def test_both_blocks_load_every_token_of_a_tile_once(units: int) -> None:
    header = HEADER.read_text()
    text = between(header, "typedef unsigned int u32;", "// What differs between the modes")
    text += (
        _LOADS
        + between(
            header, "// This block's share of `units`", "__device__ __forceinline__ void store("
        )
        + _LOADS_END
    )
    library = compile_for_host(text)
    rows: list[int] = []
    for block in range(2):
        out = (ctypes.c_int * 48)()
        for i in range(library.load(units, block, 1000, out)):
            boxes, to, row = out[3 * i : 3 * i + 3]
            assert to == (row - 1000) * 128, "a token lies where its tile is multiplied from"
            rows += range(row, row + boxes)
    assert sorted(rows) == list(range(1000, 1000 + 32 * units))
