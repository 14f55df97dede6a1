"""The NVSHMEM transport: device-initiated puts with signals.

NVSHMEM's own settings choose what carries them, for example `NVSHMEM_IB_ENABLE_IBGDA=1` or
`NVSHMEM_REMOTE_TRANSPORT=ibrc|libfabric`; inside a host it is P2P. Receiving is the same as over
NVLink: bounded waits on local words, then the same kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.symmetric import SymmetricWorkspace, watched_mapping
from megatron_fluid.comm.workspace import Buffer, FlagRegion, Workspace
from megatron_fluid.cuda.triton_launch import power_of_two
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.peer_memory import PeerMemory, whole_rows
from megatron_fluid.low_latency.transport import CombineSend, DispatchSend

__all__ = ["Nvshmem", "NvshmemWorkspace", "nvshmem_unsupported_reason"]


def nvshmem_unsupported_reason(group: dist.ProcessGroup) -> str | None:
    """Why `group` cannot use NVSHMEM on this rank, or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    ranks = dist.get_process_group_ranks(group)
    step = max(1, ranks[-1] - ranks[-2]) if len(ranks) > 1 else 1
    if ranks != list(range(ranks[0], ranks[-1] + 1, step)):
        uneven = "are not evenly spaced among those of the world, NVSHMEM's processing elements"
        return f"the ranks of the group, {ranks}, {uneven}"
    if importlib.util.find_spec("torch.distributed._symmetric_memory._nvshmem_triton") is None:
        return "this torch has no NVSHMEM bindings for Triton"
    import torch.distributed._symmetric_memory as symmetric_memory

    if not symmetric_memory.is_nvshmem_available():
        return "this torch was built without NVSHMEM"
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    try:
        NvshmemLibFinder.find_device_library()
    except RuntimeError as error:
        remedy = "install nvidia-nvshmem-cu13 or set NVSHMEM_LIB_DIR"
        return f"libnvshmem_device.bc was not found; {remedy} ({error})"
    return None


class NvshmemWorkspace(SymmetricWorkspace):
    """Named buffers on NVSHMEM's symmetric heap. NVSHMEM names a peer's memory by the local address
    and the peer's rank, so every entry of `peer_pointers` is the local address.

    Construction is collective. It must come before any other symmetric memory of the process,
    because torch has one backend a process.
    """

    def _require(self, group: dist.ProcessGroup) -> None:
        reason = nvshmem_unsupported_reason(group)
        if reason is not None:
            raise ConfigError(f"transport: found 'nvshmem', which cannot be met: {reason}")
        import torch.distributed._symmetric_memory as symmetric_memory

        try:
            if symmetric_memory.get_backend(torch.device("cuda")) != "NVSHMEM":
                symmetric_memory.set_backend("NVSHMEM")
        except RuntimeError as error:
            raise ConfigError(
                "transport: found 'nvshmem', but this process already uses another "
                f"symmetric-memory backend ({error})"
            ) from error

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        import torch.distributed._symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(numel, dtype=dtype, device=self.device)
        with watched_mapping(self.group):
            handle = symmetric_memory.rendezvous(local, self.group)
        local.zero_()
        shape, address = (self.world_size,), local.data_ptr()
        pointers = torch.full(shape, address, dtype=torch.int64, device=self.device)
        return Buffer(local, [local] * self.world_size, pointers, handle)


class Nvshmem(PeerMemory):
    """Dispatch and combine of one rank over NVSHMEM.

    Args:
        elements: NVSHMEM's processing elements of the group's ranks, which are the ranks of the
            world.
    """

    name = "nvshmem"
    flag_stride = 2  # a signal has 64 bits
    _prefix = "nvshmem"

    def __init__(
        self,
        layout: Layout,
        workspace: Workspace,
        processors: int = 0,
        elements: Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout, workspace, processors)
        elements = range(layout.world_size) if elements is None else elements
        self._first_element = elements[0]
        self._element_step = elements[1] - elements[0] if len(elements) > 1 else 1
        self._small = 0  # unsummed rows would take a put each
        senders = max(self.tuning.dispatch_senders, self.tuning.combine_senders)
        width = layout.pitch + 2 * power_of_two(layout.experts_per_token) + 4
        entries = layout.max_num_tokens * layout.experts_per_token
        staging, _ = self._shared("staging", layout.max_num_tokens * width)
        pad, _ = self._shared("pad", layout.world_size * senders * 4)
        sums = layout.max_rows * layout.hidden_dim
        sum_staging, _ = self._shared("sum_staging", sums, layout.combine_dtype)
        weight_staging, _ = self._shared("weight_staging", entries, torch.float32)
        signals, errors = _signals(self._dispatch_flags), workspace.errors
        self._fixed["put"] = (staging, pad, self._region, signals, self.counters, errors.abort)
        self._fixed["put combine"] = (
            self.entry_row, self._region, sum_staging, self._sums, weight_staging, self._weights,
            pad, _signals(self._combine_flags), _signals(self._weight_flags), self.counters,
            errors.words, errors.abort,
        )  # fmt: skip

    @staticmethod
    def _kernel(name: str) -> Any:
        from megatron_fluid.kernels.low_latency import nvshmem as kernels

        kernel = getattr(kernels, name)
        register = getattr(kernels.nvshmem, "requires_nvshmem", None)
        return kernel if register is None else register(kernel)

    def dispatch_send(self, q: DispatchSend) -> None:
        x = whole_rows(q.x)
        key = ("put", q.x_scale is None, q.weights is None, q.bound_m is None, q.indices.dtype)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._prepare(
                key, self._kernel("dispatch_put_kernel"), 4, "dispatch",
                HAS_WEIGHTS=q.weights is not None, HAS_BOUND=q.bound_m is not None,
            )  # fmt: skip
        tensors = (x, q.x_scale, q.indices, q.weights, q.bound_m)
        x_stride = x.stride(0) * x.element_size() // 16
        scale_stride = 0 if q.x_scale is None else q.x_scale.stride(0)
        first, step = self._first_element, self._element_step
        integers = (x.shape[0], self.rank, first, step, x_stride, scale_stride)
        launch.start_aligned(self.tuning.dispatch_senders, tensors, integers)

    def combine_send(self, q: CombineSend) -> None:
        exchange = q.weights is not None
        key = ("put combine", exchange)
        launch = self._launches.get(key)
        if launch is None:
            kernel, block = self._kernel("combine_put_kernel"), self.tuning.combine_block
            launch = self._prepare(key, kernel, 8, "combine", EXCHANGE=exchange, BLOCK=block)
        tokens = 0 if q.weights is None else q.weights.shape[0]
        integers = (
            tokens, self.rank, self._first_element, self._element_step, self._timeout_ns,
            self._weight_flags.operation, *self._strides_of(q.expert_y),
        )  # fmt: skip
        launch.start_aligned(self.tuning.combine_senders, (q.weights, q.expert_y), integers)


def _signals(region: FlagRegion) -> Tensor:
    return region.flags.view(torch.int64)
