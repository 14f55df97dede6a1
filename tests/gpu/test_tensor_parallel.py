"""The copy-engine form of AllGather-GEMM and GEMM-ReduceScatter on several GPUs: values, gradients, repeated calls, determinism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.tensor_parallel import all_gather_matmul, close_backends, matmul_reduce_scatter
from tests.distributed.test_tensor_parallel import check_case
from tests.launch import run_ranks
from tests.machine import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs at least 2 GPUs of one host, found {GPUS}"),
]


def _cases(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.bfloat16, torch.float16):
        for transpose_b in (False, True):
            for bias in (False, True):
                for backend in ("copy_engine", "collective"):
                    check_case(64, 96, 128, dtype, transpose_b, bias, backend, "cuda")
    # Growing and shrinking: the buffers serve every size after the largest.
    for m in (8, 256, 16, 512, 8):
        check_case(m, 128, 64, torch.bfloat16, True, True, "copy_engine", "cuda")
    close_backends(group)


@pytest.mark.parametrize("connections", ["1", "32"])
def test_values_and_gradients_equal_the_oracle(connections: str) -> None:
    run_ranks(_cases, min(GPUS, 8), backend="nccl", timeout_s=200, env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})


def _back_to_back(rank: int, ranks: int) -> None:
    """Many calls without a synchronisation between them, each rank at its own pace: a late reader must never see later data."""
    group = dist.group.WORLD
    assert group is not None
    m, n, k = 256, 512, 384
    generator = torch.Generator(device="cuda").manual_seed(5)
    shards = [torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(ranks * 20)]
    b = torch.randn(k, n, generator=generator, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(ranks * m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    busy = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    found, scattered = [], []
    for i in range(20):
        for _ in range((rank * 7 + i * 3) % 5):
            busy @ busy  # noqa: B018  this rank is late by a few GEMMs
        found.append(all_gather_matmul(shards[i * ranks + rank], b, group, return_gathered=True, backend="copy_engine"))
        scattered.append(matmul_reduce_scatter(wide * (i + 1 + rank), b, group, backend="copy_engine"))
    torch.cuda.synchronize()
    for i, (c, gathered) in enumerate(found):
        assert torch.equal(gathered, torch.cat(shards[i * ranks : (i + 1) * ranks])), f"call {i}"
        assert torch.isfinite(c).all()
    own = slice(rank * m, (rank + 1) * m)
    for i, c in enumerate(scattered):
        wanted = (wide[own].double() @ b.double()) * sum(i + 1 + r for r in range(ranks))
        assert (c.double() - wanted).norm() / wanted.norm() < 8e-3, f"call {i}"
    again = matmul_reduce_scatter(wide * (1 + rank), b, group, backend="copy_engine")
    assert torch.equal(again, scattered[0]), "not bitwise repeatable"
    close_backends(group)


def test_calls_without_a_barrier_between_them_do_not_mix() -> None:
    run_ranks(_back_to_back, min(GPUS, 8), backend="nccl", timeout_s=200)
