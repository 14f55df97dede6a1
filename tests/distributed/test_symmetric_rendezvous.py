"""Where the ranks' processes may not share memory, symmetric memory is unavailable to all of them,
with the reason of the rank that failed."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from torch.distributed import _symmetric_memory as symmetric_memory

from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
from tests.support.launch import on_ranks


@pytest.mark.parametrize("refused", [[], [1], [0, 1]])
@on_ranks(2)
def test_a_rendezvous_that_fails_on_one_rank_rules_symmetric_memory_out_on_all(
    rank: int, world_size: int, refused: list[int]
) -> None:
    def rendezvous(memory: torch.Tensor, group: Any) -> object:
        assert memory.numel() and group is dist.group.WORLD
        if rank in refused:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nraised from ...")
        return object()

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        return torch.empty(numel, dtype=dtype)

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(symmetric_memory, "empty", empty),
        mock.patch.object(symmetric_memory, "rendezvous", rendezvous),
    ):
        told = "cannot share symmetric memory (pidfd_getfd: Operation not permitted)"
        expected = f"rank {refused[0]} {told}" if refused else None
        assert symmetric_unsupported_reason(dist.group.WORLD) == expected  # type: ignore[arg-type]
