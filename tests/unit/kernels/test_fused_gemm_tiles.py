"""How the fused kernels of tensor parallelism deal blocks out to tiles: the source's own code,
compiled for the host."""

import ctypes

import pytest

from megatron_fluid.kernels.fused_gemm.launch import (
    FUSED,
    MOST_CHUNKS,
    MOST_ROWS,
    chunks_of_block,
    splits_of_depth,
    strips_of_block,
    tiles_of_block,
)
from megatron_fluid.kernels.sm90.launch import HEADER
from tests.support.host_code import COMPILER, between, compile_for_host

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

_HARNESS = """
extern "C" int tiles(int ranks, int first, int rows, int width, int high, int chunks, int splits,
                     int* out, int room) {
  const Walk walk = {ranks, first, rows, (width + 255) / 256, high, chunks, splits};
  Tile tile = {};
  int count = 0;
  for (; count < room && walk.find(count, tile); count++) {
    const int found[] = {tile.step,    tile.block, tile.row,   tile.rows,  tile.units,
                         tile.feature, tile.chunk, tile.split, tile.number};
    for (int i = 0; i < 9; i++) out[count * 9 + i] = found[i];
  }
  return count;
}
"""


@pytest.fixture(scope="module")
def host() -> ctypes.CDLL:
    source = FUSED.path.read_text()
    text = between(source, "constexpr int MOST_UNITS", "#include")
    text += between(HEADER.read_text(), "typedef unsigned int u32;", "struct alignas(64) TensorMap")
    text += "struct float4;\n" + between(source, "constexpr int MOST_RANKS", "struct Maps {")
    text += between(source, "struct Tile {", "__device__ __forceinline__ int look(")
    return compile_for_host(text + _HARNESS)


Found = tuple[int, ...]


def tiles(
    host: ctypes.CDLL, ranks: int, rows: int, width: int, high: int, chunks: int = 1,
    splits: int = 1,
) -> list[Found]:  # fmt: skip
    """(step, block, row, rows, units, feature, chunk, split, number) of every tile, in the order in
    which they are taken."""
    room = 100_000
    out = (ctypes.c_int * (9 * room))()
    count = host.tiles(ranks, (rows + 1) % ranks, rows, width, high, chunks, splits, out, room)
    assert count < room
    return [tuple(out[9 * i : 9 * i + 9]) for i in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [16, 256, 1040])
def test_every_row_of_every_block_is_in_one_tile_of_each_strip_of_features(
    host: ctypes.CDLL, ranks: int, width: int
) -> None:
    for rows in (1, 31, 32, 33, 256, 288, 289, 416, 1000, 4608, 5001):
        first = (rows + 1) % ranks
        found = tiles(host, ranks, rows, width, tiles_of_block(rows, width, ranks, 66))
        assert [step for step, *_ in found] == sorted(step for step, *_ in found), (
            "what waits comes last"
        )
        strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for step, block, row, many, units, feature, *_ in found:
            assert block == (first + step) % ranks
            assert 1 <= units <= 8 and (units - 1) * 32 < many <= units * 32
            strips.setdefault((block, feature), []).append((row, row + many))
        assert len(strips) == ranks * -(-width // 256)
        for pieces in strips.values():
            pieces.sort()
            assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == rows


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [16, 256, 1040, 4096])
def test_a_chunk_is_finished_with_the_tiles_that_it_holds(
    host: ctypes.CDLL, width: int, chunks: int
) -> None:
    for rows in (1, 33, 256, 416, 4608, 9001):
        high = tiles_of_block(rows, width, 2, 66)
        held = {chunk.number: chunk for chunk in chunks_of_block(rows, width, high, chunks)}
        parts, done = dict.fromkeys(held, 0), []
        for step, _, row, many, _, feature, number, *_ in tiles(host, 2, rows, width, high, chunks):
            if step:
                continue
            chunk = held[number]
            assert chunk.row <= row and row + many <= chunk.row + chunk.rows
            assert chunk.column <= feature
            assert min(width, feature + 256) <= chunk.column + chunk.columns
            parts[number] += 4
            if parts[number] == chunk.parts:
                done.append(number)
        assert done == list(held), "each is finished, in the order in which they are sent"
        area = sum(chunk.rows * chunk.columns for chunk in held.values())
        assert area == rows * width, "each element is in one chunk"
        assert max(held) < strips_of_block(high) * chunks <= MOST_CHUNKS


@pytest.mark.parametrize("splits", [2, 3, 4])
def test_every_tile_is_cut_along_k_once_into_each_part(host: ctypes.CDLL, splits: int) -> None:
    rows, width = 416, 1040
    high = tiles_of_block(rows, width, 3, 66)
    whole = tiles(host, 3, rows, width, high)
    found = tiles(host, 3, rows, width, high, splits=splits)
    assert [number for *_, number in whole] == list(range(len(whole)))
    for split in range(splits):
        part = [(*tile[:7], 0, tile[8]) for tile in found if tile[7] == split]
        assert part == whole
    assert [step for step, *_ in found] == sorted(step for step, *_ in found), (
        "what waits comes last"
    )


def test_k_is_cut_where_tiles_are_few_and_k_is_long() -> None:
    # 48 tiles of 66 at a time: four parts of each are three waves in place of four.
    assert [splits_of_depth(rows, 3072, 49152, 4, 66) for rows in (256, 512, 1024)] == [4, 2, 1]
    # A short K is not worth its partial sums, and these have a limit.
    assert splits_of_depth(256, 3072, 4096, 4, 66) == 1
    for rows, width in ((8192, 57344), (4096, 256), (33, 256), (2048, 12288)):
        parts = splits_of_depth(rows, width, 1 << 18, 8, 66)
        tiles = 8 * tiles_of_block(rows, width, 8, 66) * -(-width // 256)
        assert parts == 1 or 4 * tiles * parts * 2**16 <= 2**28


def test_the_most_rows_have_a_chunk_for_every_strip() -> None:
    for width in (256, 1024, 57344):
        assert strips_of_block(tiles_of_block(MOST_ROWS, width, 8, 66)) <= MOST_CHUNKS
