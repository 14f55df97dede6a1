"""The memory of a rank does not grow with the iterations, but for torch's flight recorder of the
last 2,000 collectives, about 1.2 KiB each, also without this package: it is made small here.
"""

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch

from tests.support import tiny_gpt
from tests.support.launch import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode")

ITERATIONS, LEAST_LEAK = 40, 1024  # a leak of this many bytes an iteration is found


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        .split()
    ]  # fmt: skip


def _held() -> tuple[int, int, int]:
    """Bytes that malloc has given out, blocks of Python's own allocator, open files."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    files = len(list(Path("/proc/self/fd").iterdir()))
    return mallinfo().uordblks, sys.getallocatedblocks(), files


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@on_ranks(2, env={"TORCH_FR_BUFFER_SIZE": "8", "TORCH_NCCL_TRACE_BUFFER_SIZE": "8"})
def test_iterations_leave_nothing_behind(rank: int, world: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=world)
    with tiny_gpt.plug_in(True):
        layers = [tiny_gpt.moe_layer(tiny_gpt.config_of()) for _ in range(2)]
        given = torch.randn(16, 2, 32)

        def iterate() -> None:
            x = given.clone().requires_grad_()
            y = x
            for layer in layers:
                y = layer(y)[0]
            y.sum().backward()
            for layer in layers:
                layer.zero_grad()

        for _ in range(60):  # what is kept once a process comes in the first ones
            iterate()
        before = _held()
        for _ in range(ITERATIONS):
            iterate()
        malloc, blocks, files = (now - then for now, then in zip(_held(), before, strict=True))
    assert malloc < LEAST_LEAK * ITERATIONS
    assert blocks < 10 * ITERATIONS
    assert files <= 0
