"""The ranks of a group choose by the figures of its first rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.shared import _choose
from megatron_fluid.plan.machine import REFERENCE
from tests.support.launch import run_ranks

SHAPE = (4096, 4096, 14336, 2, 8)


def _from_file(rank: int, ranks: int, folder: str) -> Schedule | str:
    # Not there but on the first rank.
    set_config(FluidConfig(machine=f"{folder}/rank-{rank}.json"))
    try:
        return _choose(dist.group.WORLD, SHAPE, torch.bfloat16)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)


def test_all_ranks_take_the_file_of_the_first(tmp_path: Path) -> None:
    path, streams = tmp_path / "rank-0.json", []
    for wire in (1e8, 1e13):  # over a slow wire the dispatch is sent in chunks
        path.write_text(dataclasses.replace(REFERENCE["h200"], wire_bytes_per_s=wire).dumps())
        first, *others = run_ranks(_from_file, 3, str(tmp_path))
        assert isinstance(first, Schedule) and others == [first] * 2
        streams.append(first.stream)
    assert streams[0] != streams[1]
    path.write_text("{}")
    results = run_ranks(_from_file, 3, str(tmp_path))
    assert all(
        "allowed: a file that `megatron-fluid plan --write`" in str(text) for text in results
    )
