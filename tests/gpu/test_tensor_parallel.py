"""The copy-engine form of AllGather-GEMM and GEMM-ReduceScatter on several GPUs: values, gradients,
repeated calls, determinism."""

import dataclasses
import time

import pytest
import torch

from megatron_fluid import close_group
from megatron_fluid.config import current_config, set_config
from megatron_fluid.cuda.devices import multiprocessors
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.kernels.fused_gemm import launch as fused_gemm
from megatron_fluid.kernels.fused_gemm.launch import splits_of_depth
from megatron_fluid.tensor_parallel import all_gather_matmul, fused, matmul_reduce_scatter
from tests.distributed.test_tensor_parallel import check_case
from tests.support.captured import replayed
from tests.support.launch import run_ranks, world_group
from tests.support.machine import GPUS, RANKS, SHARED

# Ranks compile their kernels at their own pace, but none takes this long: a lost signal is reported
# instead of holding the GPUs.
TIMEOUT = {"MEGATRON_FLUID_TIMEOUT_S": "40"}

if SHARED:
    # Between ranks on one GPU a copy is a kernel, which finds no SM while the GEMM that waits for
    # it has them all.
    fused_gemm.multiprocessors = lambda index: multiprocessors(index) - 12

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS < 2, reason=f"needs at least 2 ranks on GPUs, found {RANKS}"),
]
ON_HOPPER = pytest.mark.skipif(
    GPUS > 0 and torch.cuda.get_device_capability() != (9, 0),
    reason="its kernels are for Hopper GPUs",
)


def _cases(rank: int, ranks: int) -> None:
    group = world_group()
    for dtype in (torch.bfloat16, torch.float16):
        for transpose_b in (False, True):
            for bias in (False, True):
                for backend in ("copy_engine", "fused", "collective"):
                    check_case(64, 96, 128, dtype, transpose_b, bias, backend, "cuda")
    # Growing and shrinking: the buffers serve every size after the largest.
    for m in (8, 256, 16, 512, 8):
        for backend in ("copy_engine", "fused"):
            check_case(m, 128, 64, torch.bfloat16, True, True, backend, "cuda")
    # Several tiles a block and a program, with edges.
    for transpose_b in (True, False):
        check_case(416, 1040, 208, torch.bfloat16, transpose_b, True, "fused", "cuda")
    # Every width of a tile, waves that are not whole, more tiles than a strip.
    for m, n in ((32, 512), (96, 512), (160, 256), (192, 256), (224, 256), (288, 256), (900, 272)):
        check_case(m, n, 192, torch.bfloat16, True, False, "fused", "cuda")
    close_group(group)


@pytest.mark.parametrize("connections", ["1", "32"])
def test_values_and_gradients_equal_the_reference(connections: str) -> None:
    run_ranks(
        _cases,
        min(RANKS, 8),
        backend="nccl",
        timeout_s=200,
        env={**TIMEOUT, "CUDA_DEVICE_MAX_CONNECTIONS": connections},
    )


def _many_chunks() -> None:
    """From here on, the fused form moves even small blocks in as many chunks as it may."""
    fused._GATHER_BYTES = fused._SCATTER_BYTES = 1 << 10
    fused_gemm._ROWS_A_WAVE = 0
    fused_gemm.rows_before.cache_clear()


def _long(rank: int, ranks: int) -> None:
    """Blocks of more tiles than a strip, in many chunks, compared row by row."""
    group = world_group()
    _many_chunks()
    m, n, k = 5000, 1040, 416
    generator = torch.Generator(device="cuda").manual_seed(11)
    whole = torch.randn(ranks * m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    own = slice(rank * m, (rank + 1) * m)
    wanted = whole.float() @ b.float().t()
    for turn in range(3):
        c = all_gather_matmul(whole[own], b, group, transpose_b=True, backend="fused")
        total = matmul_reduce_scatter(
            whole * (1 + rank), b, group, transpose_b=True, backend="fused"
        )
        for found, right in ((c, wanted), (total, wanted[own] * (ranks * (ranks + 1) // 2))):
            error = (found.float() - right).norm(dim=1) / right.norm(dim=1)
            assert error.max() < 1.5e-2, (
                f"turn {turn}: row {int(error.argmax())} is off by {float(error.max()):.1e}"
            )
    close_group(group)


@ON_HOPPER
def test_every_row_of_long_blocks_is_right() -> None:
    run_ranks(_long, min(RANKS, 8), backend="nccl", timeout_s=200, env=TIMEOUT)


def _split(rank: int, ranks: int) -> None:
    """So few tiles and so long a K that tiles are cut along it: rows right, the same each time."""
    group = world_group()
    _many_chunks()
    m, n, k = 250, 2064, 16384 + 176
    clusters = (
        torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2
    )
    assert splits_of_depth(m, n, k, ranks, clusters) > 1
    generator = torch.Generator(device="cuda").manual_seed(13)
    whole = torch.randn(ranks * m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(n, generator=generator, device="cuda", dtype=torch.bfloat16)
    own = slice(rank * m, (rank + 1) * m)
    wanted = whole.float() @ b.float().t() + bias.float()
    first = None
    for turn in range(5):
        c = all_gather_matmul(whole[own], b, group, transpose_b=True, bias=bias, backend="fused")
        error = (c.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert error.max() < 5e-3, (
            f"turn {turn}: row {int(error.argmax())} is off by {float(error.max()):.1e}"
        )
        first = c if first is None else first
        assert torch.equal(c, first), "not bitwise repeatable"
    close_group(group)


@ON_HOPPER
def test_tiles_that_are_cut_along_k_are_added_up_in_order() -> None:
    run_ranks(_split, min(RANKS, 4), backend="nccl", timeout_s=200, env=TIMEOUT)


def _alone(rank: int, ranks: int, operation: str) -> str:
    group = world_group()
    a = torch.randn(ranks * 256, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        if operation == "gather":
            all_gather_matmul(a[:256], b, group, backend="fused")
        else:
            matmul_reduce_scatter(a, b, group, backend="fused")

    call()  # under a longer bound, as kernels are compiled here
    torch.cuda.synchronize()
    close_group(group)
    set_config(dataclasses.replace(current_config(), timeout_s=4.0))
    for _ in range(2):  # ranks compare a shape at first, and when it follows itself
        call()
    torch.cuda.synchronize()
    if rank == ranks - 1:
        time.sleep(12)  # stays away from this one
        return ""
    call()
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeoutError) as caught:
        call()
    return str(caught.value)


@ON_HOPPER
@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_the_fused_form_names_a_rank_that_stays_away(operation: str) -> None:
    ranks = min(RANKS, 4)
    *said, _ = run_ranks(_alone, ranks, operation, backend="nccl", timeout_s=60, env=TIMEOUT)
    for rank, text in enumerate(said):
        assert (
            f"rank {rank}" in text
            and f"peer {ranks - 1}" in text
            and f"tp_fused_{operation}" in text
        )


def _captured(rank: int, ranks: int) -> None:
    group = world_group()
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    x, up, down = (torch.randn(size, **made) for size in ((64, 128), (256, 128), (128, 256)))  # type: ignore[call-overload]

    def step() -> tuple[torch.Tensor, ...]:
        h = all_gather_matmul(x, up, group, transpose_b=True)
        y = matmul_reduce_scatter(h, down, group, transpose_b=True)
        return (y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, up, down]))

    for captured, expected in replayed(step, x):
        for mine, right in zip(captured, expected, strict=True):
            assert (mine - right).float().norm() < 0.01 * right.float().norm()
    close_group(group)


@pytest.mark.skipif(SHARED, reason="gloo sends no tensors of GPUs")
def test_a_captured_step_equals_the_eager_one() -> None:
    run_ranks(_captured, 2, backend="nccl", timeout_s=100, env=TIMEOUT)
