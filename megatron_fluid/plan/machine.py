"""Machine parameters: rates of the device and of the links between ranks, in bytes and FLOP per
second.

Nothing is measured: `auto` chooses by `REFERENCE`, or by the figures that the setting `machine`
(`--fluid-machine`) names.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from megatron_fluid.errors import ConfigError

__all__ = ["REFERENCE", "Machine", "machine_named"]


@dataclass(frozen=True)
class Machine:
    """One device, and the link between several of them.

    Attributes:
        device: the GPU's name, or "CPU".
        flops_per_s: of a large GEMM in the training dtype.
        bytes_per_s: of the device's memory, read and written.
        wire_bytes_per_s: what one rank sends to others while every rank sends at once.
        source: where the figures are from, for reports.
    """

    device: str
    flops_per_s: float
    bytes_per_s: float
    wire_bytes_per_s: float
    source: str = "reference"

    def dumps(self) -> str:
        """Return the figures as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the figures in a file of `dumps`.

        Raises:
            ConfigError: it cannot be read, is no such JSON, or has a figure out of range.
        """
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            allowed = f"auto, reference, {', '.join(REFERENCE)} or a readable file"
            raise ConfigError.of("machine", f"{path} ({error})", allowed) from None
        try:
            machine = cls(**json.loads(text) | {"source": path})
            for name, value in dataclasses.asdict(machine).items():
                if name.endswith("per_s"):
                    number = isinstance(value, int | float) and not isinstance(value, bool)
                    valid = number and math.isfinite(value) and value >= 1
                else:
                    valid = isinstance(value, str)
                if not valid:
                    raise ValueError(f"{name} is {value!r}")
        except (ValueError, TypeError) as error:
            allowed = "a file that `megatron-fluid plan --write` has written"
            raise ConfigError.of(f"machine: {path}", f"{error!r}", allowed) from None
        return machine


# Measured: docs/tuning_notes.md#machine
_H200 = Machine("NVIDIA H200", flops_per_s=760e12, bytes_per_s=3.5e12, wire_bytes_per_s=390e9)
REFERENCE: Mapping[str, Machine] = {
    "h200": _H200,
    # Not measured: an H200 with the memory of an H100, by the data sheets.
    "h100": dataclasses.replace(_H200, device="NVIDIA H100", bytes_per_s=2.45e12),
    "cpu": Machine("CPU", flops_per_s=50e9, bytes_per_s=12e9, wire_bytes_per_s=1e9),
}
"""Figures by name. A GPU that is not here has those of "h200"."""


def machine_named(setting: str) -> Machine:
    """Return the figures that a setting names.

    Args:
        setting: "auto" or "reference": those of this process's GPU; a name in REFERENCE; or a file.

    Raises:
        ConfigError: the file has no figures.
    """
    if setting in REFERENCE:
        return REFERENCE[setting]
    if setting not in ("auto", "reference"):
        return Machine.read(setting)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return REFERENCE["h100" if "H100" in gpu else "h200"]
