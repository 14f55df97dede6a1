"""Context-parallel attention on GPUs, over symmetric memory and over NCCL, against the float64
reference and against Transformer Engine."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils import checkpoint as checkpoints

from megatron_fluid.attention.attention_kernels import CoreCase, te_unsupported_reason
from megatron_fluid.attention.exchange import symmetric
from megatron_fluid.attention.exchange.protocol import Projection
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.config import current_config, set_config
from megatron_fluid.errors import FluidError, PeerTimeoutError
from tests.distributed.test_attention import Case, check
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS, SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]
WORLD = max(min(RANKS, 4), 1)

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


CASES = [
    BASE,
    dataclasses.replace(BASE, overlap=False, layout="zigzag", kv_heads=2),
    dataclasses.replace(
        BASE, groups=2 if WORLD <= 4 else 1, chunks=3, layout="zigzag", qk_norm=True, bias=True
    ),
    dataclasses.replace(BASE, kv_heads=1, chunks=2, scheduler=True, microbatches=2),
    dataclasses.replace(
        BASE, kv_heads=16, length=251, scheduler=True, layers=6, chunks=2, qk_norm=True
    ),
    dataclasses.replace(BASE, kv_heads=2, length=3, batch=1, causal=False),
    dataclasses.replace(BASE, window=40, rotary=None),
    dataclasses.replace(BASE, dtype=torch.float32, length=64, chunks=2, bias=True, qk_norm=True),
    dataclasses.replace(BASE, dtype=torch.float64, length=64, kv_heads=2, layout="zigzag"),
    dataclasses.replace(BASE, dtype=torch.float16, batch=1),
]


@pytest.mark.skipif(SHARED, reason="gloo sends no tensors of GPUs")
def test_rounds_equal_the_reference() -> None:
    cases = [dataclasses.replace(case, exchange="rounds") for case in CASES]
    check(WORLD, *cases, backend="nccl", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
@pytest.mark.parametrize(("transport", "connections"), [("sm_push", "32"), ("copy_engine", "1")])
def test_symmetric_memory_equals_the_reference(transport: str, connections: str) -> None:
    cases = [
        dataclasses.replace(case, exchange="symmetric", transport=transport)
        for case in CASES
        if case.overlap
    ]
    check(WORLD, *cases, backend="nccl", env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})


def _layer(kernel: str = "auto") -> SelfAttention:
    heads = {"num_kv_heads": 8, "head_dim": 64, "rotary": Rotary(64), "kernel": kernel}
    group, bf16 = dist.group.WORLD, torch.bfloat16
    return SelfAttention(
        256, 16, **heads, group=group, exchange="symmetric", device="cuda", dtype=bf16
    )


def _graph_layer(transport: str, world: int) -> SelfAttention:
    """A layer whose heads and rows move as ``transport`` says; "mixed": whichever sends more by the
    copy engine, the other by a kernel."""
    layer = _layer()
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)
    assert layer.head_buffers is not None
    layer.head_buffers.transport = "auto" if transport == "mixed" else transport
    if transport == "mixed":
        # Forward sends 32 heads of a position and brings 16 back; backward sends 16 and brings 32.
        symmetric._COPY_ENGINE_BYTES = 64 * 2 * 24 * 64 * 2 * (world - 1) // world
    return layer


def _graph(rank: int, world: int, transport: str) -> None:
    layer = _graph_layer(transport, world)
    chosen: list[str] = []
    choose = symmetric.choose_transport
    symmetric.choose_transport = lambda *of: chosen.append(choose(*of)) or chosen[-1]  # type: ignore[func-returns-value]
    x, other, upstream = (
        torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    x.requires_grad_()

    def forward(t: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [layer(t)]

    def step(t: torch.Tensor) -> list[torch.Tensor]:
        y = layer(t)
        return [y.detach(), *torch.autograd.grad(y, [t, *layer.parameters()], upstream)]

    def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        assert torch.equal(found[0], expected[0])
        for a, b in zip(
            found[1:], expected[1:], strict=True
        ):  # the attention kernel's backward adds in any order
            assert (a - b).float().square().mean() < 1e-4 * b.float().square().mean()

    for call in (forward, step):
        original = x.detach().clone()
        expected = [[t.clone() for t in call(of)] for of in (x, other.requires_grad_())]
        torch.cuda.synchronize()
        chosen.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call(x)
        ways = {
            "sm_push": ["sm_push"] * 4,
            "copy_engine": ["copy_engine"] * 4,
            "mixed": ["copy_engine", "sm_push", "sm_push", "copy_engine"],
        }[transport]
        assert chosen == ways[: 2 if call is forward else 4]
        for _ in range(3):
            graph.replay()
        check_equal(found, expected[0])
        x.data.copy_(other.detach())
        graph.replay()
        check_equal(found, expected[1])
        check_equal(call(other), expected[1])  # an eager call after replays
        x.data.copy_(original)


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
@pytest.mark.parametrize("transport", ["sm_push", "copy_engine", "mixed"])
def test_forward_and_backward_are_captured_in_cuda_graphs(transport: str) -> None:
    run_ranks(_graph, WORLD, transport, backend="nccl")


def _unfinished(rank: int, world: int) -> None:
    layer = _graph_layer("copy_engine", world)
    x = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        exchange, weights = layer.call(x).exchange, layer.weights()
        exchange.project("left", x, Projection(weights.w_qkv.t(), None))  # begun, and never taken
        torch.cuda.synchronize()
        with (
            pytest.raises(FluidError, match="one whole forward and backward before capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            layer(x)
        expected = layer(x)  # eagerly it is put in order
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
def test_a_capture_after_an_unfinished_exchange_says_so() -> None:
    run_ranks(_unfinished, WORLD, backend="nccl")


def _checkpointed(rank: int, world: int, kernel: str) -> None:
    layer = _layer(kernel)
    assert layer.head_buffers is not None
    layer.head_buffers.transport = "copy_engine"  # several head groups
    x, upstream = (torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = []
    for again in (False, True):
        mine = x.clone().requires_grad_()
        y = checkpoints.checkpoint(layer, mine, use_reentrant=False) if again else layer(mine)
        found.append([y.detach(), *torch.autograd.grad(y, [mine, *layer.parameters()], upstream)])
    for a, b in zip(*found, strict=True):  # the attention kernel's backward adds in any order
        assert (a - b).float().square().mean() < 1e-4 * b.float().square().mean()


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
@pytest.mark.parametrize("kernel", ["sdpa", "te"])
def test_checkpoints_without_reentry_leave_gradients_as_they_are(kernel: str) -> None:
    if kernel == "te":
        pytest.importorskip("transformer_engine.pytorch")
    run_ranks(_checkpointed, WORLD, kernel, backend="nccl")


def _alone(rank: int, world: int) -> str:
    def attention(group: dist.ProcessGroup | None) -> SelfAttention:
        return SelfAttention(
            64,
            8,
            head_dim=16,
            group=group,
            exchange="symmetric",
            device="cuda",
            dtype=torch.bfloat16,
        )

    x = torch.randn(8, 1, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        attention(dist.group.WORLD)(x)  # under the default timeout, as kernels are compiled here
        torch.cuda.synchronize()
        set_config(dataclasses.replace(current_config(), timeout_s=3.0))
        layer = attention(dist.new_group())
        for _ in range(2):  # ranks compare shapes in a first call, and in one after an equal one
            layer(x)
        torch.cuda.synchronize()
        if rank == world - 1:
            time.sleep(10)  # stays away from the next exchange
            return ""
        layer(x)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError) as caught:
            layer(x)
    return str(caught.value)


@pytest.mark.skipif(WORLD < 2, reason="needs 2 ranks on GPUs")
def test_a_rank_that_stays_away_is_named() -> None:
    *said, _ = run_ranks(_alone, WORLD, backend="nccl")
    for rank, text in enumerate(said):
        assert f"rank {rank}" in text and str(WORLD - 1) in text and "attention heads" in text


def test_the_kernel_of_transformer_engine() -> None:
    reason = te_unsupported_reason(CoreCase(64, torch.bfloat16, "cuda"))
    if reason is not None:
        pytest.skip(reason)
    base = dataclasses.replace(BASE, kernel="te")
    check(
        WORLD,
        base,
        dataclasses.replace(base, window=40, kv_heads=1),
        dataclasses.replace(base, causal=False),
        backend="nccl",
    )
