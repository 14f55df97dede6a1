"""Figures of a machine: what a file of them may hold, and how they are kept."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fluid.cuda.kernel_cache import KernelCache
from megatron_fluid.errors import ConfigError
from megatron_fluid.plan import agreed
from megatron_fluid.plan.machine import REFERENCE, Machine, reference_machine
from megatron_fluid.plan.measure import measure_device

CPU = REFERENCE["cpu"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    found = KernelCache(tmp_path, suffix=".machine", what="figures of this machine")
    monkeypatch.setattr(agreed, "_cache", lambda: found)
    return found


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were measured, in place of measuring."""
    measured: list[torch.device] = []

    def measure(device: torch.device) -> Machine:
        measured.append(device)
        return dataclasses.replace(CPU, collective=None, source="measured")

    monkeypatch.setattr(agreed, "measure_device", measure)
    return measured


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for machine in REFERENCE.values():
        path.write_text(machine.dumps())
        assert Machine.read(str(path)) == dataclasses.replace(machine, source=str(path))
    assert reference_machine("cuda", 1).copies is None
    copies = reference_machine("cuda", 8).copies
    assert copies is not None and copies.ranks == 8


@pytest.mark.parametrize(
    "change",
    [
        {"flops_per_s": 0},
        {"flops_per_s": "fast"},
        {"bytes_per_s": float("nan")},
        {"operation_s": -1e-6},
        {"operation_s": None},
        {"units": True},
        {"device": 3},
        {"another": 1},
        {"collective": {"ranks": 2}},
        {"collective": dataclasses.asdict(CPU.collective) | {"hidden": 1.5}},  # type: ignore[arg-type]
    ],
)
def test_a_file_with_a_figure_out_of_range_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(dataclasses.asdict(CPU) | change))
    with pytest.raises(ConfigError, match=f"{path}: found .*no figures of a machine"):
        Machine.read(str(path))


def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for text in ("", "[]", "not JSON"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no figures of a machine"):
            Machine.read(str(path))
    with pytest.raises(ConfigError, match="machine: found .*absent.* allowed: auto, measure"):
        Machine.read(str(tmp_path / "absent"))


def test_a_device_is_measured_once(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _counted(monkeypatch)
    first = agreed.machine_of_device("cpu")
    assert agreed.machine_of_device("cpu") == first and len(measured) == 1
    monkeypatch.setattr(torch, "__version__", "another")
    agreed.machine_of_device("cpu")
    assert len(measured) == 2, "of another torch"


@pytest.mark.parametrize("harm", [b"", b"x" * 100, None])
def test_a_harmed_file_is_measured_anew(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, harm: bytes | None
) -> None:
    measured = _counted(monkeypatch)
    first = agreed.machine_of_device("cpu")
    assert cache.folder is not None
    (path,) = cache.folder.glob("*.machine")
    if harm is None:  # whole, and of other contents: by another program
        cache.write(path.stem, b"{}")
    else:
        path.write_bytes(harm)
    assert agreed.machine_of_device("cpu") == first and len(measured) == 2
    assert agreed.machine_of_device("cpu") == first and len(measured) == 2, "and kept"


def _write(folder: Path, figure: float, barrier: Any) -> None:
    found = KernelCache(folder, suffix=".machine")
    barrier.wait()
    for _ in range(50):
        found.write("key", dataclasses.replace(CPU, flops_per_s=figure).dumps().encode())


def test_of_two_writers_one_has_written_all(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    writers = [
        context.Process(target=_write, args=(tmp_path, figure, barrier)) for figure in (1e9, 2e9)
    ]
    for writer in writers:
        writer.start()
    reader = KernelCache(tmp_path, suffix=".machine")
    barrier.wait()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if (code := reader.read("key")) is not None:
            seen.add(Machine.loads(code, "key").flops_per_s)
    for writer in writers:
        writer.join(60)
    code = reader.read("key")
    assert code is not None
    assert seen | {Machine.loads(code, "key").flops_per_s} <= {1e9, 2e9}


def test_this_machine_can_be_measured_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        machine = measure_device(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert Machine.loads(machine.dumps(), "here") == machine
    assert machine.units == 0 and machine.collective is None
    assert 1e7 < machine.flops_per_s < 1e14 and 1e-8 < machine.operation_s < 1
