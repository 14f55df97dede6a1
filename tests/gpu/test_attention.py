"""Context-parallel attention on GPUs over NCCL against the float64 oracle, and the rotary kernel against its own."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from megatron_fluid.attention.core_attention import CORE_KERNELS, CoreCase
from megatron_fluid.attention.packed import Rotary, _turn
from tests.distributed.test_attention import Case, check
from tests.machine import GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]
WORLD = 4 if GPUS >= 4 else max(GPUS, 1)

BASE = Case(
    length=256,
    batch=2,
    hidden=256,
    heads=16,
    kv_heads=8,
    head_dim=64,
    rotary=Rotary(64),
    dtype=torch.bfloat16,
    layers=2,
)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_rotary_kernel_equals_its_oracle(interleaved: bool, inverse: bool, dtype: torch.dtype) -> None:
    for dim, rotated, heads in ((128, 128, 5), (64, 32, 3), (80, 80, 1), (96, 24, 7), (6, 2, 2)):
        x = torch.randn(37, 3, heads + 2, dim, dtype=dtype)
        table = Rotary(rotated, 1000.0, interleaved).table(37, x.device, dtype)
        expected = torch.full_like(x, 7.0)
        _turn(x[:, :, :heads], expected[:, :, :heads], table, inverse)
        on_gpu = dataclasses.replace(table, cos=table.cos.cuda(), sin=table.sin.cuda())
        source, target = x.cuda(), torch.full_like(x, 7.0).cuda()
        _turn(source[:, :, :heads], target[:, :, :heads], on_gpu, inverse)
        _turn(source[:, :, :heads], source[:, :, :heads], on_gpu, inverse)  # in place
        tolerance = {torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(target.cpu(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(source[:, :, :heads], target[:, :, :heads])
        assert torch.equal(source[:, :, heads:].cpu(), x[:, :, heads:])


@pytest.mark.parametrize("connections", ["1", "32"])
def test_equals_the_oracle(connections: str) -> None:
    cases = [
        BASE,
        dataclasses.replace(BASE, overlap=False, layout="zigzag", kv_heads=2),
        dataclasses.replace(BASE, groups=2 if WORLD <= 4 else 1, chunks=3, layout="zigzag", qk_norm=True, bias=True),
        dataclasses.replace(BASE, kv_heads=1, chunks=2, scheduler=True, microbatches=2),
        dataclasses.replace(BASE, kv_heads=16, length=251, scheduler=True, layers=6, chunks=2),
        dataclasses.replace(BASE, kv_heads=2, length=3, batch=1, causal=False),
        dataclasses.replace(BASE, window=40, rotary=None),
        dataclasses.replace(BASE, dtype=torch.float32, length=64, chunks=2, bias=True, qk_norm=True),
        dataclasses.replace(BASE, dtype=torch.float64, length=64, kv_heads=2, layout="zigzag"),
        dataclasses.replace(BASE, dtype=torch.float16, batch=1),
    ]
    check(WORLD, *cases, backend="nccl", env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})


@pytest.mark.parametrize(("kernel", "package"), [("flash_attn", "flash_attn"), ("te", "transformer_engine")])
def test_other_kernels(kernel: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    reason = CORE_KERNELS[kernel].refuses(CoreCase(64, torch.bfloat16, "cuda"))
    if reason is not None:
        pytest.skip(reason)
    base = dataclasses.replace(BASE, kernel=kernel)
    check(
        WORLD,
        base,
        dataclasses.replace(base, window=40, kv_heads=1),
        dataclasses.replace(base, causal=False),
        backend="nccl",
    )
