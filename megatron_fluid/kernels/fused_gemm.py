"""Starts the kernels of fused_gemm_sm90.cu: AllGather-GEMM and GEMM-ReduceScatter in one launch each, on Hopper GPUs.

Shapes: W ranks, m rows of a block, N columns of C, K the contracted dimension. bf16 and fp16, products summed in fp32. Where
peers' data lies and how it is signalled is the caller's (megatron_fluid.tensor_parallel.fused).

Oracle: ``torch.cat(blocks).double() @ b.double()`` (tests/gpu/test_tensor_parallel.py); how tiles are dealt out is tested on
the host (tests/unit/test_fused_gemm_tiles.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import Workspace
from megatron_fluid.kernels.hopper import FUSED, HopperKernels, TensorMaps, multiprocessors

__all__ = ["MOST_RANKS", "FusedGemm", "Signals", "tiles_of_block", "wave_cost"]

MOST_RANKS = 8  # of fused_gemm_sm90.cu
_UNIT, _MOST_UNITS = 32, 8
# What a tile costs beyond its units of tokens, in units, measured: mostly its weights' way into the SM.
_OVERHEAD = 5.0
_WEIGHTS, _ROWS, _LANDED, _OUT = 0, 1, 2, 3  # in Maps


class _Call(ctypes.Structure):
    """As Call in the source."""

    _fields_ = (
        *((name, ctypes.c_uint64 * MOST_RANKS) for name in ("out", "flags_of")),
        *((name, ctypes.c_uint64) for name in ("flags", "slots", "bias", "errors", "abort", "timeout_ns")),
        *((name, ctypes.c_int32) for name in ("value", "ranks", "rank", "operation", "rows", "width", "depth", "high", "words")),
    )  # fmt: skip


@dataclass(frozen=True)
class Signals:
    """How ranks tell each other in one call: `flags` is the address of this rank's words, `value` what they reach, `operation`
    the number under which a timed-out wait is reported; scatter: `words` of each source, `flags_of` every owner's words for this rank.
    """

    flags: int
    value: int
    operation: int
    words: int = 0
    flags_of: Sequence[int] = ()


def wave_cost(rows: int, width: int, ranks: int, clusters: int, high: int) -> float:
    """The time of `ranks` blocks of `rows` cut into `high` tiles of tokens each, over that of whole waves of the largest tiles.

    >>> wave_cost(4096, 8192, 2, 64, 16)
    1.0
    """
    units, across = -(-rows // _UNIT), -(-width // 256)
    waves = -(-ranks * high * across // clusters)
    whole = ranks * units * across / clusters * (1 + _OVERHEAD / _MOST_UNITS)
    return waves * (-(-units // high) + _OVERHEAD) / whole


@functools.cache
def tiles_of_block(rows: int, width: int, ranks: int, clusters: int) -> int:
    """Into how many tiles of tokens a block of `rows` is cut, so that whole waves of `clusters` take the least time.

    >>> tiles_of_block(4096, 14336, 2, 66)
    16
    """
    units = -(-rows // _UNIT)
    least = -(-units // _MOST_UNITS)
    return min(range(least, min(units, 2 * least) + 1), key=lambda high: wave_cost(rows, width, ranks, clusters, high))


class FusedGemm:
    """The kernels for one dtype on the current device, for the ranks of a workspace."""

    def __init__(self, dtype: torch.dtype, workspace: Workspace) -> None:
        self._kernels = HopperKernels(FUSED, dtype)
        self._dtype = dtype
        self._programs = multiprocessors(torch.cuda.current_device())
        self._call, self._counter = _Call(), ctypes.c_int()
        call = self._call
        call.ranks, call.rank = workspace.world_size, workspace.rank
        call.errors, call.abort = workspace.errors.words.data_ptr(), workspace.errors.abort.data_ptr()
        call.timeout_ns = workspace.timeout_ns
        self._gather_maps = TensorMaps(_OUT + MOST_RANKS)
        self._scatter_maps: dict[tuple[int, ...], TensorMaps] = {}

    def tiles(self, rows: int, width: int) -> int:
        """Tiles of a block of `rows` of C."""
        return tiles_of_block(rows, width, self._call.ranks, self._programs // 2) * -(-width // 256)

    def cost(self, rows: int, width: int) -> float:
        """As wave_cost, of the tiles that blocks of `rows` are cut into."""
        ranks, clusters = self._call.ranks, self._programs // 2
        return wave_cost(rows, width, ranks, clusters, tiles_of_block(rows, width, ranks, clusters))

    def gather(
        self, shard: Tensor, landed: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, signals: Signals
    ) -> None:
        """C [W m, N] = (own shard [m, K] and the others' in `landed` [W m, K]) @ b [K, N] + bias, on the current stream."""
        maps = self._gather_maps
        maps.fill(_LANDED, landed, 32)
        maps.fill(_OUT, c, 64)
        self._call.out[0] = c.data_ptr()
        self._launch("gather", maps, shard, b, bias, shard.shape[0], signals)

    def scatter(
        self, a: Tensor, b: Tensor, bias: Tensor | None, landing: Sequence[int], result: Tensor, signals: Signals
    ) -> None:
        """This rank's rows [m, N] of the sum over ranks of A [W m, K] @ b [K, N], plus bias, into `result`, on the current
        stream. landing: the address of every rank's slots [W, m, N].
        """
        call = self._call
        m, n = result.shape
        places = [address + call.rank * result.nbytes for address in landing]
        maps = self._maps_of(tuple(places), (m, n))
        call.out[: call.ranks] = places
        call.out[call.rank] = result.data_ptr()
        call.flags_of[: call.ranks] = signals.flags_of
        call.slots = landing[call.rank]
        self._launch("scatter", maps, a, b, bias, m, signals)

    def _maps_of(self, places: tuple[int, ...], shape: tuple[int, int]) -> TensorMaps:
        """Maps whose results go to `places`, which a model has few of."""
        key = (*places, *shape)
        maps = self._scatter_maps.get(key)
        if maps is None:
            if len(self._scatter_maps) >= 64:
                self._scatter_maps.clear()
            maps = self._scatter_maps[key] = TensorMaps(_OUT + MOST_RANKS)
            for owner, place in enumerate(places):
                maps.fill_at(_OUT + owner, place, shape, self._dtype, 64)
        return maps

    def _launch(
        self, kind: str, maps: TensorMaps, rows: Tensor, b: Tensor, bias: Tensor | None, m: int, signals: Signals
    ) -> None:
        call, n = self._call, b.shape[1]
        forward = b.stride(0) == 1
        maps.fill(_WEIGHTS, b.t() if forward else b, 128 if forward else 64)
        maps.fill(_ROWS, rows, 32)
        call.rows, call.width, call.depth = m, n, b.shape[0]
        call.high = tiles_of_block(m, n, call.ranks, self._programs // 2)
        call.bias = 0 if bias is None else bias.data_ptr()
        call.flags, call.value, call.operation, call.words = (
            signals.flags,
            signals.value,
            signals.operation,
            signals.words,
        )
        programs = min(self._programs, 2 * call.ranks * call.high * -(-n // 256))
        addresses = (maps.address, ctypes.addressof(call))
        self._kernels.start(f"{kind}_{'forward' if forward else 'backward'}", programs, addresses, self._counter)
