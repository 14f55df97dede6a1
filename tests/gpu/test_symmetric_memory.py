"""New symmetric memory: nobody writes into a peer's before it is ready."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from megatron_fluid.comm.symmetric import SymmetricWorkspace
from tests.support.launch import run_ranks
from tests.support.machine import RANKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS < 2, reason="needs two or more ranks on GPUs"),
]


def _write_at_once(rank: int, ranks: int) -> float:
    """Rank 0's memory is zeroed late, for it is long busy; the next rank writes at once."""
    group = dist.group.WORLD
    assert group is not None
    space = SymmetricWorkspace(group, timeout_s=20.0)
    empty = symmetric_memory.empty

    def late(*size: int, **options: object) -> torch.Tensor:
        torch.cuda._sleep(400_000_000)
        return empty(*size, **options)  # type: ignore[arg-type]

    for numel in (1000, 5000):  # at birth, and when it grows
        if rank == 0:
            symmetric_memory.empty = late  # type: ignore[assignment]
        mine = space.buffer("landing", (numel,), torch.float32)
        symmetric_memory.empty = empty
        if rank == 1:
            space.peer_buffers("landing", torch.float32)[0][:numel].fill_(3.0)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            assert bool((mine == 3.0).all()), (
                f"{int((mine != 3.0).sum())} of {numel} words were written over"
            )
    space.close()
    return 0.0


def test_memory_is_not_zeroed_after_a_peer_has_written_into_it() -> None:
    run_ranks(_write_at_once, min(RANKS, 4), backend="nccl", timeout_s=60)
