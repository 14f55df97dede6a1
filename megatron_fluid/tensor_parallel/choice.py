"""Which backend serves a shape: the one asked for by name, else the fastest of the nearest measured
shape in measured.json, which `python -m benchmarks.tune.tp_table` writes from result files.

Every rank chooses the same without communication: the choice depends on sizes, dtypes, strides, the
group, and on what holds on all ranks alike (A on a GPU, a CUDA-graph capture, operands that begin
on 16-byte boundaries).

A capture gets the collective. The overlapped backends count their calls on the host: a replay would
reuse the captured number, and overwrite what a peer still reads. They refuse a capture by name.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.groups import group_resource, wait_timeout_s
from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fused_gemm.launch import MOST_RANKS
from megatron_fluid.tensor_parallel.backend import Backend, refuse_capture
from megatron_fluid.tensor_parallel.collective import collective_of
from megatron_fluid.tensor_parallel.gemm import Gemm

if TYPE_CHECKING:
    from megatron_fluid.comm.symmetric import SymmetricWorkspace
    from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
    from megatron_fluid.tensor_parallel.fused import FusedBackend

__all__ = ["BACKENDS", "TABLE", "Entry", "backend_for", "backends_of", "measured_backend"]

BACKENDS = ("auto", "copy_engine", "fused", "collective")
TABLE = files("megatron_fluid.tensor_parallel") / "measured.json"

Entry = tuple[str, int, str, int, int, int, str]
"""GPU, ranks, "gather" or "scatter", M, N and K of the GEMM of one rank, backend."""


@functools.cache
def read_table() -> tuple[Entry, ...]:
    """The entries of measured.json."""
    return tuple(tuple(entry) for entry in json.loads(TABLE.read_text()))  # type: ignore[misc]


@functools.lru_cache(maxsize=4096)  # the host time of every call counts for small GEMMs
def measured_backend(gpu: str, ranks: int, operation: str, m: int, n: int, k: int) -> str:
    """`nearest_backend` of measured.json."""
    return nearest_backend(read_table(), gpu, ranks, operation, (m, n, k))


def nearest_backend(
    table: Iterable[Entry], gpu: str, ranks: int, operation: str, shape: tuple[int, int, int]
) -> str:
    """Return the backend of the nearest measured shape (M, N, K): by the largest ratio of M, N and
    K, then by the product of all three. "collective" where M, N or K is less than half of any that
    was measured: overlap costs the host more there than it saves.

    A GPU that was not measured has the entries of those that were, and a number of ranks those of
    the nearest number.

    >>> nearest_backend([("H200", 4, "gather", 1024, 512, 512, "fused")],
    ...                 "H200", 4, "gather", (2048, 512, 512))
    'fused'
    """
    if not all(shape):
        return "collective"
    entries = [entry for entry in table if entry[2] == operation]
    entries = [entry for entry in entries if entry[0] == gpu] or entries
    measured = min({entry[1] for entry in entries}, key=lambda n: (abs(math.log2(n / ranks)), n))
    best = math.inf, math.inf, "collective"
    for entry in entries:
        smaller = [math.log2(n / size) for n, size in zip(entry[3:6], shape, strict=True)]
        if entry[1] == measured and max(smaller) <= 1:
            apart = [abs(ratio) for ratio in smaller]
            best = min(best, (max(apart), sum(apart), entry[6]))
    return best[2]


class _GroupBackends:
    """The backends of one process group of several ranks on GPUs. They own the symmetric memory."""

    copy_engine: CopyEngineBackend | None = None
    fused: FusedBackend | None = None
    workspace: SymmetricWorkspace | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        from megatron_fluid.comm.symmetric import SymmetricWorkspace, symmetric_unsupported_reason
        from megatron_fluid.cuda.copy_engine import CudaDriver
        from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
        from megatron_fluid.tensor_parallel.fused import FusedBackend

        self.collective = collective_of(group)
        self.gpu = torch.cuda.get_device_name()
        self.unsupported_reason = symmetric_unsupported_reason(group)
        if self.unsupported_reason is None:
            self.workspace = SymmetricWorkspace(group, wait_timeout_s(group))
            driver = CudaDriver(self.workspace.device)
            self.copy_engine = CopyEngineBackend(self.workspace, driver)
            if is_hopper(torch.cuda.current_device()) and group.size() <= MOST_RANKS:
                self.fused = FusedBackend(self.workspace, driver)

    def close(self) -> None:
        if self.workspace is not None:
            self.workspace.close()


def backends_of(group: dist.ProcessGroup) -> _GroupBackends:
    """The backends of a group. Collective the first time."""
    return group_resource(
        group, "tensor parallel", lambda: _GroupBackends(group), close=_GroupBackends.close
    )


def backend_for(
    name: str, group: dist.ProcessGroup, operation: str, gemm: Gemm, m: int, a: Tensor
) -> Backend:
    """Return the backend for one shape. Collective the first time.

    Args:
        name: one of BACKENDS.
        operation: "gather" or "scatter".
        gemm: the product.
        m: the rows of the whole GEMM on one rank.
        a: this rank's A of two dimensions, or one like it: its dtype, device and alignment count.

    Raises:
        ConfigError: an unknown name, or a backend asked for by name that this group cannot have,
            with the reason. A backend itself refuses operands that it cannot multiply.
        FluidError: an overlapped one asked for by name in a CUDA-graph capture.
    """
    if name not in BACKENDS:
        raise ConfigError.of("backend", name, ", ".join(BACKENDS))
    backends, reason = None, None
    if group.size() == 1:
        reason = "the group has one rank"
    elif not a.is_cuda:
        reason = f"its operands are on a {a.device.type.upper()}"
    elif name != "collective" and torch.cuda.is_current_stream_capturing():
        refuse_capture(name, name != "auto")
        name = "collective"
    elif name != "collective":
        backends = backends_of(group)
        reason = backends.unsupported_reason
    if name == "collective" or (name == "auto" and reason is not None):
        return collective_of(group)
    if backends is None or reason is not None:
        allowed = f"allowed here: auto, collective, because {reason}"
        raise ConfigError(f"backend: found {name!r}, {allowed}")
    copy_engine, fused = backends.copy_engine, backends.fused
    assert copy_engine is not None
    if name == "fused" and fused is None:
        found = f"{group.size()} ranks, {backends.gpu}"
        reason = f"its kernels are for at most {MOST_RANKS} ranks on Hopper GPUs, not for {found}"
        allowed = "auto, copy_engine, collective"
        raise ConfigError(f"backend: found 'fused', allowed here: {allowed}, because {reason}")
    if name != "auto":
        return fused if name == "fused" and fused is not None else copy_engine
    chosen = measured_backend(backends.gpu, group.size(), operation, m, gemm.n, gemm.k)
    if chosen == "fused" and fused is not None and fused.unsupported_reason(a, gemm, m) is None:
        return fused
    fits = chosen != "collective" and copy_engine.unsupported_reason(a, gemm, m) is None
    return copy_engine if fits else backends.collective
