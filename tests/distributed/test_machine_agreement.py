"""The ranks of a group choose by the figures of its first rank."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.shared import _choose
from megatron_fluid.plan.machine import REFERENCE
from tests.support.launch import on_ranks

SHAPE = (4096, 4096, 14336, 2, 8)


@on_ranks(3)
def test_all_ranks_take_the_file_of_the_first(rank: int, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / f"rank-{rank}.json"
    set_config(FluidConfig(machine=str(path)))
    streams = []
    for wire in (1e8, 1e13):  # over a slow wire the dispatch is sent in chunks
        if rank == 0:
            path.write_text(dataclasses.replace(REFERENCE["h200"], wire_bytes_per_s=wire).dumps())
        group = dist.new_group()  # which keeps no figures yet
        schedule = _choose(group, SHAPE, torch.bfloat16)
        found: list[Schedule | None] = [None] * ranks
        dist.all_gather_object(found, schedule)
        assert found == [schedule] * ranks
        streams.append(schedule.stream)
    assert streams[0] != streams[1]
    if rank == 0:
        path.write_text("{}")
    with pytest.raises(ConfigError, match="allowed: a file that `megatron-fluid plan --write`"):
        _choose(dist.new_group(), SHAPE, torch.bfloat16)
