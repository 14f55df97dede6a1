"""Put kernels of the decode-time all-to-all, linked with NVSHMEM's device library. No cases where
that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch

# torch declares its bindings only where it sees a GPU that Triton can use; compiling needs none.
with patch("torch.utils._triton.has_triton", lambda: True):
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

from megatron_fluid.kernels.low_latency import nvshmem as low_latency_nvshmem
from megatron_fluid.low_latency import AllToAll, nvshmem, peer_memory
from megatron_fluid.low_latency.peer_memory import choose_tuning
from tests.support.kernel_cases import KernelCase
from tests.support.kernel_cases.low_latency import PROCESSORS, calls, layout_of, recorded
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["CASES"]


def _cases() -> Iterator[KernelCase]:
    try:
        library = NvshmemLibFinder.find_device_library()
    except RuntimeError as error:
        print(f"not compiled: {error}", file=sys.stderr)
        return
    uses = (
        ("r1", 128, torch.float8_e4m3fn, ("early", "bound")),
        ("v2-lite", 8, torch.bfloat16, ()),
        ("r1", 4, torch.bfloat16, ("early", "packed")),
    )
    for shape, tokens, dtype, chosen in uses:
        title = " ".join((f"{shape}-{tokens}", str(dtype).removeprefix("torch."), *chosen))
        options = {name: name in chosen for name in ("early", "bound", "packed")}
        layout = layout_of(shape, tokens, dtype)
        workspace = SimulatedWorkspace(layout.world_size, timeout_s=5.0)
        with (
            recorded(peer_memory) as recorder,
            patch.object(nvshmem.Nvshmem, "_kernel", staticmethod(_bare_kernel)),
        ):
            transport = nvshmem.Nvshmem(
                layout, workspace.rank(1), tuning=choose_tuning(layout, PROCESSORS)
            )
            calls(AllToAll(layout, transport, torch.device("cpu")), dtype, **options)
            found = [entry for entry in recorder.found if "_put_" in entry[0].fn.__name__]
        for kernel, constants, warps, kinds, absent in found:
            yield KernelCase(
                f"{kernel.fn.__name__}, {title}",
                kernel,
                kinds,
                {**constants, **dict.fromkeys(absent)},
                warps,
                wanted=("nvshmemi_device_state_d",),
                unwanted=(".extern .func",),
                libraries={"libnvshmem_device": library},
                spills=1 << 12,  # NVSHMEM's own functions keep a stack
            )


def _bare_kernel(name: str) -> object:
    """The kernel without the registration, which wants a GPU."""
    return getattr(low_latency_nvshmem, name)


CASES = list(_cases())
