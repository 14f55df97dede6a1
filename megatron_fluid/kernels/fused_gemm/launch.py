"""The kernels of fused_gemm/kernel.cu on Hopper GPUs: AllGather-GEMM and GEMM-ReduceScatter, one
launch each.

Shapes: W ranks, m rows of a block, N columns of C, K the contracted dimension. bf16 and fp16,
products summed in fp32. The caller (megatron_fluid.tensor_parallel.fused) owns the buffers and
flags.

Reference: ``torch.cat(blocks).double() @ b.double()`` (tests/gpu/test_tensor_parallel.py).
tests/unit/kernels/test_fused_gemm_tiles.py tests the order of tiles on the host.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.devices import multiprocessors
from megatron_fluid.cuda.tensor_maps import TensorMaps, in_boxes, token_boxes
from megatron_fluid.kernels.sm90.launch import HopperKernels, Source

__all__ = [
    "DEPTH",
    "FUSED",
    "MOST_CHUNKS",
    "MOST_RANKS",
    "MOST_ROWS",
    "Chunk",
    "FusedGemm",
    "Signals",
    "chunks_of_block",
    "rows_before",
    "splits_of_depth",
    "strips_of_block",
    "tiles_of_block",
    "wave_cost",
]

FUSED = Source(
    files("megatron_fluid.kernels.fused_gemm") / "kernel.cu",
    {
        "gather_forward": "FORWARD,false",
        "gather_backward": "BACKWARD,false",
        "scatter_forward": "FORWARD,true",
        "scatter_backward": "BACKWARD,true",
    },
)
MOST_RANKS, MOST_CHUNKS = 8, 64  # of fused_gemm/kernel.cu
DEPTH = 64  # of one step of K
_UNIT, _MOST_UNITS, _STRIP = 32, 8, 16
# Of a block: every strip is a chunk at least, and a tile has at least half of the most units.
MOST_ROWS = MOST_CHUNKS * _STRIP * _UNIT * _MOST_UNITS // 2
# Cost of a tile beyond its units of tokens, in units: mostly loading its weights.
# Measured: docs/tuning_notes.md#tensor-parallel
_OVERHEAD = 5.0
# K is cut into at most _MOST_SPLITS parts of at least _SPLIT_DEPTH; partial sums cost _SPLIT_COST,
# in units of tokens times K, an estimate.
_MOST_SPLITS, _SPLIT_DEPTH, _SPLIT_COST = 4, 2048, 11600.0
# An estimate of the rows that a copy engine brings while one wave of the largest tiles is
# multiplied; both times grow with K.
_ROWS_A_WAVE = 1700
_PARTIAL_BYTES, _MOST_PARTIALS = 64 * 256 * 4, 256 << 20  # of a warpgroup, of a launch
_WEIGHTS, _ROWS, _RECEIVED, _OUT = 0, 1, 4, 7  # in Maps


class _Call(ctypes.Structure):
    """Call of fused_gemm/kernel.cu."""

    _fields_ = (
        ("out", ctypes.c_uint64 * MOST_RANKS),
        *((name, ctypes.c_uint64) for name in ("counters", "flags", "landed", "bias", "partials")),
        *((name, ctypes.c_uint64) for name in ("arrivals", "errors", "abort", "timeout_ns")),
        *(
            (name, ctypes.c_int32)
            for name in ("value", "ranks", "rank", "operation", "rows", "width", "depth", "high")
        ),
        *((name, ctypes.c_int32) for name in ("chunks", "part", "splits", "span")),
    )


@dataclass(frozen=True)
class Signals:
    """The signals of a gather's shards.

    flags: address of this rank's words [W], by source. A word reaches `value` with the first `part`
    of K and grows by at least one with each further part. operation: names a wait that times out.
    """

    flags: int
    value: int
    operation: int
    part: int


@dataclass(frozen=True)
class Chunk:
    """Part of a block of C that is sent at once: rows [row, row + rows), columns [column, column +
    columns). Its tiles are stored in `parts` pieces, each counted under `number`."""

    number: int
    row: int
    rows: int
    column: int
    columns: int
    parts: int


def wave_cost(
    rows: int, width: int, ranks: int, clusters: int, high: int, splits: int = 1, depth: int = 0
) -> float:
    """The time of `ranks` blocks of `rows` cut into `high` tiles of tokens each, and each of these
    into `splits` along its `depth`, over that of whole waves of the largest tiles.

    >>> wave_cost(4096, 8192, 2, 64, 16)
    1.0
    """
    units, across = -(-rows // _UNIT), -(-width // 256)
    waves = -(-ranks * high * across * splits // clusters)
    whole = ranks * units * across / clusters * (1 + _OVERHEAD / _MOST_UNITS)
    sums = _SPLIT_COST / depth if splits > 1 else 0.0
    return waves * ((-(-units // high) + _OVERHEAD) / splits + sums) / whole


@functools.cache
def tiles_of_block(rows: int, width: int, ranks: int, clusters: int) -> int:
    """Return into how many tiles of tokens to cut a block of `rows`, so that whole waves of
    `clusters` take the least time.

    >>> tiles_of_block(4096, 14336, 2, 66)
    16
    """
    units = -(-rows // _UNIT)
    least = -(-units // _MOST_UNITS)
    return min(
        range(least, min(units, 2 * least) + 1),
        key=lambda high: wave_cost(rows, width, ranks, clusters, high),
    )


@functools.cache
def splits_of_depth(rows: int, width: int, depth: int, ranks: int, clusters: int) -> int:
    """Return into how many parts to cut K, so that whole waves of the pieces of `ranks` blocks take
    the least time.

    >>> splits_of_depth(256, 3072, 49152, 4, 66), splits_of_depth(2048, 7168, 8192, 4, 66)
    (4, 1)
    """
    high = tiles_of_block(rows, width, ranks, clusters)
    parts = 4 * ranks * high * -(-width // 256) * _PARTIAL_BYTES
    most = min(_MOST_SPLITS, depth // _SPLIT_DEPTH, _MOST_PARTIALS // parts)
    counts = range(1, max(most, 1) + 1)
    return min(counts, key=lambda n: wave_cost(rows, width, ranks, clusters, high, n, depth))


@functools.cache
def rows_before(rows: int, width: int, depth: int, ranks: int, clusters: int, step: int) -> int:
    """Estimate how many rows a copy engine brings before all tiles of `step` blocks are begun.

    All tiles are taken to have the largest height.

    >>> rows_before(2048, 7168, 8192, 4, 66, 1), rows_before(256, 3072, 49152, 4, 66, 1)
    (5100, 0)
    """
    splits = splits_of_depth(rows, width, depth, ranks, clusters)
    pieces = step * tiles_of_block(rows, width, ranks, clusters) * -(-width // 256) * splits
    return pieces // clusters * _ROWS_A_WAVE // splits


def strips_of_block(high: int) -> int:
    """Strips of token tiles of a block with `high` of them."""
    return -(-high // _STRIP)


@functools.cache
def chunks_of_block(rows: int, width: int, high: int, chunks: int) -> tuple[Chunk, ...]:
    """Return the chunks of a block of `high` tiles of tokens, in the order in which they finish:
    every strip of tiles in at most `chunks` parts of the columns.

    >>> [(c.row, c.rows, c.column, c.columns, c.parts) for c in chunks_of_block(256, 768, 2, 2)]
    [(0, 256, 0, 512, 16), (0, 256, 512, 256, 8)]
    """
    units, across = -(-rows // _UNIT), -(-width // 256)
    group = -(-across // chunks)

    def start(tile: int) -> int:
        return min(rows, (tile * (units // high) + min(tile, units % high)) * _UNIT)

    found = []
    for strip, first in enumerate(range(0, high, _STRIP)):
        last = min(high, first + _STRIP)
        for number, left in enumerate(range(0, across, group)):
            right = min(across, left + group)
            parts = 4 * (last - first) * (right - left)  # two warpgroups of two thread blocks
            columns = min(width, right * 256) - left * 256
            index, row = strip * chunks + number, start(first)
            found.append(Chunk(index, row, start(last) - row, left * 256, columns, parts))
    return tuple(found)


class FusedGemm:
    """The kernels for one dtype on the current device, for the ranks of a workspace.

    Not thread-safe: all ranks make the same calls in the same order.
    """

    def __init__(self, dtype: torch.dtype, workspace: Workspace) -> None:
        self._kernels = HopperKernels(FUSED, dtype)
        self._kernels.prepare()
        self._dtype = dtype
        self._programs = multiprocessors(torch.cuda.current_device())
        call = self._call = _Call()
        call.ranks, call.rank = workspace.world_size, workspace.rank
        errors = workspace.errors
        call.errors, call.abort = errors.words.data_ptr(), errors.abort.data_ptr()
        call.timeout_ns = workspace.timeout_ns
        most = _MOST_PARTIALS // _PARTIAL_BYTES // 2  # of at least two splits
        self._arrivals = workspace.flags(f"tp_fused_arrivals_{dtype}", counters=most).counter
        self._gather_maps = TensorMaps(_OUT + MOST_RANKS)
        self._scatter_maps: dict[tuple[int, ...], TensorMaps] = {}

    def high(self, rows: int, width: int) -> int:
        """Tiles of tokens of a block of `rows` of C."""
        return tiles_of_block(rows, width, self._call.ranks, self._programs // 2)

    def rows_before(self, rows: int, width: int, depth: int, step: int) -> int:
        """As the function of this name."""
        return rows_before(rows, width, depth, self._call.ranks, self._programs // 2, step)

    def gather(
        self,
        shard: Tensor,
        received: Tensor,
        b: Tensor,
        bias: Tensor | None,
        c: Tensor,
        signals: Signals,
    ) -> None:
        """C [W m, N] = (own shard [m, K] and the others' in `received` [W m, K]) @ b [K, N] + bias,
        on the current stream."""
        maps, call = self._gather_maps, self._call
        maps.fill(_RECEIVED, token_boxes(received))
        maps.fill(_OUT, in_boxes(c, 64))
        call.out[0] = c.data_ptr()
        call.bias = 0 if bias is None else bias.data_ptr()
        call.flags, call.value, call.operation = signals.flags, signals.value, signals.operation
        call.landed = received.data_ptr()
        call.part, call.chunks = signals.part, 1
        (m, depth), n = shard.shape, b.shape[1]
        call.splits = splits = splits_of_depth(m, n, depth, call.ranks, self._programs // 2)
        call.span = -(-depth // splits // DEPTH) * DEPTH
        partials = None
        if splits > 1:
            tiles = call.ranks * self.high(m, n) * -(-n // 256)
            partials = shard.new_empty(4 * tiles * splits * _PARTIAL_BYTES, dtype=torch.uint8)
            call.partials, call.arrivals = partials.data_ptr(), self._arrivals.data_ptr()
        self._launch("gather", maps, shard, b, m)

    def scatter(
        self, a: Tensor, b: Tensor, targets: Sequence[int], counters: Tensor, chunks: int
    ) -> None:
        """A [W m, K] @ b [K, N] on the current stream: block r of m rows to targets[r], an address
        of [m, N]. Tiles that are stored are added to `counters`, int32 [W, MOST_CHUNKS], as
        chunks_of_block says.
        """
        m, call = a.shape[0] // self._call.ranks, self._call
        maps = self._maps_of(tuple(targets), (m, b.shape[1]))
        call.out[: call.ranks] = targets
        call.bias = 0
        call.counters, call.chunks = counters.data_ptr(), chunks
        call.splits, call.span = 1, a.shape[1]
        self._launch("scatter", maps, a, b, m)

    def _maps_of(self, targets: tuple[int, ...], shape: tuple[int, int]) -> TensorMaps:
        """Return cached maps whose results go to `targets`: an allocator that serves the same sizes
        again and again gives few different ones."""
        key = (*targets, *shape)
        maps = self._scatter_maps.get(key)
        if maps is None:
            if len(self._scatter_maps) >= 64:
                self._scatter_maps.clear()
            maps = TensorMaps(_OUT + MOST_RANKS)
            strides = (shape[1], 1)
            for owner, address in enumerate(targets):
                maps.fill(_OUT + owner, (address, self._dtype, shape, strides, ((64, 64),)))
            self._scatter_maps[key] = maps
        return maps

    def _launch(self, kind: str, maps: TensorMaps, rows: Tensor, b: Tensor, m: int) -> None:
        call, n = self._call, b.shape[1]
        forward = b.stride(0) == 1
        maps.fill(_WEIGHTS, in_boxes(b.t(), 128) if forward else in_boxes(b, 64))
        maps.fill(_ROWS, token_boxes(rows))
        call.rows, call.width, call.depth = m, n, b.shape[0]
        call.high = self.high(m, n)
        programs = min(self._programs, 2 * call.ranks * call.high * call.splits * -(-n // 256))
        addresses = (maps.address, ctypes.addressof(call))
        self._kernels.start(f"{kind}_{'forward' if forward else 'backward'}", programs, addresses)
