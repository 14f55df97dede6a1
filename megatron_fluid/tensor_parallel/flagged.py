"""The second overlapped form: ranks push their shards by copy engine, and one GEMM kernel waits for
each, or tells when a block can go.

A call is one kernel and W - 1 copies, each followed by a flag that the copy's stream writes into
the peer's memory: there is no barrier, no GEMM per shard and hardly any time on the host, which is
what small and middle sizes need. The kernel is Triton's, on tiles without the last percents of
cuBLAS, so the copy-engine form keeps the large ones.

AllGather-GEMM: each rank pushes its shard to the next rank first. GEMM-ReduceScatter: a stream
waits for the counter of a finished block (advanced by this rank's own kernel, which waits for
nobody) and pushes it into its owner's landing slot; a one-program kernel waits for the peers'
flags, bounded, and then the slots are added in fp32 in rank order.

Flags hold the number of the call and only grow. Buffers have two halves: a peer that has signalled
call i + 1 has finished call i, and no rank starts call i + 2 before it has seen all signals of call
i + 1. The number is known to the host, so a call cannot be captured into a CUDA graph.

Shapes: as in `CopyEngineBackend`. bf16 and fp16; other operands are refused.
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
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.flagged_gemm import flagged_gemm_kernel
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.gemm import Gemm, Product
from megatron_fluid.tensor_parallel.halves import PeerHalves, SlotSum, refuse_capture

__all__ = ["TILES", "FlaggedBackend", "Tile", "why_not_16_bit"]


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


def why_not_16_bit(a: Tensor, gemm: Gemm) -> str | None:
    """Why a kernel of 16-bit tiles cannot multiply these operands, or None."""
    if a.dtype not in (torch.bfloat16, torch.float16) or gemm.dtype_for(a) != a.dtype:
        return f"the kernel multiplies bf16 and fp16 into their own dtype, not {a.dtype} into {gemm.dtype_for(a)}"
    if min(gemm.b.stride()) != 1 or max(gemm.b.stride()) % 8:
        return f"B has strides {tuple(gemm.b.stride())}, allowed: one dimension contiguous, the other's a multiple of 8"
    if gemm.k % 16 or gemm.n % 16:
        return f"K {gemm.k} and N {gemm.n} are not multiples of 16"
    if not a.shape[0]:
        # whose kernel would wait for no peer, and so not know when peers are done with a half
        return "A has no rows"
    if any(t is not None and t.data_ptr() % 16 for t in (a, gemm.b, gemm.bias)):
        return "A, B or the bias does not begin on a 16-byte boundary"
    return None


class FlaggedBackend:
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter by one waiting or signalling kernel, on one
    stream order.

    Args:
        workspace: symmetric memory of the tensor-parallel group.
        driver: of this rank's device.
        copy_engine: gathers where there is no GEMM to wait in.
        programs: how many programs of the kernel run at a time; default: all SMs but two.
        tile: of every GEMM; default: by its size.
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
        self.start_gather = copy_engine.start_gather
        self.workspace = workspace
        self.rank = workspace.rank
        self.ranks = workspace.world_size
        if programs is None:
            programs = (
                torch.cuda.get_device_properties(workspace.device).multi_processor_count
                - _SPARE_SMS
            )
        self.programs = programs
        self.tiles = TILES if tile is None else (tile,)
        self._driver = driver
        self._copies = driver.stream(high_priority=True)
        self._entered, self._moved = driver.event(), driver.event()
        self._gathers = PeerHalves(workspace, "tp_flagged_gather")
        self._scatters = PeerHalves(workspace, "tp_flagged_scatter")
        self._gather_flags = workspace.flags("tp_flagged_gather")
        self._scatter_flags = workspace.flags("tp_flagged_scatter", counters=self.ranks)
        self._sum = SlotSum(workspace, self._scatter_flags)
        self._done = (
            self._scatter_flags.counter
        )  # finished tiles of each block, advanced by this rank's kernel
        self._peer_flags = {
            region.name: region.addresses.tolist()
            for region in (self._gather_flags, self._scatter_flags)
        }
        self._calls = {"gather": 0, "scatter": 0}
        self._blocks_done = (
            0  # what every word of `_done` holds once all kernels so far are through
        )
        self._launches: dict[tuple, tuple[Launch, int]] = {}

    # ---- shared parts
    # --------------------------------------------------------------------------------------------------------
    def why_not(self, a: Tensor, gemm: Gemm) -> str | None:
        """Why these operands cannot be served, or None."""
        return why_not_16_bit(a, gemm)

    def serves(self, a: Tensor, gemm: Gemm) -> bool:
        """Whether these operands can be served."""
        return self.why_not(a, gemm) is None

    def check(self, a: Tensor, gemm: Gemm) -> None:
        """Raise ConfigError where the operands cannot be served, FluidError in a CUDA-graph
        capture."""
        reason = self.why_not(a, gemm)
        if reason is not None:
            raise ConfigError(
                "backend: found 'flagged', allowed here: auto, copy_engine, collective, because "
                f"{reason}"
            )
        refuse_capture(self.name, self._driver.capturing())

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
        """Start the kernel on the current stream; gives the number of tiles of one block."""
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
        launch(
            (min(self.programs, self.ranks * tiles), 1),
            (
                own,
                blocks,
                b,
                b if bias is None else bias,
                c,
                c_own,
                region.flags,
                self._done,
                ws.errors.words,
                ws.errors.abort,
                value,
                m,
                gemm.n,
                b.stride(0),
                b.stride(1),
                self.rank,
                region.operation,
                ws.timeout_ns,
            ),
        )
        return tiles

    def _join(self) -> None:
        self._driver.record(self._moved, self._copies.cuda_stream)
        self._driver.wait(self._moved, self._driver.current())

    # ---- AllGather-GEMM
    # ------------------------------------------------------------------------------------------------------
    def _push(self, shard: Tensor) -> None:
        """Send the own shard and a flag behind it to every rank, the next one first."""
        driver, stream = self._driver, self._copies.cuda_stream
        landing = self._gathers.next(self.ranks * shard.nbytes)
        self._calls["gather"] += 1
        flags = self._peer_flags[self._gather_flags.name]
        driver.record(self._entered, driver.current())
        driver.wait(self._entered, stream)
        for step in range(1, self.ranks):
            peer = (self.rank + step) % self.ranks
            driver.copy(
                landing[peer] + self.rank * shard.nbytes, shard.data_ptr(), shard.nbytes, stream
            )
            driver.write(flags[peer] + 4 * self.rank, self._calls["gather"], stream)

    def gather_matmul(
        self, a_shard: Tensor, gemm: Product, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """C ``[W m, N]`` of all shards' rows, and with ``keep`` the gathered A ``[W m, K]``, with
        ``lend`` in the landing half."""
        assert isinstance(gemm, Gemm)
        self.check(a_shard, gemm)
        shard = a_shard.contiguous()
        self._push(shard)
        return self._gather_matmul(shard, gemm, keep, lend)

    def _gather_matmul(
        self, shard: Tensor, gemm: Gemm, keep: bool, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        m, k = shard.shape
        landing = self._gathers.mine((self.ranks, m, k), shard.dtype)
        try:
            c = shard.new_empty((self.ranks * m, gemm.n))
            self._multiply(True, shard, landing, gemm, c, c, self._calls["gather"], m)
            gathered = None
            if keep:
                # The kernel has seen every flag, so all others' shards are there; the half itself
                # is the next calls'.
                gathered = landing if lend else landing.clone()
                gathered[self.rank].copy_(shard)
        finally:
            self._join()  # the pushes still read the shard
        return c, None if gathered is None else gathered.view(-1, k)

    # ---- GEMM-ReduceScatter
    # --------------------------------------------------------------------------------------------------
    def matmul_scatter(
        self, a: Tensor, gemm: Product, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's rows ``[M / W, N]`` of the sum over ranks of A B; ``beside`` is enqueued
        before the last wait."""
        assert isinstance(gemm, Gemm)
        self.check(a, gemm)
        a = a.contiguous()
        slots, sent = self._matmul_blocks(a, gemm)
        try:
            self._send(sent)
            if beside is not None:
                beside()
            return self._add(slots, gemm.bias)
        finally:
            self._join()  # the copies still read what was sent

    def _matmul_blocks(self, a: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Start the kernel; gives the landing slots ``[W, M / W, N]``, the own one filled by it,
        and the other blocks of C, by rank."""
        rows = a.shape[0] // self.ranks
        self._landing = self._scatters.next(self.ranks * rows * gemm.n * a.dtype.itemsize)
        self._calls["scatter"] += 1
        slots = self._scatters.mine((self.ranks, rows, gemm.n), a.dtype)
        c = a.new_empty((self.ranks, rows, gemm.n))
        self._blocks_done += self._multiply(
            False, a, a, gemm, c, slots[self.rank], self._calls["scatter"], rows
        )
        return slots, c

    def _send(self, c: Tensor) -> None:
        """Send each block and a flag behind it to its owner, as soon as the kernel has finished
        it."""
        driver, stream = self._driver, self._copies.cuda_stream
        flags = self._peer_flags[self._scatter_flags.name]
        nbytes = c.nbytes // self.ranks
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            driver.wait_value(self._done.data_ptr() + 4 * owner, self._blocks_done, stream)
            driver.copy(
                self._landing[owner] + self.rank * nbytes,
                c.data_ptr() + owner * nbytes,
                nbytes,
                stream,
            )
            driver.write(flags[owner] + 4 * self.rank, self._calls["scatter"], stream)

    def _add(self, slots: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of all ranks' slots, once they are there."""
        return self._sum(slots, self._calls["scatter"], bias)
