"""The copy-engine form, inside an NVLink domain: copy engines move shards while cuBLAS multiplies
those that have arrived.

AllGather-GEMM: every rank puts its shard into symmetric memory. After one barrier it pulls the
others' in turn, each rank from another, so that each GPU's memory serves one reader at a time. The
GEMM of this rank's rows needs none of them and starts at once. The others follow in the order of
arrival, one GEMM each, on two streams in turn: a part of the rows seldom fills whole waves of
tiles, and the next GEMM uses the idle SMs.

GEMM-ReduceScatter: the rows of one peer are multiplied first. While the next rows are multiplied, a
copy engine copies each finished block into its owner's slot. This rank's rows come last and stay.
After one barrier a kernel adds the W slots in fp32 in rank order. The GEMM writes locally, because
remote stores in its epilogue would stall its pipeline. It keeps to one stream: concurrent GEMMs
would finish, and send, the first block later.

Where W is a power of two, peers come in the order rank ^ 1, rank ^ 2, ...; else rank + 1, rank + 2,
... The scatter reverses the order.

No SM moves bytes, so the GEMM has the whole GPU. The barrier is one small program on a stream of
high priority. Double buffers: the barrier of one call proves that every rank has finished the call
before.

Host time limits small shapes. So addresses are computed once a shape, copies and events go straight
to the driver, and nothing is recorded for the allocator: when a call returns, the caller's stream
has waited for every other stream.

Shapes: as in `Backend`. Any dtype but fp64, which the fp32 sums would round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.move_tokens.reduce_slots import reduce_slots
from megatron_fluid.tensor_parallel.backend import OverlappedBackend, refuse_capture
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["CopyEngineBackend"]


class CopyEngineBackend(OverlappedBackend):
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter by copy engines, on one stream order."""

    name = "copy_engine"

    def __init__(self, workspace: Workspace, driver: CudaDriver) -> None:
        super().__init__(workspace, driver, "tp")
        ranks, power = self.ranks, self.ranks & (self.ranks - 1) == 0
        self._order = [self.rank ^ i if power else (self.rank + i) % ranks for i in range(ranks)]
        self._lane = driver.stream(high_priority=False)
        self._lane_done, self._gathered = driver.event(), driver.event()
        self._steps = [driver.event() for _ in range(ranks)]
        self._barriers = {name: self._barrier_of(name) for name in ("tp_gather", "tp_scatter")}

    def unsupported_reason(self, a: Tensor, gemm: Gemm, m: int) -> str | None:
        return "it adds in fp32, not in torch.float64" if a.dtype == torch.float64 else None

    def _barrier_of(self, operation: str) -> Launch:
        ws, region = self.workspace, self.workspace.flags(operation)
        fixed = (
            region.flags, region.addresses, region.counter, ws.errors.words, ws.errors.abort,
            ws.rank, region.operation, 0, ws.timeout_ns,
        )  # fmt: skip
        constants = {"W": ws.world_size, "SLOT": 0, "MARK": True}
        return Launch(barrier_kernel, 1, constants, fixed)

    def _barrier(self, operation: str, address: int, nbytes: int) -> None:
        """All ranks' work so far on the copies' streams is done and visible; enqueued there.

        If a rank does not come, `nbytes` of this rank's buffer at `address` are filled with NaN.
        """
        marked = (address, nbytes // 4)
        self._barriers[operation]((1, 1), marked, self._copies)  # type: ignore[arg-type]

    # ---- AllGather-GEMM
    def _announce(self, shard: Tensor) -> list[int]:
        """Put this rank's shard into symmetric memory and wait until all ranks have; returns the
        address of every rank's."""
        stream = self._copies.cuda_stream
        staged = self._gathers.next(shard.nbytes)
        self._enter(stream)
        self._driver.copy(staged[self.rank], shard.data_ptr(), shard.nbytes, stream)
        # If a peer does not come, this rank's shard is marked with NaN, for late peers and where it
        # is copied from here. The pulls that follow would overwrite a mark in what they fill.
        self._barrier("tp_gather", staged[self.rank], shard.nbytes)
        return staged

    def _pull(self, staged: list[int], gathered: int, nbytes: int, with_local: bool) -> None:
        """Fill the blocks of ``nbytes`` at ``gathered``, this rank's too if ``with_local``. Event i
        of `_steps` completes when peer i's shard is there."""
        driver, stream = self._driver, self._copies.cuda_stream
        for step, source in enumerate(self._order[1:], 1):
            driver.copy(gathered + source * nbytes, staged[source], nbytes, stream)
            driver.record(self._steps[step], stream)
        if with_local:
            # A copy within one GPU may run on SMs and so wait for the GEMM: it must not delay the
            # pulls.
            driver.copy(gathered + self.rank * nbytes, staged[self.rank], nbytes, stream)

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        refuse_capture(self.name, self._driver.capturing())
        shard = a_shard.contiguous()
        gathered = shard.new_empty((self.ranks * shard.shape[0], shard.shape[1]))
        self._pull(self._announce(shard), gathered.data_ptr(), shard.nbytes, with_local=True)
        self._driver.record(self._gathered, self._copies.cuda_stream)
        if gathered.is_cuda:  # other work may come between, and the function may be dropped
            shard.record_stream(self._copies)  # type: ignore[arg-type]
            gathered.record_stream(self._copies)  # type: ignore[arg-type]

        def finish() -> Tensor:
            # The event may be a later gather's: on the same stream that waits for this one, too.
            self._driver.wait(self._gathered, self._driver.current())
            return gathered

        return finish

    def gather_matmul(
        self, a_shard: Tensor, gemm: Gemm, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        self.check(a_shard, gemm, self.ranks * a_shard.shape[0])
        shard = a_shard.contiguous()
        return self._gather_matmul(shard, self._announce(shard), gemm, keep)

    def _gather_matmul(
        self, shard: Tensor, staged: list[int], gemm: Gemm, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        driver, lane, current = self._driver, self._lane, self._driver.current()
        m, k = shard.shape
        gathered = shard.new_empty((self.ranks * m, k))
        c = shard.new_empty((self.ranks * m, gemm.n))
        multiply = gemm.into()
        driver.wait(self._entered, lane.cuda_stream)
        try:
            # This rank's rows need no peer: enqueued before the pulls, they give the GPU work while
            # the host continues.
            start = self.rank * m
            multiply(shard, c[start : start + m])
            self._pull(staged, gathered.data_ptr(), shard.nbytes, keep)
            for step, source in enumerate(self._order[1:], 1):
                aside = step % 2 == 1
                driver.wait(self._steps[step], lane.cuda_stream if aside else current)
                block = slice(source * m, (source + 1) * m)
                if aside:
                    driver.use(lane)
                multiply(gathered[block], c[block])
                if aside:
                    driver.use(None)
        finally:
            # After the call, even a failed one, no other stream uses what the call allocated.
            driver.use(None)
            driver.record(self._lane_done, lane.cuda_stream)
            driver.wait(self._lane_done, current)
            self._join()
        return c, gathered if keep else None

    # ---- GEMM-ReduceScatter
    def matmul_scatter(
        self, a: Tensor, gemm: Gemm, overlapped: Callable[[], None] | None = None
    ) -> Tensor:
        self.check(a, gemm, a.shape[0])
        slots, sent = self._matmul_blocks(a, gemm)
        return self._add(slots, sent, gemm, overlapped)

    def _matmul_blocks(self, a: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Multiply and send; returns the slots ``[W, M / W, N]`` of the receive buffer, where this
        rank's is filled in stream order, and the blocks that the copies still read."""
        driver, copies = self._driver, self._copies.cuda_stream
        rows, n = a.shape[0] // self.ranks, gemm.n
        multiply = gemm.without_bias().into()
        nbytes = rows * n * a.itemsize
        received = self._scatters.next(self.ranks * nbytes)
        slots = self._scatters.local((self.ranks, rows, n), a.dtype)
        current = driver.current()
        c = a.new_empty((self.ranks, rows, n))  # by owner; this rank's is not used
        try:
            for step in range(self.ranks - 1, 0, -1):
                owner = self._order[step]
                start = owner * rows
                multiply(a[start : start + rows], c[owner])
                driver.record(self._steps[step], current)
                driver.wait(self._steps[step], copies)
                target = received[owner] + self.rank * nbytes
                driver.copy(target, c.data_ptr() + owner * nbytes, nbytes, copies)
            start = self.rank * rows
            multiply(a[start : start + rows], slots[self.rank])
        except BaseException:
            self._join()
            raise
        return slots, c

    def _add(
        self, slots: Tensor, sent: Tensor, gemm: Gemm, overlapped: Callable[[], None] | None
    ) -> Tensor:
        """Add the slots of all ranks once they are there; ``sent`` is held until the copies have
        read it."""
        try:
            self._barrier("tp_scatter", slots.data_ptr(), slots.nbytes)
            if overlapped is not None:
                overlapped()
        finally:
            self._join()
            del sent
        return reduce_slots(slots, gemm.bias)
