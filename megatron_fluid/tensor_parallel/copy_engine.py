"""The overlapped form inside an NVLink domain: the copy engines move shards while cuBLAS multiplies the ones that are here.

AllGather-GEMM: every rank puts its shard into symmetric memory and, after one barrier, pulls the others' in turn, the next rank's first, so
that each GPU's memory serves one reader at a time. The GEMM of the own rows needs none of it and starts at once; the others follow in the
order of arrival, several shards in one GEMM where that is faster.

GEMM-ReduceScatter: the rows of the next rank are multiplied first; while the following rows are multiplied, a copy engine brings each
finished block into its owner's landing slot. The own rows come last and go nowhere. One barrier, then a kernel adds the W slots in fp32 in
rank order. The GEMM writes locally: remote stores in its epilogue would stall its pipeline.

The gather's GEMMs alternate between two streams: a quarter of the rows seldom fills whole waves of tiles, and the next GEMM takes the idle
SMs. The scatter's do not: side by side, the first block would be finished, and sent, later.

No SM moves bytes, so the GEMM keeps the whole GPU; the barrier is one small program on a stream of high priority. Staging and landing
buffers alternate between two halves: the barrier of one call proves that every rank is done with the half of the call before.

Shapes: A ``[m, K]`` a rank (gathered ``[W m, K]``), B as in `Gemm`, C ``[W m, N]``; for the scatter A ``[M, K]``, C ``[M / W, N]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.kernels.flags import barrier_kernel
from megatron_fluid.kernels.reduce_slots import reduce_slots
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["CopyEngineBackend"]


class CopyEngineBackend:
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter over symmetric memory, on one stream order.

    Args:
        workspace: symmetric memory of the tensor-parallel group.
        gather_lanes: 1 or 2 streams that take the gather's GEMMs in turn.
        gather_pieces: how many shards each GEMM takes, the own one first; sums to W. Default: the own shard, then one at a time.
    """

    name = "copy_engine"

    def __init__(
        self, workspace: SymmetricWorkspace, gather_pieces: Sequence[int] | None = None, gather_lanes: int = 2
    ) -> None:
        self.workspace = workspace
        self.rank = workspace.rank
        self.ranks = workspace.world_size
        self.gather_pieces = tuple(gather_pieces or (1,) * self.ranks)
        if sum(self.gather_pieces) != self.ranks or min(self.gather_pieces) < 1:
            raise ValueError(
                f"gather_pieces: found {self.gather_pieces}, allowed: positive integers with the sum {self.ranks}"
            )
        self.gather_lanes = gather_lanes
        self._stream = torch.cuda.Stream(workspace.device, priority=-1)
        self._side = torch.cuda.Stream(workspace.device)
        self._halves = {"tp_gather": 0, "tp_scatter": 0}
        self._views: dict[tuple, list[Tensor]] = {}

    # ---- shared parts --------------------------------------------------------------------------------------------------------
    def _barrier(self, operation: str) -> None:
        """All ranks' earlier work on this stream is done and visible; enqueued on the current stream."""
        ws = self.workspace
        region = ws.flags(operation)
        barrier_kernel[(1,)](
            region.flags, region.addresses, region.counter, ws.errors.words, ws.errors.abort, ws.rank, region.operation, 0,
            ws.timeout_ns, ws.world_size, 0, num_warps=1,
        )  # fmt: skip

    def _buffers(self, name: str, slots: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Every rank's half of buffer ``name`` that this call may use, as ``[slots, *shape]``, by rank.

        The views are kept: making them anew would cost the host more than a small GEMM takes.
        """
        self.workspace.check_errors()
        self._halves[name] ^= 1
        half = self._halves[name]
        whole = (slots, *shape)
        numel = math.prod(whole)
        flat = self.workspace.reserve(name, 2 * numel, dtype)
        key = (name, half, whole, dtype, flat.data_ptr())
        views = self._views.get(key)
        if views is None:
            # Views of a buffer that has grown since would keep its old memory alive.
            for old in [k for k in self._views if (k[0], k[3]) == (name, dtype) and k[4] != flat.data_ptr()]:
                del self._views[old]
            capacity = flat.numel() // 2
            views = self._views[key] = [
                self.workspace.peer_view(name, rank, (flat.numel(),), dtype)[half * capacity :][:numel].view(whole)
                for rank in range(self.ranks)
            ]
        return views

    def _lanes(self, *used: Tensor) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Two streams that take the GEMMs in turn, so that one's last wave of tiles shares the SMs with the next one's first."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        for tensor in used:
            tensor.record_stream(self._side)
        return current, self._side

    # ---- AllGather-GEMM ------------------------------------------------------------------------------------------------------
    def _announce(self, shard: Tensor) -> list[Tensor]:
        """Put the own shard where the others can read it, and know that theirs are there; gives every rank's, by rank."""
        staged = self._buffers("tp_gather", 1, shard.shape, shard.dtype)
        self._stream.wait_stream(torch.cuda.current_stream())
        shard.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            staged[self.rank][0].copy_(shard, non_blocking=True)
            self._barrier("tp_gather")
        return staged

    def _pull(self, staged: list[Tensor], gathered: Tensor, own: str) -> list[torch.cuda.Event]:
        """Fill ``gathered`` [W, m, K]; event i says that the next i + 1 ranks' shards are there.

        own: whether the own shard is copied too, "first" (before any event), "last" or "never".
        """
        gathered.record_stream(self._stream)
        arrived = []
        with torch.cuda.stream(self._stream):
            if own == "first":
                gathered[self.rank].copy_(staged[self.rank][0], non_blocking=True)
            for step in range(1, self.ranks):
                source = (self.rank + step) % self.ranks
                gathered[source].copy_(staged[source][0], non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                arrived.append(event)
            if own == "last":
                # A copy within one GPU may run on the SMs and so wait for the GEMM: it must not hold up the pulls.
                gathered[self.rank].copy_(staged[self.rank][0], non_blocking=True)
        return arrived

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """Begin gathering ``[m, K]`` shards into ``[W m, K]``; the returned function makes the current stream wait and gives it."""
        shard = a_shard.contiguous()
        gathered = shard.new_empty((self.ranks, *shard.shape))
        self._pull(self._announce(shard), gathered, own="last")

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_stream(self._stream)
            return gathered.view(-1, shard.shape[1])

        return finish

    def gather_matmul(self, a_shard: Tensor, gemm: Gemm, keep: bool = True) -> tuple[Tensor, Tensor | None]:
        """C ``[W m, N]`` of all shards' rows, and with ``keep`` the gathered A ``[W m, K]``."""
        shard = a_shard.contiguous()
        m, k = shard.shape
        gathered = shard.new_empty((self.ranks * m, k))
        c = shard.new_empty((self.ranks * m, gemm.n), dtype=gemm.dtype_for(shard))
        current = torch.cuda.current_stream()
        lanes = self._lanes(shard, c, gathered, *gemm.operands)
        staged = self._announce(shard)
        pieces = list(self.gather_pieces)
        if pieces[0] == 1:
            # The own rows need nothing of the others: enqueued before the pulls, so that the GPU has work while the host goes on.
            rows = slice(self.rank * m, (self.rank + 1) * m)
            gemm(shard, rows, out=c[rows])
        arrived = self._pull(
            staged, gathered.view(self.ranks, m, k), own="first" if pieces[0] > 1 else "last" if keep else "never"
        )
        done = turn = 0
        for piece in pieces:
            sources = [(self.rank + done + i) % self.ranks for i in range(piece)]
            done += piece
            if sources == [self.rank]:
                continue
            for block in _runs(sources):
                turn += 1
                lane = lanes[turn % self.gather_lanes]
                with torch.cuda.stream(lane):
                    lane.wait_event(arrived[done - 2])
                    rows = slice(block[0] * m, (block[-1] + 1) * m)
                    gemm(gathered[rows], rows, out=c[rows])
        current.wait_stream(lanes[1])
        current.wait_stream(self._stream)
        return c, gathered if keep else None

    # ---- GEMM-ReduceScatter --------------------------------------------------------------------------------------------------
    def matmul_scatter(self, a: Tensor, gemm: Gemm, beside: Callable[[], None] | None = None) -> Tensor:
        """This rank's rows ``[M / W, N]`` of the sum over ranks of A B; ``beside`` is enqueued before the last wait."""
        dtype = gemm.dtype_for(a)
        product = gemm.without_bias()
        rows = a.shape[0] // self.ranks
        landing = self._buffers("tp_scatter", self.ranks, (rows, gemm.n), dtype)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            part = slice(owner * rows, (owner + 1) * rows)
            c = product(a[part], part)
            ready = torch.cuda.Event()
            ready.record()
            c.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                landing[owner][self.rank].copy_(c, non_blocking=True)
        part = slice(self.rank * rows, (self.rank + 1) * rows)
        slots = landing[self.rank]
        product(a[part], part, out=slots[self.rank])
        with torch.cuda.stream(self._stream):
            self._barrier("tp_scatter")
        if beside is not None:
            beside()
        current.wait_stream(self._stream)
        return reduce_slots(slots, gemm.bias)


def _runs(sources: list[int]) -> list[list[int]]:
    """The ranks of one piece cut into runs of neighbours in memory: one GEMM each."""
    runs: list[list[int]] = []
    for source in sources:
        if runs and source == runs[-1][-1] + 1:
            runs[-1].append(source)
        else:
            runs.append([source])
    return runs
