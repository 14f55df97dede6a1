"""What a backend of the tensor-parallel linears does, and what the overlapped ones share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import Driver
from megatron_fluid.errors import ConfigError
from megatron_fluid.tensor_parallel.double_buffer import DoubleBuffer, refuse_capture
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["Backend", "OverlappedBackend"]


class Backend(Protocol):
    """Moves shards and multiplies them.

    Shapes: W ranks, A ``[m, K]`` of a rank (gathered ``[W m, K]``), B as in `Gemm`, C ``[W m, N]``;
    for the scatter A ``[M, K]``, C ``[M / W, N]``.
    """

    name: str

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """Begin to gather the shards. Call the result before the backend's next gather: it makes
        the current stream wait and returns the gathered A, which may be lent as in
        `gather_matmul`."""

    def gather_matmul(
        self, a_shard: Tensor, gemm: Gemm, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """C of all shards' rows, and with ``keep`` the gathered A.

        With ``lend`` the gathered A may be the backend's own memory. It is then valid for work
        enqueued before the backend's next gather.
        """

    def matmul_scatter(
        self, a: Tensor, gemm: Gemm, overlapped: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's rows of the sum over ranks of A B. ``overlapped`` enqueues work that runs
        while the sum is in flight."""


class OverlappedBackend:
    """What the backends over symmetric memory share: a stream for copies, two double buffers, and
    the checks of operands. Calls are counted on the host, so a CUDA graph cannot capture one.

    Args:
        workspace: symmetric memory of the tensor-parallel group.
        driver: of this rank's device.
        prefix: of the names of buffers and flags.
    """

    name = ""
    _alternatives = "auto, copy_engine, collective"

    def __init__(self, workspace: Workspace, driver: Driver, prefix: str) -> None:
        self.workspace = workspace
        self.rank = workspace.rank
        self.ranks = workspace.world_size
        self._driver = driver
        self._copies = driver.stream(high_priority=True)
        self._entered, self._moved = driver.event(), driver.event()
        self._gathers = DoubleBuffer(workspace, f"{prefix}_gather")
        self._scatters = DoubleBuffer(workspace, f"{prefix}_scatter")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.ranks}, rank={self.rank})"

    def unsupported_reason(self, a: Tensor, gemm: Gemm, m: int) -> str | None:
        """Why these operands of a whole GEMM of `m` rows cannot be multiplied, or None."""
        raise NotImplementedError

    def check(self, a: Tensor, gemm: Gemm, m: int) -> None:
        """Raise ConfigError for operands that cannot be multiplied, FluidError in a CUDA-graph
        capture."""
        reason = self.unsupported_reason(a, gemm, m)
        if reason is not None:
            allowed = f"allowed here: {self._alternatives}, because {reason}"
            raise ConfigError(f"backend: found {self.name!r}, {allowed}")
        refuse_capture(self.name, self._driver.capturing())

    def _enter(self, stream: int) -> None:
        """The copies' stream waits for the current one."""
        self._driver.record(self._entered, self._driver.current())
        self._driver.wait(self._entered, stream)

    def _join(self) -> None:
        """The current stream waits for the copies' stream."""
        self._driver.record(self._moved, self._copies.cuda_stream)
        self._driver.wait(self._moved, self._driver.current())
