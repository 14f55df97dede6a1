"""Clock and power of a GPU while it runs something, as nvidia-smi reads them.

Power holds the clocks of a GPU down where GEMMs and a copy draw all that there is: what overlap
hides may then cost the GEMMs as much.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
from collections.abc import Iterator

import torch

__all__ = ["READ_S", "parse_readings", "read_gpu"]

READ_S = 0.8
"""Seconds that something has to run for a few readings."""
_FIELDS = {"sm_mhz": "clocks.sm", "watts": "power.draw.instant"}
_PERIOD_MS = 50


def parse_readings(text: str) -> dict[str, float]:
    """The median of each field over the lines of nvidia-smi's output; fields without a number are
    left out."""
    columns: list[list[float]] = [[] for _ in _FIELDS]
    for line in text.splitlines():
        cells = line.split(",")
        if len(cells) != len(_FIELDS):
            continue
        for column, cell in zip(columns, cells, strict=True):
            with contextlib.suppress(ValueError):  # "[N/A]"
                column.append(float(cell))
    pairs = zip(_FIELDS, columns, strict=True)
    return {name: statistics.median(found) for name, found in pairs if found}


@contextlib.contextmanager
def read_gpu(device: torch.device) -> Iterator[dict[str, float]]:
    """Read while the block runs: the dictionary holds the medians afterwards, and nothing without
    a GPU or nvidia-smi."""
    found: dict[str, float] = {}
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield found
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--loop-ms={_PERIOD_MS}"]
    command += [f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield found
    finally:
        process.terminate()
        said, _ = process.communicate()
        found |= parse_readings(said)
