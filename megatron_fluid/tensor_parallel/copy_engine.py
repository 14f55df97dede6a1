"""The overlapped form inside an NVLink domain: the copy engines move shards while cuBLAS multiplies
the ones that are here.

AllGather-GEMM: every rank puts its shard into symmetric memory and, after one barrier, pulls the
others' in turn, each rank from another, so that each GPU's memory serves one reader at a time. The
GEMM of the own rows needs none of it and starts at once; the others follow in the order of arrival,
one GEMM each.

GEMM-ReduceScatter: the rows of one peer are multiplied first; while the following rows are
multiplied, a copy engine brings each finished block into its owner's landing slot. The own rows
come last and go nowhere. One barrier, then a kernel adds the W slots in fp32 in rank order. The
GEMM writes locally: remote stores in its epilogue would stall its pipeline.

Peers come in the order rank ^ 1, rank ^ 2, ... where W is a power of two: aligned runs of 2, 4, ...
of them are neighbours in memory, which one GEMM takes where `gather_pieces` or `scatter_pieces` ask
for it (`benchmarks/tune/tp_tune.py` does); else rank + 1, rank + 2, ... The scatter goes through
them backwards.

The gather's GEMMs alternate between two streams: a quarter of the rows seldom fills whole waves of
tiles, and the next GEMM takes the idle SMs. The scatter's do not: side by side, the first block
would be finished, and sent, later.

No SM moves bytes, so the GEMM keeps the whole GPU; the barrier is one small program on a stream of
high priority. Staging and landing buffers alternate between two halves: the barrier of one call
proves that every rank is done with the half of the call before. Whose turn it is is known to the
host, so a call cannot be captured into a CUDA graph.

The host's time is what small shapes feel: addresses are computed once a shape, copies and events go
straight to the driver, and nothing is recorded for the allocator, because the caller's stream has
waited for every other stream when a call returns.

Shapes: A ``[m, K]`` a rank (gathered ``[W m, K]``), B as in `Gemm`, C ``[W m, N]``; for the scatter
A ``[M, K]``, C ``[M / W, N]``. Any dtype but fp64, whose sums fp32 would round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import Driver
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.reduce_slots import reduce_slots
from megatron_fluid.tensor_parallel.gemm import Product
from megatron_fluid.tensor_parallel.halves import PeerHalves, refuse_capture

__all__ = ["CopyEngineBackend"]


class CopyEngineBackend:
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter over symmetric memory, on one stream order.

    Args:
        workspace: symmetric memory of the tensor-parallel group.
        driver: of this rank's device.
        gather_lanes: 1 or 2 streams that take the gather's GEMMs in turn.
        gather_pieces: how many shards each GEMM takes, the own one first; sums to W. Default: the
            own shard, then one at a time.
        scatter_pieces: how many blocks each GEMM takes, the own one last and alone; sums to W.
            Default: one at a time.
    """

    name = "copy_engine"

    def __init__(
        self,
        workspace: Workspace,
        driver: Driver,
        gather_pieces: Sequence[int] | None = None,
        gather_lanes: int = 2,
        scatter_pieces: Sequence[int] | None = None,
    ) -> None:
        self.workspace = workspace
        self.rank = workspace.rank
        self.ranks = workspace.world_size
        self.gather_pieces = self._pieces("gather_pieces", gather_pieces)
        self.scatter_pieces = self._pieces("scatter_pieces", scatter_pieces)
        if self.scatter_pieces[-1] != 1:
            raise ValueError(
                f"scatter_pieces: found {self.scatter_pieces}, allowed: 1 as the last, the own "
                "block"
            )
        power = self.ranks & (self.ranks - 1) == 0
        self._order = [
            self.rank ^ i if power else (self.rank + i) % self.ranks for i in range(self.ranks)
        ]
        self._driver = driver
        self._copies = driver.stream(high_priority=True)
        self._lane = driver.stream(high_priority=False) if gather_lanes == 2 else None
        self._entered, self._moved, self._lane_done, self._gathered = (
            driver.event() for _ in range(4)
        )
        self._steps = [driver.event() for _ in range(self.ranks)]
        self._gathers = PeerHalves(workspace, "tp_gather")
        self._scatters = PeerHalves(workspace, "tp_scatter")
        self._barriers = {
            operation: self._barrier_of(operation) for operation in ("tp_gather", "tp_scatter")
        }

    def _pieces(self, name: str, found: Sequence[int] | None) -> tuple[int, ...]:
        pieces = tuple(found or (1,) * self.ranks)
        if sum(pieces) != self.ranks or min(pieces) < 1:
            raise ValueError(
                f"{name}: found {pieces}, allowed: positive integers with the sum {self.ranks}"
            )
        return pieces

    def serves(self, a: Tensor, gemm: Product) -> bool:
        """Whether these operands can be served."""
        return torch.float64 not in (a.dtype, gemm.dtype_for(a))

    def check(self, a: Tensor, gemm: Product) -> None:
        """Raise ConfigError where the operands cannot be served, FluidError in a CUDA-graph
        capture."""
        if not self.serves(a, gemm):
            raise ConfigError(
                "backend: found 'copy_engine', allowed here: auto, collective, because it adds in "
                "fp32, not in torch.float64"
            )
        refuse_capture(self.name, self._driver.capturing())

    # ---- shared parts
    # --------------------------------------------------------------------------------------------------------
    def _barrier_of(self, operation: str) -> Launch:
        ws = self.workspace
        region = ws.flags(operation)
        fixed = (
            region.flags,
            region.addresses,
            region.counter,
            ws.errors.words,
            ws.errors.abort,
            ws.rank,
            region.operation,
            0,
            ws.timeout_ns,
        )
        return Launch(barrier_kernel, 1, {"W": ws.world_size, "SLOT": 0}, fixed)

    def _barrier(self, operation: str) -> None:
        """All ranks' earlier work on the copies' stream is done and visible; enqueued there."""
        self._barriers[operation]((1, 1), (), self._copies)  # type: ignore[arg-type]

    # ---- AllGather-GEMM
    # ------------------------------------------------------------------------------------------------------
    def _announce(self, shard: Tensor) -> list[int]:
        """Put the own shard where the others can read it, and know that theirs are there; gives the
        address of every rank's."""
        driver, stream = self._driver, self._copies.cuda_stream
        staged = self._gathers.next(shard.nbytes)
        driver.record(self._entered, driver.current())
        driver.wait(self._entered, stream)
        driver.copy(staged[self.rank], shard.data_ptr(), shard.nbytes, stream)
        self._barrier("tp_gather")
        return staged

    def _pull(self, staged: list[int], gathered: int, nbytes: int, own: str) -> None:
        """Fill the W blocks of ``nbytes`` at ``gathered``; event i of `_steps` says that the first
        i + 1 peers' shards are there.

        own: whether the own shard is copied too, "first" (before any event), "last" or "never".
        """
        driver, stream = self._driver, self._copies.cuda_stream
        mine = gathered + self.rank * nbytes
        if own == "first":
            driver.copy(mine, staged[self.rank], nbytes, stream)
        for step, source in enumerate(self._order[1:], 1):
            driver.copy(gathered + source * nbytes, staged[source], nbytes, stream)
            driver.record(self._steps[step - 1], stream)
        if own == "last":
            # A copy within one GPU may run on the SMs and so wait for the GEMM: it must not hold up
            # the pulls.
            driver.copy(mine, staged[self.rank], nbytes, stream)

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """Begin gathering ``[m, K]`` shards into ``[W m, K]``; the returned function makes the
        current stream wait and gives it."""
        refuse_capture(self.name, self._driver.capturing())
        shard = a_shard.contiguous()
        gathered = shard.new_empty((self.ranks * shard.shape[0], shard.shape[1]))
        self._pull(self._announce(shard), gathered.data_ptr(), shard.nbytes, own="last")
        self._driver.record(self._gathered, self._copies.cuda_stream)
        if gathered.is_cuda:  # other work may come between, and the function may be dropped
            shard.record_stream(self._copies)  # type: ignore[arg-type]
            gathered.record_stream(self._copies)  # type: ignore[arg-type]

        def finish() -> Tensor:
            self._driver.wait(
                self._gathered, self._driver.current()
            )  # or for a later gather on the same stream
            return gathered

        return finish

    def gather_matmul(
        self, a_shard: Tensor, gemm: Product, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """C ``[W m, N]`` of all shards' rows, and with ``keep`` the gathered A ``[W m, K]``, the
        caller's own."""
        self.check(a_shard, gemm)
        shard = a_shard.contiguous()
        return self._gather_matmul(shard, self._announce(shard), gemm, keep)

    def _gather_matmul(
        self, shard: Tensor, staged: list[int], gemm: Product, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        driver, copies, lane = self._driver, self._copies.cuda_stream, self._lane
        m, k = shard.shape
        current = driver.current()
        gathered = shard.new_empty((self.ranks * m, k))
        height = gemm.out_rows(m)  # of one block of C
        c = shard.new_empty((self.ranks * height, gemm.n), dtype=gemm.dtype_for(shard))
        multiply = gemm.into(shard)
        pieces = list(self.gather_pieces)
        if lane is not None:
            driver.wait(self._entered, lane.cuda_stream)
        try:
            if pieces[0] == 1:
                # The own rows need nothing of the others: enqueued before the pulls, so that the
                # GPU has work while the host goes on.
                start = self.rank * height
                multiply(shard, c[start : start + height], self.rank * m)
            own = "first" if pieces[0] > 1 else "last" if keep else "never"
            self._pull(staged, gathered.data_ptr(), shard.nbytes, own)
            done = turn = 0
            for piece in pieces:
                sources = self._order[done : done + piece]
                done += piece
                if sources == [self.rank]:
                    continue
                for first, last in _runs(sources):
                    turn += 1
                    aside = lane is not None and turn % 2 == 1
                    driver.wait(
                        self._steps[done - 2],
                        lane.cuda_stream if lane is not None and aside else current,
                    )
                    rows, out = (
                        slice(first * m, (last + 1) * m),
                        slice(first * height, (last + 1) * height),
                    )
                    if aside:
                        driver.use(lane)
                    multiply(gathered[rows], c[out], first * m)
                    if aside:
                        driver.use(None)
        finally:
            # Whatever happened, nothing that this call allocated is in use on another stream after
            # it.
            if lane is not None:
                driver.use(None)
                driver.record(self._lane_done, lane.cuda_stream)
                driver.wait(self._lane_done, current)
            driver.record(self._moved, copies)
            driver.wait(self._moved, current)
        return c, gathered if keep else None

    # ---- GEMM-ReduceScatter
    # --------------------------------------------------------------------------------------------------
    def matmul_scatter(
        self, a: Tensor, gemm: Product, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's rows ``[M / W, N]`` of the sum over ranks of A B; ``beside`` is enqueued
        before the last wait."""
        self.check(a, gemm)
        slots, sent = self._matmul_scatter(a, gemm)
        return self._add(slots, sent, gemm, beside)

    def _matmul_scatter(self, a: Tensor, gemm: Product) -> tuple[Tensor, Tensor]:
        """Multiply and send; gives the landing slots ``[W, M / W, N]`` of this rank, in which its
        own is filled in stream order, and what the copies still read."""
        driver, copies = self._driver, self._copies.cuda_stream
        step_rows, n, dtype = a.shape[0] // self.ranks, gemm.n, gemm.dtype_for(a)
        rows = gemm.out_rows(step_rows)  # of one block of C
        multiply = gemm.without_bias().into(a)
        landing = self._scatters.next(self.ranks * rows * n * dtype.itemsize)
        slots = self._scatters.mine((self.ranks, rows, n), dtype)
        nbytes = rows * n * dtype.itemsize
        current = driver.current()
        c = a.new_empty((self.ranks, rows, n), dtype=dtype)  # by owner; the own block is not used
        flat, done = c.flatten(0, 1), 0
        try:
            for number, piece in enumerate(self.scatter_pieces[:-1]):
                owners = self._order[::-1][done : done + piece]
                done += piece
                for first, last in _runs(owners):
                    part = slice(first * step_rows, (last + 1) * step_rows)
                    multiply(a[part], flat[first * rows : (last + 1) * rows], first * step_rows)
                driver.record(self._steps[number], current)
                driver.wait(self._steps[number], copies)
                for owner in owners:
                    driver.copy(
                        landing[owner] + self.rank * nbytes,
                        c.data_ptr() + owner * nbytes,
                        nbytes,
                        copies,
                    )
            start = self.rank * step_rows
            multiply(a[start : start + step_rows], slots[self.rank], start)
        except BaseException:
            self._join()
            raise
        return slots, c

    def _add(
        self, slots: Tensor, sent: Tensor, gemm: Product, beside: Callable[[], None] | None
    ) -> Tensor:
        """Add the slots of all ranks once they are there; ``sent`` is held until the copies have
        read it."""
        try:
            self._barrier("tp_scatter")
            if beside is not None:
                beside()
        finally:
            self._join()
            del sent
        return reduce_slots(slots, gemm.bias)

    def _join(self) -> None:
        self._driver.record(self._moved, self._copies.cuda_stream)
        self._driver.wait(self._moved, self._driver.current())


def _runs(ranks: list[int]) -> list[tuple[int, int]]:
    """The ranks of one piece cut into runs of neighbours in memory, (first, last) each: one GEMM a
    run."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
