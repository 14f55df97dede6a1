"""A pytest plug-in of tools/megatron_test_sessions.py: record the outcome of each unit test of
Megatron-LM.


Each rank appends lines of JSON to `rank-<n>.jsonl` in the folder MEGATRON_FLUID_TEST_RESULTS: one
when a test starts, and one for each outcome, with the number of forwards of MoE layers and of
those that megatron_fluid overlapped. Tests that the folder's file `done` names are not run.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_collectreport",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
    "pytest_runtest_setup",
]

# Module, class, method, and what a call of it counts as.
_COUNTED = (
    ("megatron_fluid.patches.moe.layer", "OverlappedLayer", "forward", "overlapped"),
    ("megatron_fluid.moe.open_exchange", "OpenExchange", "dispatch", "overlapped"),
    (
        "megatron_fluid.patches.attention.self_attention",
        "OverlappedAttention",
        "forward",
        "overlapped",
    ),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer", "forward", "moe_forwards"),
)
_FOLDER = Path(os.environ["MEGATRON_FLUID_TEST_RESULTS"])
_calls: Counter[str] = Counter()
_counting: set[str] = set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that an earlier session has run."""
    done = _FOLDER / "done"
    if done.exists():
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
    with (_FOLDER / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as results:
        results.write(json.dumps(line) + "\n")
