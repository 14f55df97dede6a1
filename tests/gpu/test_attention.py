"""Context-parallel attention on GPUs, over symmetric memory and over NCCL, against the float64 oracle and against Transformer Engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.attention_cases import AttentionCase, megatron_attention, start_megatron
from megatron_fluid.attention.core_attention import CORE_KERNELS, CoreCase
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.packed import Rotary, _turn
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import PeerTimeoutError
from tests.distributed.test_attention import Case, check
from tests.launch import run_ranks
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


CASES = [
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


def test_rounds_equal_the_oracle() -> None:
    cases = [dataclasses.replace(case, exchange="rounds") for case in CASES]
    check(WORLD, *cases, backend="nccl", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("mover", "connections"), [("push", "32"), ("engine", "1")])
def test_symmetric_memory_equals_the_oracle(mover: str, connections: str) -> None:
    cases = [dataclasses.replace(case, exchange="symmetric", mover=mover) for case in CASES if case.overlap]
    straddling = dataclasses.replace(BASE, heads=12, kv_heads=6, exchange="symmetric", mover=mover, length=1000)
    check(WORLD, *cases, straddling, backend="nccl", env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})


def _graph(rank: int, world: int) -> None:
    layer = SelfAttention(
        256, 16, num_kv_heads=8, head_dim=64, group=dist.group.WORLD, rotary=Rotary(64), exchange="symmetric",
        device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    x, other = (torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        dist.broadcast(layer.linear_qkv.weight, 0)
        dist.broadcast(layer.linear_proj.weight, 0)
        expected = [layer(t) for t in (x, other)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, expected[0])
        x.copy_(other)
        graph.replay()
        assert torch.equal(y, expected[1])
        assert torch.equal(layer(other), expected[1]), "an eager call after replays"


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_forward_is_captured_in_a_cuda_graph() -> None:
    run_ranks(_graph, WORLD, backend="nccl")


def _alone(rank: int, world: int) -> str:
    set_config(FluidConfig(timeout_s=2.0))
    layer = SelfAttention(
        64, 8, head_dim=16, group=dist.group.WORLD, exchange="symmetric", device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(8, 1, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        if rank == world - 1:
            time.sleep(8)  # stays away from the second exchange
            return ""
        layer(x)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError) as caught:
            layer(x)
    return str(caught.value)


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_rank_that_stays_away_is_named() -> None:
    *said, _ = run_ranks(_alone, WORLD, backend="nccl")
    for rank, text in enumerate(said):
        assert f"rank {rank}" in text and str(WORLD - 1) in text and "attention heads" in text


def _megatron(rank: int, world: int, kv_heads: int) -> dict[str, float]:
    from megatron_fluid import patches

    case = AttentionCase(256, 16, kv_heads, 128 * world, 64)
    patches.apply_all()
    reason = start_megatron(context_parallel_size=world)
    assert reason is None, reason
    device = torch.device("cuda", rank)
    theirs, ours = (megatron_attention(case, device, backend) for backend in ("megatron", "nvlink"))
    ours.load_state_dict(theirs.state_dict())
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    kinds = [type(module.module.core_attention).__name__ for module in (theirs, ours)]
    assert kinds == ["TEDotProductAttention", "AllToAllTEDotProductAttention"]
    x = torch.randn(case.length // world, 2, 256, device=device, dtype=torch.bfloat16)
    upstream = torch.randn_like(x)
    results = []
    for module in (theirs, ours):
        mine = x.clone().requires_grad_()
        y = module(mine)
        y.backward(upstream)
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), "dx": mine.grad, **grads})
    assert results[0].keys() == results[1].keys() and len(results[0]) >= 5
    return {
        name: ((results[1][name].float() - b.float()).square().mean() / b.float().square().mean()).sqrt().item()
        for name, b in results[0].items()
    }


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_megatrons_attention_is_that_of_transformer_engines_own_exchange(kv_heads: int) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformer_engine.pytorch")
    for found in run_ranks(_megatron, WORLD, kv_heads, backend="nccl", timeout_s=200):
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-2)


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
