"""Ranks predict with the same figures: measured once, kept, or those of one rank's file; and
attention follows them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.plan.machine import REFERENCE, Link, Machine
from tests.support.launch import run_ranks

RANKS = 3
FILE = dataclasses.replace(REFERENCE["cpu"], flops_per_s=7e9)


def _cached_in(folder: str) -> None:
    from megatron_fluid.cuda.kernel_cache import KernelCache
    from megatron_fluid.plan import agreed

    cache = KernelCache(Path(folder), suffix=".machine")
    agreed._cache = lambda: cache  # type: ignore[assignment]


def _measure(rank: int, ranks: int, folder: str) -> tuple[list[Machine], list[str]]:
    """Figures of two groups of all ranks, and what was measured."""
    from megatron_fluid.plan import agreed

    _cached_in(folder)
    measured: list[str] = []

    def device(which: torch.device) -> Machine:
        measured.append("device")
        return dataclasses.replace(FILE, collective=None, source="measured")

    def links(group: Any, which: torch.device, machine: Machine) -> tuple[Link, None]:
        measured.append("links")
        # The slowest of each figure counts.
        return Link(group.size(), 1e-6 * (1 + rank), 1e9 + rank, 1e-6, 0.5 - rank / 10), None

    agreed.measure_device, agreed.measure_links = device, links  # type: ignore[assignment]
    found = []
    for _ in range(2):
        group = dist.new_group(list(range(ranks)))
        machine = agreed.agreed_machine(group, "cpu", "measure")
        assert machine is agreed.agreed_machine(group, "cpu", "measure"), "remembered"
        assert machine is not None
        found.append(machine)
    return found, measured


def test_ranks_measure_once_and_share_the_slowest_figures(tmp_path: Path) -> None:
    results = run_ranks(_measure, RANKS, str(tmp_path))
    machines = [machine for found, _ in results for machine in found]
    assert all(machine == machines[0] for machine in machines)
    link = machines[0].collective
    assert link == Link(RANKS, 1e-6 * RANKS, 1e9, 1e-6, 0.5 - (RANKS - 1) / 10)
    assert [measured for _, measured in results] == [["device", "links"], ["links"], ["links"]]
    again = run_ranks(_measure, RANKS, str(tmp_path))
    assert [measured for _, measured in again] == [[]] * RANKS, "kept by the run before"
    assert again[2][0][0] == machines[0]


def _real(rank: int, ranks: int, folder: str) -> Machine | None:
    from megatron_fluid.plan.agreed import agreed_machine

    _cached_in(folder)
    assert agreed_machine(dist.group.WORLD, "cpu", "auto") is None, "CPUs overlap what they can"
    return agreed_machine(dist.group.WORLD, "cpu", "measure")


def test_links_of_gloo_ranks_can_be_measured(tmp_path: Path) -> None:
    first, second = run_ranks(_real, 2, str(tmp_path))
    assert first == second and first is not None and first.copies is None
    link = first.collective
    assert link is not None and link.ranks == 2 and 1e4 < link.bytes_per_s < 1e13
    assert 0 <= link.hidden <= 1


def _from_file(rank: int, ranks: int, folder: str) -> Machine | str | None:
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.plan.agreed import agreed_machine

    try:
        return agreed_machine(dist.group.WORLD, "cpu", f"{folder}/machine.json")
    except ConfigError as error:
        return str(error)


def test_a_file_pins_the_figures_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(FILE.dumps())
    results = run_ranks(_from_file, RANKS, str(tmp_path))
    assert results[0].flops_per_s == 7e9 and results == [results[0]] * RANKS
    assert results[0].collective.ranks == RANKS
    path.write_text(dataclasses.replace(FILE, collective=None).dumps())
    results = run_ranks(_from_file, RANKS, str(tmp_path))
    assert all("machine: found" in text and "collective" in text for text in results)
    path.write_text("{}")
    results = run_ranks(_from_file, RANKS, str(tmp_path))
    assert all("no figures of a machine" in text for text in results)


def _late(rank: int, ranks: int) -> str:
    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.errors import PeerTimeoutError
    from megatron_fluid.plan.agreed import agreed_machine

    set_config(FluidConfig(timeout_s=1.0))
    if rank:
        return ""
    with pytest.raises(PeerTimeoutError, match="figures of the machine.*rank 1 did not come") as e:
        agreed_machine(dist.group.WORLD, "cpu", "measure")
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
