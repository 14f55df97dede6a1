"""Figures of a machine: their names, and what a file of them may hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fluid.errors import ConfigError
from megatron_fluid.plan.machine import REFERENCE, Machine, machine_named

CPU = REFERENCE["cpu"]


def test_names_give_reference_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, machine in REFERENCE.items():
        assert machine_named(name) is machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu, name in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("A", "h200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
        assert machine_named("auto") is machine_named("reference") is REFERENCE[name]


@pytest.mark.parametrize(
    "change",
    [
        {"flops_per_s": 0},
        {"flops_per_s": "fast"},
        {"bytes_per_s": float("nan")},
        {"wire_bytes_per_s": None},
        {"bytes_per_s": True},
        {"device": 3},
        {"another": 1},
    ],
)
def test_a_file_with_a_figure_out_of_range_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(dataclasses.asdict(CPU) | change))
    with pytest.raises(ConfigError, match=f"machine: {path}: found .*, allowed: a file that"):
        Machine.read(str(path))


def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for text in ("[]", "not JSON"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="allowed: a file that"):
            Machine.read(str(path))
    with pytest.raises(ConfigError, match="machine: found .*absent.* allowed: auto, reference"):
        Machine.read(str(tmp_path / "absent"))
