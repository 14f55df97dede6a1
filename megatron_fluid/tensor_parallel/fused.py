"""The form for Hopper GPUs: one kernel that waits for pushed shards tile by tile, or sends its tiles itself and adds the others'.

AllGather-GEMM: copy engines push this rank's shard to every rank, each time with a flag behind it, while the kernel multiplies the
own rows and then what has come. GEMM-ReduceScatter: the kernel stores each tile straight into its owner's landing slot and flags it;
the own tiles come last and are added to the peers' slots in its epilogue. No barrier, no GEMM per shard, no sum as a kernel of its own.

Flags hold the number of the call and only grow. Buffers have two halves: a peer that has signalled call i + 1 has finished call i, and no
rank starts call i + 2 before it has seen all signals of call i + 1. The number is known to the host, so a call cannot be captured into a
CUDA graph.

Shapes: as in `CopyEngineBackend`. bf16 and fp16; other operands are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import Workspace
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.fused_gemm import MOST_RANKS, FusedGemm, Signals
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.driver import Driver
from megatron_fluid.tensor_parallel.flagged import why_not_16_bit
from megatron_fluid.tensor_parallel.gemm import Gemm, Product
from megatron_fluid.tensor_parallel.halves import PeerHalves

__all__ = ["FusedBackend"]

_WORDS = "tp_fused_words"
_MOST_COST = 1.25  # of waves that are not whole


class FusedBackend:
    """Overlapped AllGather-GEMM and GEMM-ReduceScatter in one kernel for Hopper, on one stream order.

    Args:
        workspace: symmetric memory of the tensor-parallel group, of at most 8 ranks.
        driver: of this rank's device, of compute capability 9.0.
        copy_engine: gathers where there is no GEMM to wait in.
    """

    name = "fused"

    def __init__(self, workspace: Workspace, driver: Driver, copy_engine: CopyEngineBackend) -> None:
        if workspace.world_size > MOST_RANKS:
            raise ConfigError.of("ranks of the fused form", workspace.world_size, f"at most {MOST_RANKS}")
        self.start_gather = copy_engine.start_gather
        self.workspace = workspace
        self.rank = workspace.rank
        self.ranks = workspace.world_size
        self._driver = driver
        self._copies = driver.stream(high_priority=True)
        self._entered, self._moved = driver.event(), driver.event()
        self._gathers = PeerHalves(workspace, "tp_fused_gather")
        self._scatters = PeerHalves(workspace, "tp_fused_scatter")
        self._gather_flags = workspace.flags("tp_fused_gather")
        self._scatter_flags = workspace.flags(
            "tp_fused_scatter"
        )  # its number names the operation; its words are in _WORDS
        self._gather_flags_of = self._gather_flags.addresses.tolist()
        self._words, self._words_of = 0, [0] * self.ranks
        self._calls = {"gather": 0, "scatter": 0}
        self._kernels: dict[torch.dtype, FusedGemm] = {}

    def why_not(self, a: Tensor, gemm: Gemm) -> str | None:
        """Why these operands cannot be served, or None."""
        bias = gemm.bias
        if bias is not None and (bias.dtype != a.dtype or not bias.is_contiguous()):
            return f"the bias is {bias.dtype} with strides {tuple(bias.stride())}, not dense {a.dtype}"
        return why_not_16_bit(a, gemm) or (None if a.shape[0] else "A has no rows")

    def serves(self, a: Tensor, gemm: Gemm) -> bool:
        """Whether a call with these operands can be made now."""
        return self.why_not(a, gemm) is None and not self._driver.capturing()

    def fills_waves(self, a: Tensor, gemm: Gemm, m: int) -> bool:
        """Whether the tiles of a whole GEMM of `m` rows keep the SMs busy; where they do not, cuBLAS splits the sums."""
        return self._gemm(a.dtype).cost(m // self.ranks, gemm.n) <= _MOST_COST

    def check(self, a: Tensor, gemm: Gemm) -> None:
        """Raise ConfigError where the operands cannot be served, FluidError in a CUDA-graph capture."""
        reason = self.why_not(a, gemm)
        if reason is not None:
            raise ConfigError(f"backend: found 'fused', allowed here: auto, copy_engine, collective, because {reason}")
        if self._driver.capturing():
            raise FluidError("the fused backend counts its calls on the host and cannot be captured into a CUDA graph")

    def _gemm(self, dtype: torch.dtype) -> FusedGemm:
        found = self._kernels.get(dtype)
        if found is None:
            found = self._kernels[dtype] = FusedGemm(dtype, self.workspace)
        return found

    # ---- AllGather-GEMM ------------------------------------------------------------------------------------------------------
    def _push(self, shard: Tensor) -> Tensor:
        """Send the own shard and a flag behind it to every rank, first to the one before, who needs it first; gives what they fill."""
        driver, stream = self._driver, self._copies.cuda_stream
        landing = self._gathers.next(self.ranks * shard.nbytes)
        self._calls["gather"] += 1
        driver.record(self._entered, driver.current())
        driver.wait(self._entered, stream)
        for step in range(1, self.ranks):
            peer = (self.rank - step) % self.ranks
            driver.copy(landing[peer] + self.rank * shard.nbytes, shard.data_ptr(), shard.nbytes, stream)
            driver.write(self._gather_flags_of[peer] + 4 * self.rank, self._calls["gather"], stream)
        return self._gathers.mine((self.ranks * shard.shape[0], shard.shape[1]), shard.dtype)

    def gather_matmul(self, a_shard: Tensor, gemm: Product, keep: bool = True) -> tuple[Tensor, Tensor | None]:
        """C ``[W m, N]`` of all shards' rows, and with ``keep`` the gathered A ``[W m, K]``."""
        assert isinstance(gemm, Gemm)
        self.check(a_shard, gemm)
        shard = a_shard.contiguous()
        m = shard.shape[0]
        kernels = self._gemm(shard.dtype)
        try:
            landed = self._push(shard)
            c = shard.new_empty((self.ranks * m, gemm.n))
            flags = self._gather_flags
            signals = Signals(flags.flags.data_ptr(), self._calls["gather"], flags.operation)
            kernels.gather(shard, landed, gemm.b_kn, gemm.bias, c, signals)
            gathered = None
            if keep:
                # The kernel has seen every flag, so all shards are there; the half itself is the next calls'.
                gathered = landed.clone()
                gathered[self.rank * m : (self.rank + 1) * m] = shard
        finally:
            self._driver.record(self._moved, self._copies.cuda_stream)
            self._driver.wait(self._moved, self._driver.current())  # the pushes still read the shard
        return c, gathered

    # ---- GEMM-ReduceScatter --------------------------------------------------------------------------------------------------
    def _reserve_words(self, words: int) -> None:
        """Room for the flags of so many parts of tiles from each source. Collective where it must grow."""
        if words <= self._words:
            return
        self.workspace.reserve(_WORDS, self.ranks * words, torch.int32, zeroed=True)
        self._words_of = [
            self.workspace.peer_view(_WORDS, rank, (self.ranks * words,), torch.int32).data_ptr()
            for rank in range(self.ranks)
        ]
        self._words = words

    def matmul_scatter(self, a: Tensor, gemm: Product, beside: Callable[[], None] | None = None) -> Tensor:
        """This rank's rows ``[M / W, N]`` of the sum over ranks of A B; ``beside`` is enqueued behind it."""
        assert isinstance(gemm, Gemm)
        self.check(a, gemm)
        a = a.contiguous()
        kernels, rows = self._gemm(a.dtype), a.shape[0] // self.ranks
        self._reserve_words(4 * kernels.tiles(rows, gemm.n))
        landing = self._scatters.next(self.ranks * rows * gemm.n * a.dtype.itemsize)
        self._calls["scatter"] += 1
        result = a.new_empty((rows, gemm.n))
        signals = Signals(
            self._words_of[self.rank],
            self._calls["scatter"],
            self._scatter_flags.operation,
            self._words,
            [address + 4 * self.rank * self._words for address in self._words_of],
        )
        kernels.scatter(a, gemm.b_kn, gemm.bias, landing, result, signals)
        if beside is not None:
            beside()
        return result
