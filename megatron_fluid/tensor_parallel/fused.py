"""The form for Hopper GPUs: one GEMM that waits for pushed shards chunk by chunk, or whose tiles
copy engines send while it goes on.

AllGather-GEMM: copy engines push this rank's shard to every rank, whole or in chunks of K with a
flag behind each, while the kernel multiplies the own rows and then what has come.
GEMM-ReduceScatter: the kernel counts the tiles that it has stored of the other ranks' blocks, and
copy engines wait for the counts and bring chunk by chunk into its owner's landing slot; the own
block comes last and goes nowhere. A flag follows each rank's last chunk; then a kernel adds the W
slots in fp32 in rank order. No barrier, no GEMM per shard.

A gather without a GEMM to wait in is pushes and one waiting program. What is gathered can be lent,
in the landing half: to work on the stream of the calls, enqueued before the next gather.

Flags hold the number of the call and only grow. Buffers have two halves: a peer that has signalled
call i + 1 has finished call i and read what it was lent there, and no rank starts call i + 2 before
it has seen all signals of call i + 1. The number is known to the host, so a call cannot be captured
into a CUDA graph.

Shapes: as in `CopyEngineBackend`. bf16 and fp16; other operands are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import Driver
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fused_gemm import (
    DEPTH,
    MOST_CHUNKS,
    MOST_RANKS,
    MOST_ROWS,
    Chunk,
    FusedGemm,
    Signals,
    chunks_of_block,
    strips_of_block,
)
from megatron_fluid.tensor_parallel.flagged import why_not_16_bit
from megatron_fluid.tensor_parallel.gemm import Gemm, Product
from megatron_fluid.tensor_parallel.halves import PeerHalves, PeerWait, SlotSum, refuse_capture

__all__ = ["FusedBackend"]

_MOST_COST = 1.25  # of waves that are not whole
# A chunk: small enough that little is left to wait for or to send, large enough that a copy
# engine's start is lost in it.
_GATHER_BYTES, _SCATTER_BYTES, _CHUNKS = 8 << 20, 16 << 20, 8


class FusedBackend:
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter by kernels for Hopper, on one stream order.

    Args:
        workspace: symmetric memory of the tensor-parallel group, of at most 8 ranks.
        driver: of this rank's device, of compute capability 9.0.
    """

    name = "fused"

    def __init__(self, workspace: Workspace, driver: Driver) -> None:
        if workspace.world_size > MOST_RANKS:
            raise ConfigError.of(
                "ranks of the fused form", workspace.world_size, f"at most {MOST_RANKS}"
            )
        self.workspace = workspace
        self.rank = workspace.rank
        self.ranks = workspace.world_size
        self._driver = driver
        self._copies = driver.stream(high_priority=True)
        self._entered, self._moved, self._pushed = (driver.event() for _ in range(3))
        self._gathers = PeerHalves(workspace, "tp_fused_gather")
        self._scatters = PeerHalves(workspace, "tp_fused_scatter")
        self._gather_flags = workspace.flags("tp_fused_gather")
        self._scatter_flags = workspace.flags("tp_fused_scatter", counters=self.ranks * MOST_CHUNKS)
        self._gather_flags_of = self._gather_flags.addresses.tolist()
        self._scatter_flags_of = self._scatter_flags.addresses.tolist()
        self._wait = PeerWait(workspace, self._gather_flags)
        self._sum = SlotSum(workspace, self._scatter_flags)
        self._counters = self._scatter_flags.counter.view(self.ranks, MOST_CHUNKS)
        self._counted = [
            0
        ] * MOST_CHUNKS  # what those of each owner reach once all kernels so far are through
        self._chunks_sent = self._calls = 0  # of gathers, of scatters
        self._awaited: int | None = None  # what a gather that was only started waits for
        self._kernels: dict[torch.dtype, FusedGemm] = {}

    def why_not(self, a: Tensor, gemm: Gemm, m: int) -> str | None:
        """Why these operands, of a whole GEMM of `m` rows, cannot be served, or None."""
        if m > MOST_ROWS * self.ranks:
            return f"A has {m} rows in all, more than {MOST_ROWS} a rank"
        return why_not_16_bit(a, gemm)

    def serves(self, a: Tensor, gemm: Gemm, m: int) -> bool:
        """Whether these operands can be served."""
        return self.why_not(a, gemm, m) is None

    def fills_waves(self, a: Tensor, gemm: Gemm, m: int, operation: str) -> bool:
        """Whether the tiles of a whole GEMM of `m` rows keep the SMs busy; where those of a scatter
        do not, cuBLAS splits the sums."""
        return (
            self._gemm(a.dtype).cost(
                m // self.ranks, gemm.n, gemm.k if operation == "gather" else 0
            )
            <= _MOST_COST
        )

    def check(self, a: Tensor, gemm: Gemm, m: int) -> None:
        """Raise ConfigError where the operands cannot be served, FluidError in a CUDA-graph
        capture."""
        reason = self.why_not(a, gemm, m)
        if reason is not None:
            raise ConfigError(
                "backend: found 'fused', allowed here: auto, copy_engine, collective, because "
                f"{reason}"
            )
        refuse_capture(self.name, self._driver.capturing())

    def _gemm(self, dtype: torch.dtype) -> FusedGemm:
        found = self._kernels.get(dtype)
        if found is None:
            found = self._kernels[dtype] = FusedGemm(dtype, self.workspace)
        return found

    # ---- AllGather-GEMM
    # ------------------------------------------------------------------------------------------------------
    def _push(self, shard: Tensor, gemm: Gemm | None) -> tuple[Tensor, Signals]:
        """Send the own shard to every rank, first to the one before, who needs it first; gives what
        they fill, and how it is told.

        To a peer in one piece where that is there before anybody has time for it, or where no GEMM
        waits for it. All ranks count chunks alike, by shapes alone.
        """
        driver, stream = self._driver, self._copies.cuda_stream
        rows, depth = shard.shape
        early = [False] * (self.ranks - 1)
        if gemm is not None:
            before = self._gemm(shard.dtype).rows_before
            early = [
                before(rows, gemm.n, depth, step) < step * rows for step in range(1, self.ranks)
            ]
        if self._awaited is not None:
            # Nobody finished that gather, but its signals tell when peers are done with their
            # halves.
            self._wait(self._awaited)
            self._awaited = None
        parts = max(1, min(_CHUNKS, shard.nbytes // _GATHER_BYTES)) if any(early) else 1
        part = -(-depth // parts // DEPTH) * DEPTH
        chunks = [
            (number, start, min(part, depth - start))
            for number, start in enumerate(range(0, depth, part))
        ]
        whole = [(len(chunks) - 1, 0, depth)]  # the last chunk's flag tells of all
        size, pitch = shard.dtype.itemsize, depth * shard.dtype.itemsize
        landing = self._gathers.next(self.ranks * shard.nbytes)
        first = self._chunks_sent + 1
        self._chunks_sent += len(chunks)
        driver.record(self._entered, driver.current())
        driver.wait(self._entered, stream)
        for step, soon in enumerate(early, 1):
            peer = (self.rank - step) % self.ranks
            place = landing[peer] + self.rank * shard.nbytes
            for number, start, deep in chunks if soon else whole:
                at = start * size
                driver.copy_block(
                    place + at, shard.data_ptr() + at, pitch, deep * size, rows, stream
                )
                driver.write(self._gather_flags_of[peer] + 4 * self.rank, first + number, stream)
        landed = self._gathers.mine((self.ranks * rows, depth), shard.dtype)
        flags = self._gather_flags
        return landed, Signals(flags.flags.data_ptr(), first, flags.operation, part)

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """Begin gathering ``[m, K]`` shards; the returned function, to be called before the next
        gather, makes the current stream wait and gives the landing half ``[W m, K]``, lent as in
        `gather_matmul`.

        Until it is called nothing needs an SM (but to make a shard contiguous), so a GEMM that
        fills the GPU does not hold it up.
        """
        refuse_capture(self.name, self._driver.capturing())
        shard = a_shard.contiguous()
        landed, signals = self._push(shard, None)
        self._awaited = signals.value
        self._driver.record(self._pushed, self._copies.cuda_stream)
        if shard.is_cuda:  # other work may come between, and the function may be dropped
            shard.record_stream(self._copies)  # type: ignore[arg-type]

        def finish() -> Tensor:
            self._awaited = None
            self._wait(signals.value)
            self._driver.wait(
                self._pushed, self._driver.current()
            )  # the shard is the caller's again
            return self._with_own(landed, shard)

        return finish

    def gather_matmul(
        self, a_shard: Tensor, gemm: Product, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """C ``[W m, N]`` of all shards' rows, and with ``keep`` the gathered A ``[W m, K]``, with
        ``lend`` in the landing half."""
        assert isinstance(gemm, Gemm)
        self.check(a_shard, gemm, self.ranks * a_shard.shape[0])
        shard = a_shard.contiguous()
        try:
            return self._gather_matmul(shard, self._push(shard, gemm), gemm, keep, lend)
        finally:
            self._join()  # the pushes still read the shard

    def _gather_matmul(
        self,
        shard: Tensor,
        pushed: tuple[Tensor, Signals],
        gemm: Gemm,
        keep: bool,
        lend: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        landed, signals = pushed
        m = shard.shape[0]
        c = shard.new_empty((self.ranks * m, gemm.n))
        self._gemm(shard.dtype).gather(shard, landed, gemm.b_kn, gemm.bias, c, signals)
        if not keep:
            return c, None
        # The kernel has seen every flag, so all others' shards are there; the half itself is the
        # next calls'.
        return c, self._with_own(landed if lend else landed.clone(), shard)

    def _with_own(self, gathered: Tensor, shard: Tensor) -> Tensor:
        m = shard.shape[0]
        gathered[self.rank * m : (self.rank + 1) * m].copy_(shard)
        return gathered

    # ---- GEMM-ReduceScatter
    # --------------------------------------------------------------------------------------------------
    def matmul_scatter(
        self, a: Tensor, gemm: Product, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's rows ``[M / W, N]`` of the sum over ranks of A B; ``beside`` is enqueued
        before the last wait."""
        assert isinstance(gemm, Gemm)
        self.check(a, gemm, a.shape[0])
        a = a.contiguous()
        try:
            made = self._matmul_blocks(a, gemm)  # held until the streams have joined
            if beside is not None:
                beside()
            return self._add(made[0], gemm.bias)
        finally:
            self._join()  # the copies still read what is sent

    def _matmul_blocks(self, a: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Multiply, and send what is finished; gives the landing slots ``[W, M / W, N]``, the own
        one filled in stream order, and what the copies read."""
        kernels, rows, n = self._gemm(a.dtype), a.shape[0] // self.ranks, gemm.n
        nbytes, high = rows * n * a.dtype.itemsize, kernels.high(rows, n)
        pieces = max(
            1, min(_CHUNKS, nbytes // _SCATTER_BYTES, MOST_CHUNKS // strips_of_block(high))
        )
        landing = self._scatters.next(self.ranks * nbytes)
        slots = self._scatters.mine((self.ranks, rows, n), a.dtype)
        blocks = a.new_empty((self.ranks, rows, n))  # by owner; the own block is not used
        places = [blocks.data_ptr() + owner * nbytes for owner in range(self.ranks)]
        places[self.rank] = slots.data_ptr() + self.rank * nbytes
        # Calls stay in order.
        self._driver.record(self._entered, self._driver.current())
        self._driver.wait(self._entered, self._copies.cuda_stream)
        kernels.scatter(a, gemm.b_kn, places, self._counters, pieces)
        self._calls += 1
        chunks = chunks_of_block(rows, n, high, pieces)
        for chunk in chunks:  # whatever becomes of this call, its kernel counts them all
            self._counted[chunk.number] += chunk.parts
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            self._send(blocks[owner], landing[owner] + self.rank * nbytes, owner, chunks)
        return slots, blocks

    def _send(self, block: Tensor, place: int, owner: int, chunks: Sequence[Chunk]) -> None:
        """Bring the chunks of `block` to `place` in its owner's memory as they are finished, and a
        flag behind the last."""
        driver, stream = self._driver, self._copies.cuda_stream
        width, size = block.shape[1], block.dtype.itemsize
        counters = self._counters.data_ptr() + 4 * MOST_CHUNKS * owner
        for chunk in chunks:
            driver.wait_value(counters + 4 * chunk.number, self._counted[chunk.number], stream)
            at = (chunk.row * width + chunk.column) * size
            driver.copy_block(
                place + at,
                block.data_ptr() + at,
                width * size,
                chunk.columns * size,
                chunk.rows,
                stream,
            )
        driver.write(self._scatter_flags_of[owner] + 4 * self.rank, self._calls, stream)

    def _add(self, slots: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of all ranks' slots, once they are there."""
        return self._sum(slots, self._calls, bias)

    def _join(self) -> None:
        self._driver.record(self._moved, self._copies.cuda_stream)
        self._driver.wait(self._moved, self._driver.current())
