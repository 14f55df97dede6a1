"""The form for Hopper GPUs: one GEMM that waits for pushed shards chunk by chunk, or whose tiles
copy engines send while it runs.

AllGather-GEMM: copy engines push this rank's shard to every rank, whole or in chunks of K with a
flag behind each. The kernel multiplies this rank's rows, then what has arrived. GEMM-ReduceScatter:
the kernel counts the tiles that it has stored of the other ranks' blocks. Copy engines wait for the
counts and copy chunk by chunk into the owner's slot. This rank's block comes last and stays. A
flag follows each rank's last chunk; then a kernel adds the W slots in fp32 in rank order. There is
no barrier and no GEMM per shard.

A gather without a GEMM is pushes and one waiting program. Gathers lend their receive buffer: to
work on the calls' stream that is enqueued before the next gather.

Shapes: as in `Backend`. bf16 and fp16; other operands are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import FlagRegion, Workspace
from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.flags import wait_for_peers_kernel
from megatron_fluid.kernels.fused_gemm.launch import (
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
from megatron_fluid.kernels.move_tokens.reduce_slots import reduce_slots
from megatron_fluid.tensor_parallel.backend import OverlappedBackend, refuse_capture
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["FusedBackend"]

# A chunk: small enough that the last one takes little time, large enough that the start of a copy
# does not count.
_GATHER_BYTES, _SCATTER_BYTES, _CHUNKS = 8 << 20, 16 << 20, 8


def _peer_wait(workspace: Workspace, region: FlagRegion) -> Callable[[int, Tensor | None], None]:
    """Return a bounded wait on the current stream until every other rank's word in `region` has
    reached a value. The second argument is what the peers write; it is filled with NaN if one does
    not come."""
    errors = workspace.errors
    words = (region.flags, errors.words, errors.abort)
    rest = (workspace.rank, region.operation, workspace.timeout_ns)
    launch = Launch(wait_for_peers_kernel, 1, {"W": workspace.world_size})
    nothing = (errors.abort.data_ptr(), 0)

    def wait(value: int, awaited: Tensor | None) -> None:
        marked = nothing if awaited is None else (awaited.data_ptr(), awaited.nbytes // 4)
        launch((1, 1), (*words, value, *marked, *rest))

    return wait


class FusedBackend(OverlappedBackend):
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter by kernels for compute capability 9.0 and at
    most 8 ranks, on one stream order.

    Flags hold the number of the call and only grow. Buffers are double: a peer that has signalled
    call i + 1 has finished call i and read what it was lent there, and no rank starts call i + 2
    before it has seen all signals of call i + 1.
    """

    name = "fused"

    def __init__(self, workspace: Workspace, driver: CudaDriver) -> None:
        if workspace.world_size > MOST_RANKS:
            ranks = workspace.world_size
            raise ConfigError.of("ranks of the fused form", ranks, f"at most {MOST_RANKS}")
        super().__init__(workspace, driver, "tp_fused")
        counters = workspace.world_size * MOST_CHUNKS
        self._gather_flags = workspace.flags("tp_fused_gather")
        self._scatter_flags = workspace.flags("tp_fused_scatter", counters=counters)
        self._gather_flags_of = self._gather_flags.addresses.tolist()
        self._scatter_flags_of = self._scatter_flags.addresses.tolist()
        self._scatter_calls = 0
        self._pushed = driver.event()
        self._wait = _peer_wait(workspace, self._gather_flags)
        self._scatter_wait = _peer_wait(workspace, self._scatter_flags)
        self._counters = self._scatter_flags.counter.view(self.ranks, MOST_CHUNKS)
        # What the counters of each owner reach when all kernels so far are done.
        self._counted = [0] * MOST_CHUNKS
        self._chunks: Sequence[Chunk] = ()  # of a block of the current scatter
        self._received: list[int] = []  # its receive buffers
        self._chunks_sent = 0  # of gathers
        self._awaited: int | None = None  # the flag of a gather that nobody has waited for
        self._kernels: dict[torch.dtype, FusedGemm] = {}

    def unsupported_reason(self, a: Tensor, gemm: Gemm, m: int) -> str | None:
        if m > MOST_ROWS * self.ranks:
            return f"A has {m} rows in all, more than {MOST_ROWS} a rank"
        strides = tuple(gemm.b.stride())
        if a.dtype not in (torch.bfloat16, torch.float16):
            return f"the kernel multiplies bf16 and fp16, not {a.dtype}"
        if min(strides) != 1 or max(strides) % 8:
            allowed = "one dimension contiguous, the other's a multiple of 8"
            return f"B has strides {strides}, allowed: {allowed}"
        if gemm.k % 16 or gemm.n % 16:
            return f"K {gemm.k} and N {gemm.n} are not multiples of 16"
        if not a.shape[0]:
            # Its kernel would wait for no peer, and the next call could overwrite what a peer
            # reads.
            return "A has no rows"
        if any(t is not None and t.data_ptr() % 16 for t in (a, gemm.b, gemm.bias)):
            return "A, B or the bias does not begin on a 16-byte boundary"
        return None

    def _gemm(self, dtype: torch.dtype) -> FusedGemm:
        kernels = self._kernels.get(dtype)
        if kernels is None:
            kernels = self._kernels[dtype] = FusedGemm(dtype, self.workspace)
        return kernels

    # ---- AllGather-GEMM
    def _push(self, shard: Tensor, gemm: Gemm | None) -> tuple[Tensor, Signals]:
        """Send this rank's shard to every rank, first to the previous one, which needs it first.
        Returns the gathered A that the pushes fill, and the signals to wait for.

        A peer receives the shard in one piece if it arrives before the peer has time for it, or if
        no GEMM waits for it. All ranks count chunks alike, by shapes alone.
        """
        driver, stream = self._driver, self._copies.cuda_stream
        rows, depth = shard.shape
        early = [False] * (self.ranks - 1)
        if gemm is not None:
            before = self._gemm(shard.dtype).rows_before
            steps = range(1, self.ranks)
            early = [before(rows, gemm.n, depth, step) < step * rows for step in steps]
        if self._awaited is not None:
            # Nobody waited for that gather, but its signals prove that peers have read what they
            # were lent.
            self._wait(self._awaited, None)
            self._awaited = None
        parts = max(1, min(_CHUNKS, shard.nbytes // _GATHER_BYTES)) if any(early) else 1
        part = -(-depth // parts // DEPTH) * DEPTH
        starts = enumerate(range(0, depth, part))
        chunks = [(number, start, min(part, depth - start)) for number, start in starts]
        whole = [(len(chunks) - 1, 0, depth)]  # the last chunk's flag stands for all
        size, pitch = shard.dtype.itemsize, depth * shard.dtype.itemsize
        received = self._gathers.next(self.ranks * shard.nbytes)
        first = self._chunks_sent + 1
        self._chunks_sent += len(chunks)
        self._enter(stream)
        for step, soon in enumerate(early, 1):
            peer = (self.rank - step) % self.ranks
            target, source = received[peer] + self.rank * shard.nbytes, shard.data_ptr()
            flag = self._gather_flags_of[peer] + 4 * self.rank
            for number, start, deep in chunks if soon else whole:
                at = start * size
                driver.copy_block(target + at, source + at, pitch, deep * size, rows, stream)
                driver.write(flag, first + number, stream)
        gathered = self._gathers.local((self.ranks * rows, depth), shard.dtype)
        flags = self._gather_flags
        return gathered, Signals(flags.flags.data_ptr(), first, flags.operation, part)

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """As in `Backend`, lent. Needs no SM until the result is called (but to make a shard
        contiguous), so a GEMM that fills the GPU does not delay it."""
        refuse_capture(self.name, self._driver.capturing())
        shard = a_shard.contiguous()
        gathered, signals = self._push(shard, None)
        self._awaited = signals.value
        self._driver.record(self._pushed, self._copies.cuda_stream)
        if shard.is_cuda:  # other work may come between, and the function may be dropped
            shard.record_stream(self._copies)  # type: ignore[arg-type]

        def finish() -> Tensor:
            self._awaited = None
            self._wait(signals.value, gathered)
            # The caller may overwrite the shard from here on.
            self._driver.wait(self._pushed, self._driver.current())
            return self._with_local_shard(gathered, shard)

        return finish

    def gather_matmul(
        self, a_shard: Tensor, gemm: Gemm, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        self.check(a_shard, gemm, self.ranks * a_shard.shape[0])
        shard = a_shard.contiguous()
        try:
            return self._gather_matmul(shard, self._push(shard, gemm), gemm, keep)
        finally:
            self._join()  # the pushes still read the shard

    def _gather_matmul(
        self, shard: Tensor, pushed: tuple[Tensor, Signals], gemm: Gemm, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        gathered, signals = pushed
        m = shard.shape[0]
        c = shard.new_empty((self.ranks * m, gemm.n))
        self._gemm(shard.dtype).gather(shard, gathered, gemm.b_kn, gemm.bias, c, signals)
        if not keep:
            return c, None
        # The kernel has seen every flag, so all peers' shards are there.
        return c, self._with_local_shard(gathered, shard)

    def _with_local_shard(self, gathered: Tensor, shard: Tensor) -> Tensor:
        m = shard.shape[0]
        gathered[self.rank * m : (self.rank + 1) * m].copy_(shard)
        return gathered

    # ---- GEMM-ReduceScatter
    def matmul_scatter(
        self, a: Tensor, gemm: Gemm, overlapped: Callable[[], None] | None = None
    ) -> Tensor:
        self.check(a, gemm, a.shape[0])
        try:
            slots, sent = self._matmul_blocks(a.contiguous(), gemm)
            self._send(sent)
            if overlapped is not None:
                overlapped()
            return self._add(slots, gemm.bias)
        finally:
            self._join()  # the copies still read what is sent

    def _matmul_blocks(self, a: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Start the kernel; returns the slots ``[W, M / W, N]`` of the receive buffer, of which
        it fills this rank's, and the blocks of C by owner, this rank's unused."""
        kernels, rows, n = self._gemm(a.dtype), a.shape[0] // self.ranks, gemm.n
        nbytes, high = rows * n * a.dtype.itemsize, kernels.high(rows, n)
        most = min(_CHUNKS, MOST_CHUNKS // strips_of_block(high))
        pieces = max(1, min(most, nbytes // _SCATTER_BYTES))
        self._received = self._scatters.next(self.ranks * nbytes)
        slots = self._scatters.local((self.ranks, rows, n), a.dtype)
        blocks = a.new_empty((self.ranks, rows, n))
        targets = [blocks.data_ptr() + owner * nbytes for owner in range(self.ranks)]
        targets[self.rank] = slots.data_ptr() + self.rank * nbytes
        self._enter(self._copies.cuda_stream)  # the copies start after the calls before
        kernels.scatter(a, gemm.b_kn, targets, self._counters, pieces)
        self._scatter_calls += 1
        self._chunks = chunks_of_block(rows, n, high, pieces)
        for chunk in self._chunks:  # the kernel counts them all, even if this call fails
            self._counted[chunk.number] += chunk.parts
        return slots, blocks

    def _send(self, blocks: Tensor) -> None:
        """Copy each chunk into its owner's slot when the kernel has finished it, and a flag behind
        the last one."""
        driver, stream = self._driver, self._copies.cuda_stream
        size, nbytes = blocks.dtype.itemsize, blocks.nbytes // self.ranks
        pitch = blocks.shape[2] * size
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            source = blocks.data_ptr() + owner * nbytes
            target = self._received[owner] + self.rank * nbytes
            counters = self._counters.data_ptr() + 4 * MOST_CHUNKS * owner
            for chunk in self._chunks:
                driver.wait_value(counters + 4 * chunk.number, self._counted[chunk.number], stream)
                at = chunk.row * pitch + chunk.column * size
                width = chunk.columns * size
                driver.copy_block(target + at, source + at, pitch, width, chunk.rows, stream)
            flag = self._scatter_flags_of[owner] + 4 * self.rank
            driver.write(flag, self._scatter_calls, stream)

    def _add(self, slots: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of all ranks' slots in fp32 in rank order, once they are there."""
        self._scatter_wait(self._scatter_calls, slots)
        return reduce_slots(slots, bias)
