"""The overlapped tensor-parallel forms with all ranks in one process.

The driver, the symmetric memory and the kernels are simulated; each phase of an operation runs for
every rank in turn. Races are for tests/gpu/test_tensor_parallel.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.kernels.fused_gemm.launch import Signals, chunks_of_block, tiles_of_block
from megatron_fluid.tensor_parallel import fused
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.fused import FusedBackend
from tests.support.simulated_driver import SimulatedDriver
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["copy_engine_forms", "fused_forms", "gather_all", "scatter_all"]


class _InOrder(CopyEngineBackend):
    """Its barrier is the order in which the test runs the ranks' phases."""

    def _barrier(self, operation: str, address: int, nbytes: int) -> None:
        pass


def copy_engine_forms(ranks: int) -> list[CopyEngineBackend]:
    world = SimulatedWorkspace(ranks)
    return [_InOrder(world.rank(r), SimulatedDriver()) for r in range(ranks)]


class _FusedOnCpu:
    """What the kernels of FusedGemm do, on a CPU; the tiles that are counted are the kernels'
    own."""

    def __init__(self, dtype: torch.dtype, workspace: Any) -> None:
        self.rank, self.ranks = workspace.rank, workspace.world_size
        self.reached = 0  # by the flags of gathers so far

    def high(self, rows: int, width: int) -> int:
        # Of 20 tiles, two strips; so small a block would have one.
        return 20 if rows > 320 else tiles_of_block(rows, width, self.ranks, 66)

    def rows_before(self, rows: int, width: int, depth: int, step: int) -> int:
        return step * rows - step % 2  # the shards of odd steps come in chunks, others whole

    def gather(
        self,
        shard: Tensor,
        landed: Tensor,
        b: Tensor,
        bias: Tensor | None,
        c: Tensor,
        signals: Signals,
    ) -> None:
        m, depth = shard.shape
        words = (ctypes.c_int32 * self.ranks).from_address(signals.flags)
        chunks = -(-depth // signals.part)
        assert signals.value > self.reached, "the flags of an earlier call would do"
        self.reached = signals.value + chunks - 1
        assert all(words[r] == self.reached for r in range(self.ranks) if r != self.rank)
        whole = landed.clone()
        whole[self.rank * m : (self.rank + 1) * m] = shard
        c.copy_(whole.float() @ b.float() + (0.0 if bias is None else bias.float()))

    def scatter(
        self, a: Tensor, b: Tensor, places: list[int], counters: Tensor, chunks: int
    ) -> None:
        for owner, (part, place) in enumerate(zip(a.chunk(self.ranks), places, strict=True)):
            block = (part.float() @ b.float()).to(a.dtype)
            ctypes.memmove(place, block.data_ptr(), block.nbytes)
            for chunk in chunks_of_block(*block.shape, self.high(*block.shape), chunks):
                counters[owner, chunk.number] += chunk.parts


def fused_forms(ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[FusedBackend]:
    """In as many chunks as may be."""
    monkeypatch.setattr(fused, "FusedGemm", _FusedOnCpu)
    monkeypatch.setattr(fused, "_GATHER_BYTES", 1)
    monkeypatch.setattr(fused, "_SCATTER_BYTES", 1)
    world = SimulatedWorkspace(ranks)
    return [FusedBackend(world.rank(r), SimulatedDriver()) for r in range(ranks)]


def gather_all(
    backends: list[Any], shards: list[Tensor], gemms: list[Any], keep: bool
) -> list[Any]:
    if isinstance(backends[0], FusedBackend):
        pushed = [b._push(s, g) for b, s, g in zip(backends, shards, gemms, strict=True)]
        return [
            b._gather_matmul(s, p, g, keep)
            for b, s, p, g in zip(backends, shards, pushed, gemms, strict=True)
        ]
    staged = [b._announce(s) for b, s in zip(backends, shards, strict=True)]
    return [
        b._gather_matmul(s, t, g, keep)
        for b, s, t, g in zip(backends, shards, staged, gemms, strict=True)
    ]


def scatter_all(backends: list[Any], a: list[Tensor], gemms: list[Any]) -> list[Tensor]:
    made = [b._matmul_blocks(x, g) for b, x, g in zip(backends, a, gemms, strict=True)]
    if isinstance(backends[0], CopyEngineBackend):
        return [b._add(*m, g, None) for b, m, g in zip(backends, made, gemms, strict=True)]
    for backend, (_, blocks) in zip(backends, made, strict=True):
        backend._send(blocks)
    return [b._add(slots, g.bias) for b, (slots, _), g in zip(backends, made, gemms, strict=True)]
