"""Machine parameters shared by all ranks of a group: rates of the device, what an operation costs
the host, and the links between the ranks.

All are in seconds, bytes and FLOP per second. Nothing is measured: `auto` chooses by `REFERENCE`,
or by those that the setting `machine` (`--fluid-machine`) names.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError

__all__ = ["REFERENCE", "Link", "Machine", "agreed_machine", "machine_named"]


@dataclass(frozen=True)
class Link:
    """An exchange between the ranks of a group, in which every rank sends at once.

    Attributes:
        latency_s: of one exchange of any size.
        bytes_per_s: that one rank sends.
        start_s: host time to start one.
        hidden: share of its time that passes behind a GEMM, from 0 to 1.
    """

    latency_s: float
    bytes_per_s: float
    start_s: float
    hidden: float

    def seconds(self, sent_bytes: float) -> float:
        """Time of an exchange in which each rank sends so many bytes to others."""
        return self.latency_s + sent_bytes / self.bytes_per_s if sent_bytes else 0.0


@dataclass(frozen=True)
class Machine:
    """One device, its host, and the links between several of them.

    Attributes:
        device: the GPU's name, or "CPU".
        units: SMs of a GPU, over which the tiles of a GEMM are spread; 0: tiles are not counted.
        flops_per_s: of a GEMM whose tiles fill every wave, in the training dtype.
        gemm_s: time of the smallest GEMM on the device.
        bytes_per_s: of the device's memory, read and written.
        operation_s: host time of one torch operation.
        copies: copy-engine copies into the memory of peers; None where there are none.
        collective: the all-to-all of torch.distributed.
        source: where the figures are from, for reports.
    """

    device: str
    units: int
    flops_per_s: float
    gemm_s: float
    bytes_per_s: float
    operation_s: float
    collective: Link
    copies: Link | None = None
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
            found = json.loads(text)
            copies = found.get("copies")
            links = {
                "collective": _checked(Link, found["collective"]),
                "copies": None if copies is None else _checked(Link, copies),
            }
            return _checked(cls, found | links | {"source": path})
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            allowed = "a file that `megatron-fluid plan --write` has written"
            raise ConfigError.of(f"machine: {path}", f"{error!r}", allowed) from None


def _checked[T](kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return a Link or Machine, or raise ValueError for a figure out of range."""
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = fields.get(field.name)
        if field.type in ("float", "int"):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            least = 1 if field.name.endswith("per_s") else 0
            most = 1 if field.name == "hidden" else math.inf
            if not number or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type, operator]
                raise ValueError(f"{field.name} is {value!r}")
        if field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r}")
    return kind(**fields)


# Measured: docs/tuning_notes.md#machine
_H200 = Machine(
    device="NVIDIA H200",
    units=132,
    flops_per_s=760e12,
    gemm_s=4e-6,
    bytes_per_s=3.5e12,
    operation_s=16e-6,
    collective=Link(55e-6, 325e9, 40e-6, 0.1),
    copies=Link(8e-6, 390e9, 12e-6, 0.8),
)
REFERENCE: Mapping[str, Machine] = {
    "h200": _H200,
    # Not measured: an H200 with the memory of an H100, by the data sheets.
    "h100": dataclasses.replace(_H200, device="NVIDIA H100", bytes_per_s=2.45e12),
    "cpu": Machine(
        device="CPU",
        units=0,
        flops_per_s=50e9,
        gemm_s=5e-6,
        bytes_per_s=12e9,
        operation_s=20e-6,
        collective=Link(300e-6, 1e9, 50e-6, 0.5),
    ),
}
"""Figures by name. A GPU that is not here has those of "h200"."""


def machine_named(setting: str, device_type: str) -> Machine:
    """Return the figures that a setting names.

    Args:
        setting: "auto" or "reference": those of this process's device; a name in REFERENCE; or a
            file.
        device_type: "cuda" or "cpu", where the layers compute.

    Raises:
        ConfigError: the file has no figures.
    """
    if setting in REFERENCE:
        return REFERENCE[setting]
    if setting not in ("auto", "reference"):
        return Machine.read(setting)
    if device_type == "cpu":
        return REFERENCE["cpu"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return REFERENCE["h100" if "H100" in gpu else "h200"]


def agreed_machine(
    group: dist.ProcessGroup, device_type: str, setting: str | None = None
) -> Machine | None:
    """Return the figures by which `auto` chooses for a group: those of its first rank. None where
    it does not choose by figures: with "auto" on CPUs, every form that can overlap is taken.
    Collective the first time.

    Args:
        device_type: "cuda" or "cpu", where the layers compute.
        setting: in place of the configuration's `machine`.

    Raises:
        ConfigError: on every rank: the setting's file has no figures.
        PeerTimeoutError: a rank has not come within the timeout.
    """
    asked = current_config().machine if setting is None else setting
    if asked == "auto" and device_type == "cpu":
        return None

    def first() -> tuple[Machine | None, str]:
        if group.rank():
            return None, ""
        try:
            return machine_named(asked, device_type), ""
        except ConfigError as error:
            return None, str(error)

    def agree() -> Machine:
        machine, failure = agreement(group).first("figures of the machine", first())
        if failure:
            raise ConfigError(failure)
        found: Machine = machine
        return found

    return group_resource(group, ("machine", device_type, asked), agree)
