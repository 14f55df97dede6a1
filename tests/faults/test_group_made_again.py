"""Process groups that are made again and again leave nothing behind."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm.groups import _resources
from megatron_fluid.comm.p2p_rounds import shared_rounds
from tests.support.launch import run_ranks


def _make_again(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Groups whose resources are held, and open descriptors, after each turn."""
    held, descriptors = [], []
    for turn in range(5):
        group = dist.new_group(list(range(ranks)))
        rounds = shared_rounds(group, 20.0)
        x = torch.full((3,), float(rank))
        y = torch.empty_like(x)
        partner = rounds.partners[0]
        assert partner is not None
        rounds.start(f"turn {turn}", 0, [x], [y]).wait()
        assert torch.equal(y, torch.full((3,), float(partner)))
        del rounds
        dist.destroy_process_group(group)
        del group
        gc.collect()
        held.append(len(_resources))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return held, descriptors


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_rounds_of_a_destroyed_group_go_when_the_next_group_takes_some() -> None:
    for held, descriptors in run_ranks(_make_again, 2):
        assert max(held) <= 1  # the last one's, until the next group asks
        assert descriptors[-1] <= descriptors[1] + 2
