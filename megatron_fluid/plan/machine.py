"""The figures of a machine that predictions start from: rates of its device, what the host pays for
an operation, and the links between the ranks of a group.

All are in seconds, bytes and FLOP per second. `REFERENCE` holds those that the tuning notes give
for an H200, and some for CPU cores.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_fluid.errors import ConfigError

__all__ = ["REFERENCE", "Link", "Machine", "reference_machine"]


@dataclass(frozen=True)
class Link:
    """How the ranks of a group exchange: every rank sends at once.

    Attributes:
        ranks: of the group.
        latency_s: of one exchange, whatever its size.
        bytes_per_s: that a rank sends besides.
        start_s: of the host, to start one.
        hidden: share of its time that passes behind a GEMM, from 0 to 1.
    """

    ranks: int
    latency_s: float
    bytes_per_s: float
    start_s: float
    hidden: float

    def seconds(self, sent_bytes: float) -> float:
        """Of an exchange in which each rank sends so much to others."""
        return self.latency_s + sent_bytes / self.bytes_per_s if sent_bytes else 0.0


@dataclass(frozen=True)
class Machine:
    """Figures of a device, its host, and the links of one group.

    Attributes:
        device: the GPU's name, or "CPU".
        units: SMs of a GPU, among which the tiles of a GEMM are dealt out; 0: no tiles are counted.
        flops_per_s: of a GEMM whose tiles fill every wave, in the training dtype.
        gemm_s: of the smallest GEMM, on the device.
        bytes_per_s: of the device's memory, read and written.
        operation_s: of the host, for one operation of torch.
        copies: one-sided copies into peers' memory, by copy engines; None where there are none.
        collective: the all-to-all of torch.distributed; None for one rank.
        source: where the figures are from, for reports.
    """

    device: str
    units: int
    flops_per_s: float
    gemm_s: float
    bytes_per_s: float
    operation_s: float
    copies: Link | None = None
    collective: Link | None = None
    source: str = "measured"

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str | bytes, where: str) -> Self:
        """The inverse of `dumps`.

        Args:
            where: the file, for errors.

        Raises:
            ConfigError: no such JSON, or a figure out of range.
        """
        try:
            found = json.loads(text)
            links = {
                name: None if found.get(name) is None else _checked(Link, found[name])
                for name in ("copies", "collective")
            }
            return _checked(cls, found | links)
        except (ValueError, TypeError, AttributeError) as error:
            said = f"no figures of a machine ({error})"
            allowed = "a file that `megatron-fluid plan --write` has written"
            raise ConfigError.of(where, said, allowed) from None

    @classmethod
    def read(cls, path: str) -> Self:
        """The figures in a file.

        Raises:
            ConfigError: it cannot be read, or holds something else.
        """
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            allowed = "auto, measure, reference or a readable file"
            raise ConfigError.of("machine", f"{path} ({error})", allowed) from None
        return dataclasses.replace(cls.loads(text, path), source=path)


def _checked[T](kind: type[T], fields: Mapping[str, Any]) -> T:
    """An instance of Link or Machine whose figures are in range."""
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = fields.get(field.name)
        if field.type in ("float", "int"):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value):  # type: ignore[arg-type]
                raise ValueError(f"{field.name} is {value!r}")
            rate = field.name.endswith("per_s") or field.name == "ranks"
            least = 1 if rate else 0
            most = 1 if field.name == "hidden" else math.inf
            if not least <= value <= most:  # type: ignore[operator]
                raise ValueError(f"{field.name} is {value!r}")
        if field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r}")
    return kind(**fields)


# Measured: docs/tuning_notes.md#machine
REFERENCE: Mapping[str, Machine] = {
    "gpu": Machine(
        device="NVIDIA H200",
        units=132,
        flops_per_s=760e12,
        gemm_s=4e-6,
        bytes_per_s=3.5e12,
        operation_s=16e-6,
        copies=Link(4, 8e-6, 390e9, 12e-6, 0.8),
        collective=Link(4, 55e-6, 325e9, 40e-6, 0.1),
        source="reference",
    ),
    "cpu": Machine(
        device="CPU",
        units=0,
        flops_per_s=50e9,
        gemm_s=5e-6,
        bytes_per_s=8e9,
        operation_s=20e-6,
        collective=Link(2, 300e-6, 1e9, 50e-6, 0.5),
        source="reference",
    ),
}


def reference_machine(device_type: str, ranks: int) -> Machine:
    """The figures that are not measured, of a group of so many ranks."""
    found = REFERENCE["cpu" if device_type == "cpu" else "gpu"]

    def of(link: Link | None) -> Link | None:
        return None if link is None or ranks < 2 else dataclasses.replace(link, ranks=ranks)

    return dataclasses.replace(found, copies=of(found.copies), collective=of(found.collective))
