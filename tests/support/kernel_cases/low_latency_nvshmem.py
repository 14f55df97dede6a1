"""Put kernels of the decode-time all-to-all, linked with NVSHMEM's device library. No cases where
that is not installed."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch

# torch declares its bindings only where it sees a GPU that Triton can use; compiling needs none.
with patch("torch.utils._triton.has_triton", lambda: True):
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

from megatron_fluid.kernels.low_latency import nvshmem as low_latency_nvshmem
from megatron_fluid.low_latency.nvshmem import Nvshmem
from tests.support.kernel_cases import KernelCase
from tests.support.kernel_cases.low_latency import uses


def _cases() -> Iterator[KernelCase]:
    try:
        library = NvshmemLibFinder.find_device_library()
    except RuntimeError as error:
        print(f"not compiled: {error}", file=sys.stderr)
        return
    chosen = (
        ("r1", 128, torch.float8_e4m3fn, "early, bound"),
        ("v2-lite", 8, torch.bfloat16, "packed"),
    )
    with patch.object(Nvshmem, "_kernel", staticmethod(_bare_kernel)):
        for _, cases in uses(Nvshmem, *chosen):
            yield from (
                replace(
                    case,
                    wanted=("nvshmemi_device_state_d",),
                    unwanted=(".extern .func",),
                    libraries={"libnvshmem_device": library},
                    spills=1 << 12,  # NVSHMEM's own functions keep a stack
                )
                for case in cases
                if "_put_" in case.kernel_name
            )


def _bare_kernel(name: str) -> object:
    """The kernel without the registration, which wants a GPU."""
    return getattr(low_latency_nvshmem, name)


CASES = list(_cases())
