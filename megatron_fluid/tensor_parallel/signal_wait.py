"""The signal-wait form, backend "flagged": ranks push their shards by copy engine, and one GEMM
kernel waits for each shard, or signals each finished block.

A call is one kernel and W - 1 copies, each followed by a flag that the copy's stream writes into
the peer's memory. There is no barrier and no GEMM per shard, so a call costs the host little, which
decides small and middle sizes. The kernel is Triton's and slower than cuBLAS on large ones, which
the copy-engine form takes.

AllGather-GEMM: each rank pushes its shard to the next rank first. GEMM-ReduceScatter: a stream
waits for the counter of a finished block, which this rank's own kernel advances without waiting for
anybody, and pushes the block into its owner's slot. Then a one-program kernel waits for the peers'
flags, bounded, and the slots are added in fp32 in rank order.

Shapes: as in `Backend`. bf16 and fp16; other operands are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import Driver
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.kernels.flagged_gemm import flagged_gemm_kernel
from megatron_fluid.tensor_parallel.backend import SignallingBackend
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["TILES", "SignalWaitBackend", "Tile"]


@dataclass(frozen=True)
class Tile:
    """Sizes of one program's tile."""

    constants: dict[str, int]
    warps: int


# The larger first: it is taken where it gives every program a tile.
TILES = (
    Tile({"BM": 128, "BN": 256, "BK": 64, "GROUP": 8, "STAGES": 4}, 8),
    Tile({"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "STAGES": 4}, 4),
)
_SPARE_SMS = 2  # a kernel that spins never takes the whole device


class SignalWaitBackend(SignallingBackend):
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter by one waiting or signalling kernel, on one
    stream order.

    Args:
        copy_engine: gathers where there is no GEMM to wait in.
        programs: programs of the kernel that run at a time; None means all SMs but two.
        tiles: to choose from, larger ones first.
    """

    name = "flagged"

    def __init__(
        self,
        workspace: Workspace,
        driver: Driver,
        copy_engine: CopyEngineBackend,
        programs: int | None = None,
        tiles: Sequence[Tile] = TILES,
    ) -> None:
        super().__init__(workspace, driver, "tp_flagged", counters=workspace.world_size)
        self.start_gather = copy_engine.start_gather
        if programs is None:
            device = torch.cuda.get_device_properties(workspace.device)
            programs = device.multi_processor_count - _SPARE_SMS
        self.programs, self.tiles = programs, tiles
        # Finished tiles of each block, which this rank's kernel advances, and what every counter
        # reaches when all kernels so far are done.
        self._done = self._scatter_flags.counter
        self._blocks_done = 0
        self._gather_calls = 0
        self._received: list[int] = []  # receive buffers of the current scatter
        self._launch_of = functools.cache(self._make_launch)

    def _make_launch(
        self, gather: bool, m: int, n: int, k: int, has_bias: bool, *specialised: object
    ) -> tuple[Launch, int]:
        """The kernel's launch for products of m x n x k in a block, and the tiles of a block.
        ``specialised``: what else Triton compiles for (dtype, strides of B)."""
        tile, tiles = self.tiles[-1], 0
        for tile in self.tiles:  # noqa: B007
            tiles = -(-m // tile.constants["BM"]) * -(-n // tile.constants["BN"])
            if self.ranks * tiles >= self.programs:
                break
        constants = {"W": self.ranks, "GATHER": gather, "HAS_BIAS": has_bias, "K": k}
        return Launch(flagged_gemm_kernel, tile.warps, constants | tile.constants), tiles

    def _multiply(
        self, gather: bool, own: Tensor, blocks: Tensor, gemm: Gemm, c: Tensor, c_own: Tensor,
        value: int, m: int,
    ) -> int:  # fmt: skip
        """Start the kernel on the current stream; returns the number of tiles of one block."""
        b, region = gemm.b_kn, self._gather_flags if gather else self._scatter_flags
        bias, strides, ws = gemm.bias if gather else None, b.stride(), self.workspace
        shape = m, gemm.n, gemm.k
        launch, tiles = self._launch_of(gather, *shape, bias is not None, own.dtype, strides)
        # bias: one that is not used is any tensor.
        launch(
            (min(self.programs, self.ranks * tiles), 1),
            (
                own, blocks, b, b if bias is None else bias, c, c_own, region.flags, self._done,
                ws.errors.words, ws.errors.abort, value, m, gemm.n, *strides,
                self.rank, region.operation, ws.timeout_ns,
            ),
        )  # fmt: skip
        return tiles

    # ---- AllGather-GEMM
    def _push(self, shard: Tensor) -> None:
        """Send the own shard and a flag behind it to every rank, the next one first."""
        driver, stream, nbytes = self._driver, self._copies.cuda_stream, shard.nbytes
        received = self._gathers.next(self.ranks * nbytes)
        self._gather_calls += 1
        self._enter(stream)
        for step in range(1, self.ranks):
            peer = (self.rank + step) % self.ranks
            driver.copy(received[peer] + self.rank * nbytes, shard.data_ptr(), nbytes, stream)
            flag = self._gather_flags_of[peer] + 4 * self.rank
            driver.write(flag, self._gather_calls, stream)

    def gather_matmul(
        self, a_shard: Tensor, gemm: Gemm, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        self.check(a_shard, gemm, self.ranks * a_shard.shape[0])
        shard = a_shard.contiguous()
        self._push(shard)
        return self._gather_matmul(shard, gemm, keep, lend)

    def _gather_matmul(
        self, shard: Tensor, gemm: Gemm, keep: bool, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        m, k = shard.shape
        received = self._gathers.own((self.ranks, m, k), shard.dtype)
        try:
            c = shard.new_empty((self.ranks * m, gemm.n))
            self._multiply(True, shard, received, gemm, c, c, self._gather_calls, m)
            gathered = None
            if keep:
                # The kernel has seen every flag, so all peers' shards are there. The buffer itself
                # belongs to later calls.
                gathered = received if lend else received.clone()
                gathered[self.rank].copy_(shard)
        finally:
            self._join()  # the pushes still read the shard
        return c, None if gathered is None else gathered.view(-1, k)

    # ---- GEMM-ReduceScatter
    def _matmul_blocks(self, a: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        rows, number = a.shape[0] // self.ranks, self._scatter_calls + 1
        self._received = self._scatters.next(self.ranks * rows * gemm.n * a.dtype.itemsize)
        self._scatter_calls = number
        slots = self._scatters.own((self.ranks, rows, gemm.n), a.dtype)
        blocks = a.new_empty((self.ranks, rows, gemm.n))
        tiles = self._multiply(False, a, a, gemm, blocks, slots[self.rank], number, rows)
        self._blocks_done += tiles
        return slots, blocks

    def _send(self, blocks: Tensor) -> None:
        driver, stream, nbytes = self._driver, self._copies.cuda_stream, blocks.nbytes // self.ranks
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            driver.wait_value(self._done.data_ptr() + 4 * owner, self._blocks_done, stream)
            target = self._received[owner] + self.rank * nbytes
            driver.copy(target, blocks.data_ptr() + owner * nbytes, nbytes, stream)
            flag = self._scatter_flags_of[owner] + 4 * self.rank
            driver.write(flag, self._scatter_calls, stream)
