"""What a backend of the tensor-parallel linears does, and what the overlapped ones share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["Backend", "DoubleBuffer", "OverlappedBackend", "refuse_capture"]

_UNIT = torch.bfloat16  # dtype of the allocation, which calls of any dtype share
_ALIGN = 512  # bytes; allows the widest accesses in both halves


class Backend(Protocol):
    """Moves shards and multiplies them.

    Shapes: W ranks, A ``[m, K]`` of a rank (gathered ``[W m, K]``), B as in `Gemm`, C ``[W m, N]``;
    for the scatter A ``[M, K]``, C ``[M / W, N]``.
    """

    name: str

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """Begin to gather the shards. Call the result before the backend's next gather: it makes
        the current stream wait and returns the gathered A, lent as in `gather_matmul`."""

    def gather_matmul(
        self, a_shard: Tensor, gemm: Gemm, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """C of all shards' rows, and with ``keep`` the gathered A. It may be lent: the backend's
        own memory, valid for work enqueued before its next gather."""

    def matmul_scatter(
        self, a: Tensor, gemm: Gemm, overlapped: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's rows of the sum over ranks of A B. ``overlapped`` enqueues work that runs
        while the sum is in flight."""


def refuse_capture(name: str, capturing: bool) -> None:
    """Raise FluidError if `capturing`, for the backend of this name."""
    if capturing:
        reason = "counts its calls on the host and cannot be captured into a CUDA graph"
        raise FluidError(f"the {name} backend {reason}")


class DoubleBuffer:
    """The symmetric buffer ``name`` of every rank, in two halves that calls use in turn. All ranks
    ask for the same sizes in the same order.

    Every rank signals in each call. The signal of one call proves that the rank has finished the
    call before, so no call waits for the readers of the half that it writes. The host knows whose
    turn it is, so a CUDA graph cannot capture a call.
    """

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace = workspace
        self.name = name
        self._turn = 1
        self._flat = torch.empty(0, dtype=_UNIT)
        self._addresses: list[list[int]] = [[], []]
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}

    def next(self, nbytes: int) -> list[int]:
        """Switch to the other buffer, of at least `nbytes`: its address in the memory of each rank.
        Collective where the buffer must grow.

        Raises:
            PeerTimeoutError: an earlier wait of this rank for a peer timed out.
        """
        self.workspace.check_errors()
        self._turn ^= 1
        held = self._flat.nbytes
        if 2 * nbytes > held or not held:  # a first call may have no rows
            self._grow(nbytes)
        return self._addresses[self._turn]

    def _grow(self, nbytes: int) -> None:
        self._views.clear()  # they would keep the old memory alive
        self._flat = torch.empty(0, dtype=_UNIT)
        each = max(1, -(-nbytes // _ALIGN)) * _ALIGN
        self._flat = flat = self.workspace.reserve(self.name, 2 * each // _UNIT.itemsize, _UNIT)
        bases = [peer.data_ptr() for peer in self.workspace.peer_buffers(self.name, _UNIT)]
        self._addresses = [bases, [base + flat.nbytes // 2 for base in bases]]

    def local(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's memory of the buffer that `next` switched to, as a tensor of `shape`."""
        key = (self._turn, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            start = self._turn * (self._flat.numel() // 2)
            units = math.prod(shape) * dtype.itemsize // _UNIT.itemsize
            with torch.inference_mode(False):  # training could not write an inference tensor
                part = self._flat[start : start + units]
                view = self._views[key] = part.view(dtype).view(tuple(shape))
        return view


class OverlappedBackend:
    """What the backends over symmetric memory share: a stream for copies, two double buffers, and
    the checks of operands. Calls are counted on the host, so a CUDA graph cannot capture one.

    Args:
        workspace: symmetric memory of the tensor-parallel group.
        driver: of this rank's device.
        prefix: of the names of buffers and flags.
    """

    name = ""

    def __init__(self, workspace: Workspace, driver: CudaDriver, prefix: str) -> None:
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
            allowed = f"allowed for these operands: auto, because {reason}"
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
