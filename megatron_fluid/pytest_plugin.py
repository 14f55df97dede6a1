"""A pytest plug-in: `pytest -p megatron_fluid.pytest_plugin` patches Megatron before its own
conftest imports it.

On a machine without a GPU that includes CPU mode, and the test modules are told that CUDA is
available: nearly all of Megatron's unit tests are skipped otherwise. Torch, Megatron and
megatron_fluid themselves get the true answer. Gloo groups that a test leaves behind, each with
threads of its own, are closed after it.

    torchrun --nproc_per_node 8 -m pytest -p megatron_fluid.pytest_plugin
    tests/unit_tests/transformer/moe/test_moe_layer.py

Environment variables:
    MEGATRON_FLUID_PATCHES: "all" (default), or "cpu" for CPU mode alone, which is what a run
        without the plug-in is compared with where there is no GPU. (`MEGATRON_FLUID=off` leaves all
        of it out.)
    MEGATRON_FLUID_TEST_RESULTS: a folder. Each rank appends a line to `rank-<n>.jsonl` there when a
        test starts and for each outcome. Tests that its file `done` names are left out.
"""

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu import mode as cpu

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_collectreport",
    "pytest_report_header",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
]

_CHOICES = ("all", "cpu")
# Module, class and name of what counts: forwards of ours, and of MoE layers altogether.
_COUNTED = (
    ("megatron_fluid.patches.moe.layer", "OverlappedLayer", "forward", "overlapped"),
    ("megatron_fluid.moe.open_exchange", "OpenExchange", "dispatch", "overlapped"),
    ("megatron_fluid.patches.attention.overlapped", "OverlappedAttention", "forward", "overlapped"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer", "forward", "moe_forwards"),
)


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
_calls: Counter[str] = Counter()
_counting: set[str] = set()


def pytest_report_header() -> str:
    """One line: what is patched."""
    mode = "CPU mode (no GPU found)" if cpu.cpu_mode_active() else "GPU"
    return f"megatron_fluid: patches={_CHOICE}, {mode}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that an earlier session has run."""
    done = Path(os.environ.get("MEGATRON_FLUID_TEST_RESULTS", ""), "done")
    if "MEGATRON_FLUID_TEST_RESULTS" in os.environ and done.exists():
        names = set(done.read_text().splitlines())
        left_out = [item for item in items if item.nodeid in names]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in names]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test starts: one that never ends has hung."""
    _append({"test": nodeid, "when": "start", "outcome": "started"})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Count what the test calls."""
    for module, owner, name, key in _COUNTED:
        found = getattr(sys.modules.get(module), owner, None)
        if found is not None and f"{owner}.{name}" not in _counting:
            _counting.add(f"{owner}.{name}")
            setattr(found, name, _counted(getattr(found, name), key))
    _calls.clear()


def _counted(original: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[key] += 1
        return original(*args, **kwargs)

    return counted


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Close the gloo groups of a test that has taken its parallel state down."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or state.model_parallel_is_initialized() or not cpu.cpu_mode_active():
        return
    import torch.distributed as dist

    if dist.is_initialized():
        world = dist.group.WORLD
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not world:
                with contextlib.suppress(RuntimeError, ValueError):  # a test may have closed it
                    dist.destroy_process_group(group)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a phase's outcome to this rank's results; a test that ends its process has then left
    those before it."""
    if report.when != "call" and report.outcome == "passed":
        return
    line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome}
    if report.outcome != "passed":
        line["error"] = _reason(report)
    _append(line | dict(_calls))
    _calls.clear()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Append a file that cannot be imported, or that skips itself, in place of its tests."""
    if report.outcome != "passed":
        line = {"test": report.nodeid, "when": "collect", "outcome": report.outcome}
        _append(line | {"error": _reason(report)})


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """One line: the error, or why a test is skipped."""
    found = report.longrepr
    if isinstance(found, tuple):  # of a skip: file, line, reason
        found = found[2]
    message = str(getattr(getattr(found, "reprcrash", None), "message", found)).strip()
    lines = [text for text in message.splitlines() if text.strip()] or ["no message"]
    return (lines[-1] if report.when == "collect" else lines[0])[:300]


def _append(line: dict[str, Any]) -> None:
    if folder := os.environ.get("MEGATRON_FLUID_TEST_RESULTS"):
        with Path(folder, f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as results:
            results.write(json.dumps(line) + "\n")
