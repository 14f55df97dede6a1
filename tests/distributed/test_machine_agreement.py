"""The ranks of a group predict with the figures of its first rank, and attention follows them."""

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


def _attention(rank: int, ranks: int, folder: str) -> None:
    """`auto` by figures: what is predicted to be faster, on every rank, with the same results."""
    from megatron_fluid.attention.layouts import SequenceLayout
    from megatron_fluid.patches.attention import self_attention
    from megatron_fluid.patches.overlap_decision import features
    from tests.support.self_attention_world import (
        Case,
        angles_of,
        build,
        count_calls,
        error_of,
        start,
        step,
    )

    start(ranks)
    case, length = Case(), 8 * ranks
    angles = angles_of(case, length)
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    found = []
    for name, machine in (
        # Memory is slow, so that the passes around an exchange alone are.
        ("overlapped", dataclasses.replace(FILE, bytes_per_s=1e3, operation_s=0.0)),
        # The host is slow, so that the rounds to each peer are.
        ("exchanged", dataclasses.replace(FILE, operation_s=1.0)),
    ):
        path = f"{folder}/{name}.json"
        if rank == 0:
            Path(path).write_text(machine.dumps())
        dist.barrier()
        module = build(case, ranks, "auto", machine=path)
        count = count_calls()
        found.append(step(module, case, rows, angles, length))
        assert count() == (1 if name == "overlapped" else 0), name
        path_taken = self_attention.DECISIONS.get(module).path
        assert path_taken is not None and path_taken.machine is not None
    assert any("is predicted to take" in reason for _, _, reason, _ in features())
    for name, theirs in found[0].items():
        assert error_of(found[1][name], theirs, case.dtype) < 2e-6, name


def test_attention_takes_the_form_that_is_predicted_to_be_faster(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    run_ranks(_attention, 4, str(tmp_path), timeout_s=240)
