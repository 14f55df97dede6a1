"""Which backend serves a shape: the one asked for by name, else the fastest of the nearest measured
shape (measured.py).

Every rank chooses the same without communication: the choice depends on sizes, dtypes, strides, the
group, and on what holds on all ranks alike (A on a GPU, a CUDA-graph capture, operands that begin
on 16-byte boundaries).

A capture gets the collective. The overlapped backends count their calls on the host: a replay would
reuse the captured number, and overwrite what a peer still reads. They refuse a capture by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fused_gemm.launch import MOST_RANKS
from megatron_fluid.tensor_parallel.backend import Backend, refuse_capture
from megatron_fluid.tensor_parallel.collective import CollectiveBackend
from megatron_fluid.tensor_parallel.gemm import Gemm
from megatron_fluid.tensor_parallel.measured import measured_backend

if TYPE_CHECKING:
    from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
    from megatron_fluid.tensor_parallel.fused import FusedBackend

__all__ = ["BACKENDS", "Backend", "backend_for", "backends_of"]

BACKENDS = ("auto", "copy_engine", "fused", "collective")


class _GroupBackends:
    """The backends of one process group of several ranks on GPUs. They own the symmetric memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from megatron_fluid.comm.symmetric import SymmetricWorkspace, symmetric_unsupported_reason
        from megatron_fluid.cuda.copy_engine import CudaDriver
        from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
        from megatron_fluid.tensor_parallel.fused import FusedBackend

        self.collective = CollectiveBackend(group)
        self.copy_engine: CopyEngineBackend | None = None
        self.fused: FusedBackend | None = None
        self.gpu = torch.cuda.get_device_name()
        self.unsupported_reason = symmetric_unsupported_reason(group)
        self._workspace = None
        if self.unsupported_reason is None:
            self._workspace = SymmetricWorkspace(group, wait_timeout_s(group))
            driver = CudaDriver(self._workspace.device)
            self.copy_engine = CopyEngineBackend(self._workspace, driver)
            if is_hopper(torch.cuda.current_device()) and group.size() <= MOST_RANKS:
                self.fused = FusedBackend(self._workspace, driver)

    def close(self) -> None:
        if self._workspace is not None:
            self._workspace.close()


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
        ConfigError: an unknown name, or a backend asked for by name that this group or these
            operands cannot have, with the reason.
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
        return CollectiveBackend(group)
    if reason is not None:
        allowed = f"allowed here: auto, collective, because {reason}"
        raise ConfigError(f"backend: found {name!r}, {allowed}")
    assert backends is not None and backends.copy_engine is not None
    copy_engine, fused = backends.copy_engine, backends.fused
    if name == "fused" and fused is None:
        found = f"{group.size()} ranks, {backends.gpu}"
        reason = f"its kernels are for at most {MOST_RANKS} ranks on Hopper GPUs, not for {found}"
        allowed = "auto, copy_engine, collective"
        raise ConfigError(f"backend: found 'fused', allowed here: {allowed}, because {reason}")
    if name != "auto":
        asked = copy_engine if name == "copy_engine" else fused
        assert asked is not None
        asked.check(a, gemm, m)
        return asked
    if copy_engine.unsupported_reason(a, gemm, m) is not None:
        return backends.collective
    chosen = measured_backend(backends.gpu, group.size(), operation, m, gemm.n, gemm.k)
    if chosen == "collective":
        return backends.collective
    fits = fused is not None and fused.unsupported_reason(a, gemm, m) is None
    return fused if fused is not None and fits and chosen == "fused" else copy_engine
