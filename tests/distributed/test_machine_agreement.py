"""The ranks of a group choose by the figures of its first rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fluid.plan.machine import REFERENCE, Machine
from tests.support.launch import run_ranks

RANKS = 3
FILE = dataclasses.replace(REFERENCE["cpu"], flops_per_s=7e9)


def _from_file(rank: int, ranks: int, folder: str) -> Machine | str | None:
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.plan.machine import agreed_machine

    assert agreed_machine(dist.group.WORLD, "cpu", "auto") is None, "CPUs overlap what they can"
    path = f"{folder}/rank-{rank}.json"  # not there but on the first rank
    try:
        machine = agreed_machine(dist.group.WORLD, "cpu", path)
        assert machine is agreed_machine(dist.group.WORLD, "cpu", path), "remembered"
        return machine
    except ConfigError as error:
        return str(error)


def test_all_ranks_take_the_file_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(FILE.dumps())
    results = run_ranks(_from_file, RANKS, str(tmp_path))
    assert results == [dataclasses.replace(FILE, source=str(path))] * RANKS
    path.write_text("{}")
    results = run_ranks(_from_file, RANKS, str(tmp_path))
    assert all("allowed: a file that `megatron-fluid plan --write`" in text for text in results)


def _late(rank: int, ranks: int) -> str:
    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.errors import PeerTimeoutError
    from megatron_fluid.plan.machine import agreed_machine

    set_config(FluidConfig(timeout_s=1.0))
    if rank:
        return ""
    with pytest.raises(PeerTimeoutError, match="figures of the machine.*rank 1 did not come") as e:
        agreed_machine(dist.group.WORLD, "cpu", "reference")
    return str(e.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    run_ranks(_late, 2)
