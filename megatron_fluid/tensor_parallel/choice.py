"""Which backend serves a shape: asked for by name, or the fastest of a near shape that was
measured, or by a rule.

Table and rule depend on sizes, dtypes, strides, the group and the GPU's name alone, and on what
every rank does alike (A on a GPU, a CUDA-graph capture, operands that begin on 16-byte boundaries),
so every rank decides alike without asking.

The overlapped forms keep the turn of their halves, or the number of the call, on the host: a replay
would use what it was at the capture, and a peer might overwrite what is still read. So a capture is
the collective's, and a form asked for by name refuses it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.config import current_config
from megatron_fluid.cuda.hopper_kernels import is_hopper
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fused_gemm import MOST_RANKS
from megatron_fluid.tensor_parallel.collective import CollectiveBackend
from megatron_fluid.tensor_parallel.gemm import Gemm, Product
from megatron_fluid.tensor_parallel.halves import refuse_capture
from megatron_fluid.tensor_parallel.measured import MEASURED

if TYPE_CHECKING:
    from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
    from megatron_fluid.tensor_parallel.flagged import FlaggedBackend
    from megatron_fluid.tensor_parallel.fused import FusedBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "backend_for",
    "backends_of",
    "measured_backend",
    "overlapped_backends",
]

BACKENDS = ("auto", "copy_engine", "flagged", "fused", "collective")

_NEAR = (
    1.0  # a measured shape speaks for another whose M, N and K are at most twice or half its own
)

# Where nothing near was measured: what a collective and then a GEMM take is estimated from rates
# that H200s reach over NVLink; below this sum there is little to hide behind, and the launches of
# the overlapped form cost the host more than they save.
_FLOPS = 650e12
_BYTES_PER_SECOND = 300e9
_WORTH_SECONDS = 400e-6
_FUSED_SECONDS = (
    150e-6  # of the GEMM alone: a launch and a few copies a peer cost the host less than that
)


class Backend(Protocol):
    """What moves and multiplies; see `CollectiveBackend` for the meaning of each method."""

    name: str

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]: ...

    def gather_matmul(
        self, a_shard: Tensor, gemm: Product, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]: ...

    def matmul_scatter(
        self, a: Tensor, gemm: Product, beside: Callable[[], None] | None = None
    ) -> Tensor: ...


class _GroupBackends:
    """The backends of one process group of several ranks on GPUs, made when first asked for; they
    own the symmetric memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from megatron_fluid.comm.symmetric import SymmetricWorkspace, symmetric_unsupported_reason
        from megatron_fluid.cuda.copy_engine import CudaDriver
        from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
        from megatron_fluid.tensor_parallel.flagged import FlaggedBackend
        from megatron_fluid.tensor_parallel.fused import FusedBackend

        self.collective = CollectiveBackend(group)
        self.copy_engine: CopyEngineBackend | None = None
        self.flagged: FlaggedBackend | None = None
        self.fused: FusedBackend | None = None
        self.gpu = torch.cuda.get_device_name()
        self.why_not = symmetric_unsupported_reason(group)
        self._workspace = None
        if self.why_not is None:
            self._workspace = SymmetricWorkspace(group, current_config().timeout_s)
            driver = CudaDriver(self._workspace.device)
            self.copy_engine = copy_engine = CopyEngineBackend(self._workspace, driver)
            self.flagged = FlaggedBackend(self._workspace, driver, copy_engine)
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


def overlapped_backends(name: str, group: dist.ProcessGroup, a: Tensor) -> _GroupBackends | None:
    """The backends of a group where `name` may get one of the overlapped for `a`, or None: the
    collective's. Collective the first time.

    Raises:
        ConfigError: one asked for by name that cannot be had, with the reason.
        FluidError: one asked for by name in a CUDA-graph capture.
    """
    if name == "collective":
        return None
    if group.size() == 1:
        reason: str | None = "the group has one rank"
    elif not a.is_cuda:
        reason = f"its operands are on a {a.device.type.upper()}"
    elif torch.cuda.is_current_stream_capturing():
        refuse_capture(name, name != "auto")
        return None
    else:
        backends = backends_of(group)
        reason = backends.why_not
        if reason is None:
            return backends
    if name == "auto":
        return None
    raise ConfigError(f"backend: found {name!r}, allowed here: auto, collective, because {reason}")


def backend_for(
    name: str, group: dist.ProcessGroup, operation: str, gemm: Gemm, m: int, a: Tensor
) -> Backend:
    """The backend for one shape.

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
        raise ConfigError(f"backend: found {name!r}, allowed: {', '.join(BACKENDS)}")
    backends = overlapped_backends(name, group, a)
    if backends is None:
        return CollectiveBackend(group)
    assert backends.copy_engine is not None and backends.flagged is not None
    if name == "copy_engine":
        backends.copy_engine.check(a, gemm)
        return backends.copy_engine
    if name == "flagged":
        backends.flagged.check(a, gemm)
        return backends.flagged
    if name == "fused":
        if backends.fused is None:
            found = f"{group.size()} ranks, {backends.gpu}"
            reason = (
                f"its kernels are for at most {MOST_RANKS} ranks on Hopper GPUs, not for {found}"
            )
            raise ConfigError(
                "backend: found 'fused', allowed here: auto, copy_engine, flagged, collective, "
                f"because {reason}"
            )
        backends.fused.check(a, gemm, m)
        return backends.fused
    if not backends.copy_engine.serves(a, gemm):
        return backends.collective
    chosen = _from_table(backends.gpu, group.size(), operation, m, gemm.n, gemm.k)
    if chosen == "flagged" and backends.flagged.serves(a, gemm):
        return backends.flagged
    if chosen == "fused" and backends.fused is not None and backends.fused.serves(a, gemm, m):
        return backends.fused
    if chosen is not None:
        return backends.collective if chosen == "collective" else backends.copy_engine
    fused = backends.fused
    worth = 2 * m * gemm.n * gemm.k / _FLOPS >= _FUSED_SECONDS
    if (
        fused is not None
        and worth
        and fused.serves(a, gemm, m)
        and fused.fills_waves(a, gemm, m, operation)
    ):
        return fused
    moved = (
        m
        * (gemm.k if operation == "gather" else gemm.n)
        * a.element_size()
        * (group.size() - 1)
        / group.size()
    )
    if 2 * m * gemm.n * gemm.k / _FLOPS + moved / _BYTES_PER_SECOND >= _WORTH_SECONDS:
        return backends.copy_engine
    return backends.collective


@functools.lru_cache(maxsize=4096)  # small GEMMs feel what every call costs the host
def _from_table(gpu: str, ranks: int, operation: str, m: int, n: int, k: int) -> str | None:
    return measured_backend(MEASURED, gpu, ranks, operation, m, n, k)


def measured_backend(
    table: Iterable[tuple[str, int, str, int, int, int, str]],
    gpu: str,
    ranks: int,
    operation: str,
    m: int,
    n: int,
    k: int,
) -> str | None:
    """The backend of the nearest measured shape (in the largest ratio of M, N and K, then in all
    three), or None where none is near.

    Args:
        table: entries as in megatron_fluid.tensor_parallel.measured.

    >>> measured_backend([("H200", 4, "gather", 1024, 512, 512, "flagged")], "H200", 4, "gather", 2048, 512, 512)
    'flagged'
    """
    best: tuple[float, float, str] | None = None
    for entry_gpu, entry_ranks, entry_operation, em, en, ek, backend in table:
        if (entry_gpu, entry_ranks, entry_operation) != (gpu, ranks, operation):
            continue
        apart = [
            abs(math.log2(found / known)) for found, known in ((m, em), (n, en), (k, ek)) if found
        ]
        largest, total = max(apart), sum(apart)
        if largest <= _NEAR and (best is None or (largest, total) < best[:2]):
            best = largest, total, backend
    return None if best is None else best[2]
