"""The figures of a GPU and of the links between GPUs, measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.plan.machine import REFERENCE, Machine
from megatron_fluid.plan.measure import measure_device
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS, SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]


def test_a_gpu_is_measured_and_no_random_number_is_drawn() -> None:
    before = torch.cuda.get_rng_state()
    machine = measure_device(torch.device("cuda", torch.cuda.current_device()))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    print(machine)
    assert machine.units > 1 and 1e13 < machine.flops_per_s < 5e15
    assert 1e11 < machine.bytes_per_s < 2e13
    assert 1e-7 < machine.operation_s < 1e-3 and 1e-7 < machine.gemm_s < 1e-3
    if "H200" in machine.device and not SHARED:
        reference = REFERENCE["gpu"]
        assert machine.units == reference.units
        assert 0.5 < machine.flops_per_s / reference.flops_per_s < 1.5
        assert 0.5 < machine.bytes_per_s / reference.bytes_per_s < 1.5


def _links(rank: int, ranks: int, folder: str) -> Machine | None:
    from megatron_fluid.cuda.kernel_cache import KernelCache
    from megatron_fluid.plan import agreed

    cache = KernelCache(Path(folder), suffix=".machine")
    agreed._cache = lambda: cache  # type: ignore[assignment]
    return agreed.agreed_machine(dist.group.WORLD, "cuda", "measure")


@pytest.mark.skipif(RANKS < 2, reason="needs 2 ranks on GPUs")
def test_ranks_agree_on_links_that_they_measure(tmp_path: Path) -> None:
    found = run_ranks(_links, min(RANKS, 4), str(tmp_path), backend="nccl", timeout_s=120)
    print(found[0])
    assert all(machine == found[0] for machine in found)
    machine = found[0]
    assert machine is not None and machine.collective is not None
    assert machine.collective.ranks == len(found)
    if machine.copies is not None:
        assert 1e9 < machine.copies.bytes_per_s < 1e13 and 0 <= machine.copies.hidden <= 1
