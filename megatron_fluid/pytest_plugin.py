"""A pytest plug-in: `pytest -p megatron_fluid.pytest_plugin` patches Megatron before its own
conftest imports it.

On a machine without a GPU that includes CPU mode, and the test modules find that CUDA is
available: nearly all of Megatron's unit tests are skipped otherwise. Torch, Megatron and
megatron_fluid themselves get the true answer.

    torchrun --nproc_per_node 8 -m pytest -p megatron_fluid.pytest_plugin
    tests/unit_tests/transformer/moe/test_moe_layer.py

Environment variables:
    MEGATRON_FLUID_PATCHES: "all" (default), or "cpu" for CPU mode alone, which is what a run
        without the plug-in is compared with where there is no GPU. (`MEGATRON_FLUID=off` leaves all
        of it out.)
    MEGATRON_FLUID_TEST_RESULTS: a folder; each rank appends its results to `rank-<n>.jsonl` there
    as they come.
"""

import json
import os
from pathlib import Path

import pytest

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu import mode as cpu

__all__ = ["pytest_report_header", "pytest_runtest_logreport"]

_CHOICES = ("all", "cpu")


def _choose() -> str:
    """Put the choice of patches in force; nothing of Megatron is imported yet."""
    choice = os.environ.get("MEGATRON_FLUID_PATCHES", "all").strip().lower()
    if choice not in _CHOICES:
        raise ConfigError.of("MEGATRON_FLUID_PATCHES", choice, " or ".join(_CHOICES))
    os.environ.setdefault("MEGATRON_FLUID_CPU", "1")  # takes effect where no GPU is found
    cpu.claim_cuda_to_tests()
    if choice == "cpu":
        patches.disable(*(patch.name for patch in patches.PATCHES if patch.group != cpu.GROUP))
    return choice


_CHOICE = _choose()


def pytest_report_header() -> str:
    """One line: what is patched."""
    mode = "CPU mode (no GPU found)" if cpu.cpu_mode_active() else "GPU"
    return f"megatron_fluid: patches={_CHOICE}, {mode}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a phase's outcome to this rank's results; a test that ends its process has then left
    those before it."""
    folder = os.environ.get("MEGATRON_FLUID_TEST_RESULTS")
    if not folder or (report.when != "call" and report.outcome == "passed"):
        return
    line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome}
    with Path(folder, f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as results:
        results.write(json.dumps(line) + "\n")
