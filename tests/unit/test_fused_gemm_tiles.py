"""How the fused kernels of tensor parallelism deal blocks out to tiles: the source's own code, compiled for the host."""

from __future__ import annotations

import ctypes

import pytest

from megatron_fluid.kernels.fused_gemm import MOST_RANKS, _Call, tiles_of_block, wave_cost
from megatron_fluid.kernels.hopper import FUSED, HEADER
from tests.host_code import COMPILER, between, compile_for_host

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

_HARNESS = """
extern "C" int tiles(int ranks, int first, int rows, int width, int high, int* out, int room) {
  const Walk walk = {ranks, first, rows, (width + 255) / 256, high};
  Tile tile = {};
  int count = 0;
  for (; count < room && walk.find(count, tile); count++) {
    const int found[] = {tile.step, tile.block, tile.row, tile.rows, tile.units, tile.feature, tile.inside};
    for (int i = 0; i < 7; i++) out[count * 7 + i] = found[i];
  }
  return count;
}
extern "C" int offsets(int* out) {
  Call call;
  const char* const start = (const char*)&call;
  const void* const members[] = {&call.out, &call.flags_of, &call.flags, &call.slots, &call.bias, &call.errors, &call.abort,
                                 &call.timeout_ns, &call.value, &call.ranks, &call.rank, &call.operation, &call.rows,
                                 &call.width, &call.depth, &call.high, &call.words};
  int count = 0;
  for (const void* member : members) out[count++] = (const char*)member - start;
  return sizeof(Call);
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = FUSED.path.read_text()
    text = between(source, "constexpr int MOST_UNITS", "#include")
    text += between(HEADER.read_text(), "typedef unsigned int u32;", "struct alignas(64) TensorMap")
    text += between(source, "constexpr int MOST_RANKS", "struct Maps {")
    text += between(source, "struct Tile {", "__device__ __forceinline__ int look(")
    return compile_for_host(text + _HARNESS, tmp_path_factory.mktemp("walk"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [16, 256, 1040])
def test_every_row_of_every_block_is_in_one_tile_of_each_strip_of_features(
    host: ctypes.CDLL, ranks: int, width: int
) -> None:
    for rows in (1, 31, 32, 33, 256, 288, 289, 416, 1000, 4608, 5001):
        first = (rows + 1) % ranks
        high = tiles_of_block(rows, width, ranks, 66)
        room = 100_000
        out = (ctypes.c_int * (7 * room))()
        count = host.tiles(ranks, first, rows, width, high, out, room)
        assert count < room
        found = [tuple(out[7 * i : 7 * i + 7]) for i in range(count)]
        assert [step for step, *_ in found] == sorted(step for step, *_ in found), "what waits comes last"
        strips: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, (step, block, row, many, units, feature, inside) in enumerate(found):
            assert block == (first + step) % ranks and inside == number % (high * -(-width // 256))
            assert 1 <= units <= 8 and (units - 1) * 32 < many <= units * 32
            strips.setdefault((block, feature), []).append((row, row + many))
        assert len(strips) == ranks * -(-width // 256)
        for pieces in strips.values():
            pieces.sort()
            assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == rows


def test_waves_of_tiles_are_whole_where_that_pays() -> None:
    # 24 pairs of strips of features: tiles of 256 tokens make a wave and a half, which fewer tokens a tile would not mend.
    assert tiles_of_block(512, 6144, 2, 66) == 2
    assert wave_cost(512, 6144, 2, 66, 2) > 1.25
    # 40 pairs, 6 units of rows: one tile a block makes 80, two waves; more would be more waves.
    assert tiles_of_block(192, 10240, 2, 66) == 1
    # 10 pairs, 10 units on 4 ranks: 2 tiles make 80, 3 make 120, in two waves of narrower ones.
    assert tiles_of_block(320, 2560, 4, 66) == 3
    for rows, width in ((4096, 14336), (4096, 6144), (2048, 49152)):
        units = rows // 32
        high = tiles_of_block(rows, width, 2, 66)
        assert units / 8 <= high <= units / 6


def test_a_call_is_laid_out_as_the_kernel_reads_it(host: ctypes.CDLL) -> None:
    found = (ctypes.c_int * 32)()
    size = host.offsets(found)
    assert size == ctypes.sizeof(_Call)
    names = [name for name, *_ in _Call._fields_]
    assert [getattr(_Call, name).offset for name in names] == found[: len(names)]
    assert _Call.out.size == 8 * MOST_RANKS
