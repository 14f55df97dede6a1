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

Flags hold the number of the call and only grow. Buffers have two halves: a peer that has signalled
call i + 1 has finished call i, and no rank starts call i + 2 before it has seen all signals of call
i + 1.

Shapes: as in `Backend`. bf16 and fp16; other operands are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import Driver
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.kernels.flagged_gemm import flagged_gemm_kernel
from megatron_fluid.tensor_parallel.backend import OverlappedBackend
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.double_buffer import SlotSum
from megatron_fluid.tensor_parallel.gemm import Gemm, Product

__all__ = ["TILES", "SignalWaitBackend", "Tile", "tile_unsupported_reason"]


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


def tile_unsupported_reason(a: Tensor, gemm: Product) -> str | None:
    """Why a kernel of 16-bit tiles cannot multiply these operands, or None."""
    assert isinstance(gemm, Gemm)
    dtype, strides = gemm.dtype_for(a), tuple(gemm.b.stride())
    if a.dtype not in (torch.bfloat16, torch.float16) or dtype != a.dtype:
        served = "bf16 and fp16 into their own dtype"
        return f"the kernel multiplies {served}, not {a.dtype} into {dtype}"
    if min(strides) != 1 or max(strides) % 8:
        allowed = "one dimension contiguous, the other's a multiple of 8"
        return f"B has strides {strides}, allowed: {allowed}"
    if gemm.k % 16 or gemm.n % 16:
        return f"K {gemm.k} and N {gemm.n} are not multiples of 16"
    if not a.shape[0]:
        # Its kernel would wait for no peer, and the next call could overwrite what a peer reads.
        return "A has no rows"
    if any(t is not None and t.data_ptr() % 16 for t in (a, gemm.b, gemm.bias)):
        return "A, B or the bias does not begin on a 16-byte boundary"
    return None


class SignalWaitBackend(OverlappedBackend):
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter by one waiting or signalling kernel, on one
    stream order.

    Args:
        copy_engine: gathers where there is no GEMM to wait in.
        programs: programs of the kernel that run at a time; None means all SMs but two.
        tile: of every GEMM; None means by its size.
    """

    name = "flagged"

    def __init__(
        self,
        workspace: Workspace,
        driver: Driver,
        copy_engine: CopyEngineBackend,
        programs: int | None = None,
        tile: Tile | None = None,
    ) -> None:
        super().__init__(workspace, driver, "tp_flagged")
        self.start_gather = copy_engine.start_gather
        if programs is None:
            device = torch.cuda.get_device_properties(workspace.device)
            programs = device.multi_processor_count - _SPARE_SMS
        self.programs = programs
        self.tiles = TILES if tile is None else (tile,)
        self._gather_flags = workspace.flags("tp_flagged_gather")
        self._scatter_flags = workspace.flags("tp_flagged_scatter", counters=self.ranks)
        self._sum = SlotSum(workspace, self._scatter_flags)
        # Finished tiles of each block, which this rank's kernel advances, and what every counter
        # reaches when all kernels so far are done.
        self._done = self._scatter_flags.counter
        self._blocks_done = 0
        self._gather_flags_of = self._gather_flags.addresses.tolist()
        self._scatter_flags_of = self._scatter_flags.addresses.tolist()
        self._gather_calls = self._scatter_calls = 0
        self._launches: dict[tuple, tuple[Launch, int]] = {}

    def unsupported_reason(self, a: Tensor, gemm: Product, m: int) -> str | None:
        return tile_unsupported_reason(a, gemm)

    def _multiply(
        self,
        gather: bool,
        own: Tensor,
        blocks: Any,
        gemm: Gemm,
        c: Tensor,
        c_own: Tensor,
        value: int,
        m: int,
    ) -> int:
        """Start the kernel on the current stream; returns the number of tiles of one block."""
        b, region = gemm.b_kn, self._gather_flags if gather else self._scatter_flags
        bias = gemm.bias if gather else None
        key = (gather, m, gemm.n, gemm.k, b.stride(), own.dtype, bias is not None)
        found = self._launches.get(key)
        if found is None:
            tile, tiles = self.tiles[-1], 0
            for tile in self.tiles:  # noqa: B007
                tiles = -(-m // tile.constants["BM"]) * -(-gemm.n // tile.constants["BN"])
                if self.ranks * tiles >= self.programs:
                    break
            constants: dict[str, object] = {
                "W": self.ranks, "GATHER": gather, "HAS_BIAS": bias is not None,
                "K": gemm.k, **tile.constants,
            }  # fmt: skip
            found = self._launches[key] = Launch(flagged_gemm_kernel, tile.warps, constants), tiles
        launch, tiles = found
        ws = self.workspace
        # bias: one that is not used is any tensor.
        launch(
            (min(self.programs, self.ranks * tiles), 1),
            (
                own, blocks, b, b if bias is None else bias, c, c_own, region.flags, self._done,
                ws.errors.words, ws.errors.abort, value, m, gemm.n, b.stride(0), b.stride(1),
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
        driver.record(self._entered, driver.current())
        driver.wait(self._entered, stream)
        for step in range(1, self.ranks):
            peer = (self.rank + step) % self.ranks
            driver.copy(received[peer] + self.rank * nbytes, shard.data_ptr(), nbytes, stream)
            flag = self._gather_flags_of[peer] + 4 * self.rank
            driver.write(flag, self._gather_calls, stream)

    def gather_matmul(
        self, a_shard: Tensor, gemm: Product, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(gemm, Gemm)
        self.check(a_shard, gemm, self.ranks * a_shard.shape[0])
        shard = a_shard.contiguous()
        self._push(shard)
        return self._gather_matmul(shard, gemm, keep, lend)

    def _gather_matmul(
        self, shard: Tensor, gemm: Gemm, keep: bool, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        m, k = shard.shape
        received = self._gathers.own_half((self.ranks, m, k), shard.dtype)
        try:
            c = shard.new_empty((self.ranks * m, gemm.n))
            self._multiply(True, shard, received, gemm, c, c, self._gather_calls, m)
            gathered = None
            if keep:
                # The kernel has seen every flag, so all peers' shards are there. The half itself
                # belongs to later calls.
                gathered = received if lend else received.clone()
                gathered[self.rank].copy_(shard)
        finally:
            self._join()  # the pushes still read the shard
        return c, None if gathered is None else gathered.view(-1, k)

    # ---- GEMM-ReduceScatter
    def matmul_scatter(
        self, a: Tensor, gemm: Product, overlapped: Callable[[], None] | None = None
    ) -> Tensor:
        assert isinstance(gemm, Gemm)
        self.check(a, gemm, a.shape[0])
        a = a.contiguous()
        slots, sent = self._matmul_blocks(a, gemm)
        try:
            self._send(sent)
            if overlapped is not None:
                overlapped()
            return self._add(slots, gemm.bias)
        finally:
            self._join()  # the copies still read what was sent

    def _matmul_blocks(self, a: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Start the kernel; returns the slots ``[W, M / W, N]`` of the receive buffer, whose own
        one the kernel fills, and the other blocks of C, by rank."""
        rows, number = a.shape[0] // self.ranks, self._scatter_calls + 1
        self._received = self._scatters.next(self.ranks * rows * gemm.n * a.dtype.itemsize)
        self._scatter_calls = number
        slots = self._scatters.own_half((self.ranks, rows, gemm.n), a.dtype)
        c = a.new_empty((self.ranks, rows, gemm.n))
        tiles = self._multiply(False, a, a, gemm, c, slots[self.rank], number, rows)
        self._blocks_done += tiles
        return slots, c

    def _send(self, c: Tensor) -> None:
        """Send each block and a flag behind it to its owner, as soon as the kernel has finished
        it."""
        driver, stream, nbytes = self._driver, self._copies.cuda_stream, c.nbytes // self.ranks
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            driver.wait_value(self._done.data_ptr() + 4 * owner, self._blocks_done, stream)
            target = self._received[owner] + self.rank * nbytes
            driver.copy(target, c.data_ptr() + owner * nbytes, nbytes, stream)
            flag = self._scatter_flags_of[owner] + 4 * self.rank
            driver.write(flag, self._scatter_calls, stream)

    def _add(self, slots: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of all ranks' slots, once they are there."""
        return self._sum(slots, self._scatter_calls, bias)
