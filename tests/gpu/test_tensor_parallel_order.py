"""Overlapped linears called without a barrier between them, or while other streams are busy."""

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import close_group
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from megatron_fluid.tensor_parallel.choice import backends_of
from tests.gpu.test_tensor_parallel import TIMEOUT, _many_chunks
from tests.support.launch import run_ranks, world_group
from tests.support.machine import RANKS, SHARED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS < 2, reason=f"needs at least 2 ranks on GPUs, found {RANKS}"),
]


def _back_to_back(rank: int, ranks: int, backend: str) -> None:
    """Many calls without a synchronisation between them, each rank at its own pace: a late reader
    must never see later data."""
    group = world_group()
    _many_chunks()
    m, n, k = 256, 512, 384
    generator = torch.Generator(device="cuda").manual_seed(5)
    shards = [
        torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(ranks * 20)
    ]
    b = torch.randn(k, n, generator=generator, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(ranks * m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    busy = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    found, scattered = [], []
    for i in range(20):
        for _ in range((rank * 7 + i * 3) % 5):
            busy @ busy  # noqa: B018  this rank is late by a few GEMMs
        found.append(all_gather_matmul(shards[i * ranks + rank], b, group, backend=backend))
        scattered.append(matmul_reduce_scatter(wide * (i + 1 + rank), b, group, backend=backend))
    torch.cuda.synchronize()
    for i, c in enumerate(found):
        wanted = torch.cat(shards[i * ranks : (i + 1) * ranks]).double() @ b.double()
        assert (c.double() - wanted).norm() / wanted.norm() < 8e-3, f"call {i}"
    own = slice(rank * m, (rank + 1) * m)
    for i, c in enumerate(scattered):
        wanted = (wide[own].double() @ b.double()) * sum(i + 1 + r for r in range(ranks))
        assert (c.double() - wanted).norm() / wanted.norm() < 8e-3, f"call {i}"
    again = matmul_reduce_scatter(wide * (1 + rank), b, group, backend=backend)
    assert torch.equal(again, scattered[0]), "not bitwise repeatable"
    close_group(group)


@pytest.mark.parametrize("connections", ["1", "32"])
@pytest.mark.parametrize("form", ["copy_engine", "fused", "collective"])
def test_calls_without_a_barrier_between_them_do_not_mix(form: str, connections: str) -> None:
    environment = {**TIMEOUT, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    run_ranks(_back_to_back, min(RANKS, 8), form, backend="nccl", timeout_s=200, env=environment)


def _training(rank: int, ranks: int, backend: str) -> None:
    """Many forwards and backwards in a row, each rank at its own pace: what backward gathers is
    lent, and must hold until it was read."""
    group = world_group()
    _many_chunks()  # of gathers in a GEMM, between those that are only started
    m, n, k = 256, 512, 384
    generator = torch.Generator(device="cuda").manual_seed(17)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    up = random(n, k).requires_grad_()
    down = random(k, n).requires_grad_()
    busy = random(2048, 2048)
    shards, gradients = random(20, ranks, m, k), random(20, ranks, m, k)
    found = []
    for i in range(20):
        for _ in range((rank * 7 + i * 3) % 5):
            busy @ busy  # noqa: B018  this rank is late by a few GEMMs
        x = shards[i, rank].clone().requires_grad_()
        h = all_gather_matmul(x, up, group, transpose_b=True, backend=backend)
        matmul_reduce_scatter(h, down, group, transpose_b=True, backend=backend).backward(
            gradients[i, rank]
        )
        assert up.grad is not None and down.grad is not None and x.grad is not None
        found.append((h.detach(), up.grad, down.grad, x.grad))
        up.grad = down.grad = None
    torch.cuda.synchronize()
    for i, (h, of_up, of_down, of_x) in enumerate(found):
        x, dy = shards[i].flatten(0, 1).float(), gradients[i].flatten(0, 1).float()
        dh = (dy @ down.detach().float()).bfloat16().float()
        own = slice(rank * m, (rank + 1) * m)
        wanted = (
            x @ up.detach().float().t(), dh.t() @ x, dy.t() @ h.float(),
            ranks * (dh @ up.detach().float())[own],
        )  # fmt: skip
        for name, a, b in zip(
            ("h", "dW up", "dW down", "dx"), (h, of_up, of_down, of_x), wanted, strict=True
        ):
            error = (a.float() - b).norm() / b.norm()
            assert error < 8e-3, f"step {i}: {name} is off by {float(error):.1e}"
    for step in (0, 1):  # nothing needs dA, so nothing but the gather is awaited
        x, up.grad, down.grad = shards[step, rank].clone(), None, None
        h = all_gather_matmul(x, up, group, transpose_b=True, backend=backend)
        matmul_reduce_scatter(h.detach(), down, group, transpose_b=True, backend=backend).backward(
            gradients[0, rank]
        )
        if backend == "fused":
            # Pushes that begin late: who does not wait for them sends, or reads, what comes after.
            ours = backends_of(group).fused
            assert ours is not None
            with torch.cuda.stream(ours._copies):
                torch.cuda._sleep(20_000_000 * (1 + rank % 2))
        h.backward(h.detach())
        x.zero_()  # the caller's again
        whole = shards[step].flatten(0, 1).float()
        wanted = (h.float().t() @ whole, gradients[0].flatten(0, 1).float().t() @ h.float())
        for name, weight, b in zip(("dW up", "dW down"), (up, down), wanted, strict=True):
            assert weight.grad is not None
            assert (weight.grad.float() - b).norm() / b.norm() < 8e-3, f"frozen input: {name}"
    close_group(group)


@pytest.mark.parametrize("connections", ["1", "32"])
@pytest.mark.parametrize("form", ["copy_engine", "fused", "collective"])
def test_steps_without_a_barrier_between_them_do_not_mix(form: str, connections: str) -> None:
    environment = {**TIMEOUT, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    run_ranks(_training, min(RANKS, 8), form, backend="nccl", timeout_s=200, env=environment)


def _behind(rank: int, ranks: int, backend: str) -> None:
    """First calls of new backends while the GPU is behind the host, so that streams without an
    order between them race."""
    group = world_group()
    m, n, k = 512, 512, 8192  # multiplying takes longer than sending
    generator = torch.Generator(device="cuda").manual_seed(7)
    shards = [
        torch.randn(m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(ranks)
    ]
    wide = torch.randn(ranks * m, k, generator=generator, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, generator=generator, device="cuda", dtype=torch.bfloat16)
    own = slice(rank * m, (rank + 1) * m)
    wanted = torch.cat(shards).double() @ b.double(), ranks * (wide[own].double() @ b.double())
    for turn in range(4):
        workspace = backends_of(group).workspace
        assert workspace is not None
        for name in ("tp_gather", "tp_scatter", "tp_fused_gather", "tp_fused_scatter"):
            workspace.reserve(
                name, 4 * ranks * m * k, torch.bfloat16
            )  # growing in a call would wait for the GPU
        # What was freed here last is what a tensor that nobody has filled yet would hold.
        for filler in (-1, 1 << 20):
            torch.full((64,), filler, device="cuda", dtype=torch.int64)
        torch.cuda._sleep(40_000_000)
        c = all_gather_matmul(shards[rank], b, group, backend=backend)
        total = matmul_reduce_scatter(wide, b, group, backend=backend)
        for found, right in zip((c, total), wanted, strict=True):
            assert (found.double() - right).norm() / right.norm() < 8e-3, f"turn {turn}"
        close_group(group)


@pytest.mark.parametrize("backend", ["copy_engine", "fused"])
def test_first_calls_need_no_idle_gpu(backend: str) -> None:
    run_ranks(_behind, min(RANKS, 8), backend, backend="nccl", timeout_s=200, env=TIMEOUT)


def _beside_nccl(rank: int, ranks: int) -> None:
    """Both forms while NCCL kernels are in flight on another stream: nobody waits for an SM that a
    waiting kernel holds."""
    group = world_group()
    other = dist.new_group()
    a = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    load = torch.ones(16 << 20, device="cuda", dtype=torch.bfloat16)
    wanted = {}
    for backend in ("collective", "copy_engine", "fused"):
        for turn in range(12):
            work = dist.all_reduce(load, group=other, async_op=True)
            c = all_gather_matmul(a, b, group, backend=backend)
            total = matmul_reduce_scatter(c, b.t(), group, backend=backend)
            assert work is not None
            if turn % 3 == 0:
                work.wait()
        torch.cuda.synchronize()
        load.fill_(1)
        wanted[backend] = total.float()
    for backend in ("copy_engine", "fused"):
        error = (wanted[backend] - wanted["collective"]).norm() / wanted["collective"].norm()
        assert error < 1e-2, f"{backend}: {error:.1e}"
    close_group(group)


@pytest.mark.skipif(
    SHARED, reason="ranks that share GPUs have gloo's collectives: no kernel of NCCL to run beside"
)
def test_the_forms_run_beside_nccl() -> None:
    run_ranks(
        _beside_nccl,
        min(RANKS, 8),
        backend="nccl",
        timeout_s=200,
        env={**TIMEOUT, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    )
