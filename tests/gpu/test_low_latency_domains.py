"""The decode-time all-to-all on GPUs between NVLink domains, over NCCL and NVSHMEM."""

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.cli.checks import CHECKS
from tests.gpu.test_low_latency_gpu import _TOLERANCE, _Routing
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS, SHARED

_NVSHMEM = ("nvshmem device library", "nvshmem bootstrap")
_RANKS = min(RANKS, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_RANKS < 2, reason="needs at least 2 ranks on GPUs"),
]

WHY_NOT_NVSHMEM = next(
    (detail for ok, detail in (CHECKS[n].look() for n in _NVSHMEM) if not ok), None
)
if SHARED:
    WHY_NOT_NVSHMEM = "ranks share GPUs"


def _levels(
    rank: int, world: int, transport: str, domain_size: int | None, split: bool, early: bool
) -> None:
    routing = _Routing(rank, world, 24, 8 * world, 6, 512)
    ata = routing.open(transport=transport, domain_size=domain_size)
    assert ata.transport == transport
    for turn in range(40):
        routing.draw(turn)
        routing.run(ata, split, early)
        routing.check(ata, f"turn {turn}", 1.5 * _TOLERANCE)
    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        routing.run(ata, split, early)
    for turn in range(10):
        routing.draw(turn)
        for _ in range(5):
            graph.replay()
        routing.check(ata, f"replay {turn}", 1.5 * _TOLERANCE)
    del graph
    ata.destroy()


@pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs, for 2 domains of 2")
@pytest.mark.parametrize("early", [False, True], ids=["weights-at-combine", "weights-at-dispatch"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_two_domains_with_nccl_between(split: bool, early: bool) -> None:
    run_ranks(_levels, 4, "nvlink+nccl", 2, split, early, backend="nccl", timeout_s=90)


@pytest.mark.skipif(WHY_NOT_NVSHMEM is not None, reason=str(WHY_NOT_NVSHMEM))
@pytest.mark.parametrize("early", [False, True], ids=["weights-at-combine", "weights-at-dispatch"])
def test_nvshmem_inside_a_host(early: bool) -> None:
    run_ranks(_levels, _RANKS, "nvshmem", None, True, early, backend="nccl", timeout_s=120)


@pytest.mark.skipif(
    GPUS < 4 or WHY_NOT_NVSHMEM is not None, reason=f"needs 4 GPUs and NVSHMEM: {WHY_NOT_NVSHMEM}"
)
def test_two_domains_with_nvshmem_between() -> None:
    run_ranks(_levels, 4, "nvlink+nvshmem", 2, False, True, backend="nccl", timeout_s=120)
