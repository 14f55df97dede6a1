"""The benchmark's program, run over gloo: its figures mean nothing there, its rows and tables must
be whole."""

from __future__ import annotations

from benchmarks.harness.results import Row
from benchmarks.suites.all_to_all import TARGETS_US, targets


def test_targets_are_judged_by_the_median() -> None:
    limit = TARGETS_US["r1-128"][0] / 1e3
    rows = [
        Row("r1-128", "dispatch", "fluid", limit * factor, 0.0, 1.0, 1) for factor in (0.9, 1.1)
    ]
    met, missed = targets(rows)
    assert met.endswith("met") and missed.endswith("MISSED")
