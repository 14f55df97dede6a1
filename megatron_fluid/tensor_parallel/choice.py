"""Which backend serves a shape: asked for by name, or chosen by a rule fitted to measurements (``benchmarks/results/tp_overlap.json``).

The rule depends on sizes and the group alone, so every rank decides alike without asking.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.tensor_parallel.collective import CollectiveBackend
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["BACKENDS", "Backend", "backend_for", "close_backends"]

BACKENDS = ("auto", "copy_engine", "collective")

# What a collective and then a GEMM take is estimated from rates that H200s reach over NVLink. Below this sum the overlapped form loses: its
# dozen launches keep the host busy for about 300 us, while the GPU waits.
_FLOPS = 650e12
_BYTES_PER_SECOND = 300e9
_WORTH_SECONDS = 400e-6


class Backend(Protocol):
    """What moves and multiplies; see `CollectiveBackend` for the meaning of each method."""

    name: str

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]: ...

    def gather_matmul(self, a_shard: Tensor, gemm: Gemm, keep: bool = True) -> tuple[Tensor, Tensor | None]: ...

    def matmul_scatter(self, a: Tensor, gemm: Gemm, beside: Callable[[], None] | None = None) -> Tensor: ...


class _GroupBackends:
    """The backends of one process group, made when first asked for; they own the symmetric memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.collective = CollectiveBackend(group, deterministic=current_config().deterministic)
        self.copy_engine: Backend | None = None
        self.why_not = "the ranks run on a CPU"
        self._workspace = None
        if torch.cuda.is_available() and group.size() > 1:
            from megatron_fluid.comm.symmetric import SymmetricWorkspace, why_not_symmetric
            from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend

            reason = why_not_symmetric(group)
            self.why_not = reason or ""
            if reason is None:
                self._workspace = SymmetricWorkspace(group, current_config().timeout_s)
                self.copy_engine = CopyEngineBackend(self._workspace)

    def close(self) -> None:
        if self._workspace is not None:
            self._workspace.close()


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupBackends] = weakref.WeakKeyDictionary()


def close_backends(group: dist.ProcessGroup) -> None:
    """Give back the symmetric memory that tensor parallelism holds for ``group``. Collective."""
    found = _groups.pop(group, None)
    if found is not None:
        found.close()


def backend_for(name: str, group: dist.ProcessGroup, operation: str, m: int, n: int, k: int, a: Tensor) -> Backend:
    """The backend for one shape.

    Args:
        name: one of BACKENDS.
        operation: "gather" or "scatter".
        m, n, k: the whole GEMM on one rank, M rows.
        a: this rank's A, for its dtype and device.

    Raises:
        ConfigError: an unknown name, or a backend asked for by name that this group cannot have, with the reason.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend: found {name!r}, allowed: {', '.join(BACKENDS)}")
    backends = _groups.get(group)
    if backends is None:
        backends = _groups[group] = _GroupBackends(group)
    if name == "collective":
        return backends.collective
    if name == "copy_engine":
        if backends.copy_engine is None:
            raise ConfigError(
                f"backend: found 'copy_engine', allowed here: auto, collective, because {backends.why_not or 'the group has one rank'}"
            )
        return backends.copy_engine
    moved = m * (k if operation == "gather" else n) * a.element_size() * (group.size() - 1) / group.size()
    if backends.copy_engine is not None and 2 * m * n * k / _FLOPS + moved / _BYTES_PER_SECOND >= _WORTH_SECONDS:
        return backends.copy_engine
    return backends.collective
