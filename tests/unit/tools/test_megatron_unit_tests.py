"""The comparison of Megatron's own unit tests with this package and without."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tools.megatron_test_sessions import Sessions
from tools.run_megatron_unit_tests import (
    Found,
    compare,
    counts,
    problems,
    read_outcomes,
    read_results,
    table,
)

ROOT = Path(__file__).resolve().parents[3]


def test_the_worst_rank_decides_in_the_comparison_of_unit_tests(tmp_path: Path) -> None:
    lines = {
        0: [("a", "passed"), ("b", "skipped")],
        1: [("a", "failed"), ("b", "skipped"), ("c", "passed")],
    }
    for rank, outcomes in lines.items():
        text = "\n".join(
            json.dumps({"test": test, "when": "call", "outcome": outcome})
            for test, outcome in outcomes
        )
        (tmp_path / f"rank-{rank}.jsonl").write_text(text)
    found = read_outcomes(tmp_path)
    assert found == {"a": "failed", "b": "skipped", "c": "passed"}
    assert compare(found, found) == []
    assert compare(found, {"a": "passed", "b": "skipped"}) == [
        "a: failed without, passed with megatron_fluid",
        "c: passed without, missing with megatron_fluid",
    ]
    rows = table({"x.py": (found, found), "y.py": (found, {}), "z.py": ({}, {})}).splitlines()
    assert [row.split()[-1] for row in rows[1:]] == ["yes", "NO", "NO"]
    assert rows[1].split()[1] == "1/1/1"


def test_a_test_that_started_and_never_ended_has_hung(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"test": "a", "when": "start", "outcome": "started"},
        {"test": "a", "when": "call", "outcome": "passed", "overlapped": 2, "moe_forwards": 3},
        {"test": "b", "when": "start", "outcome": "started"},
    ]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_results(tmp_path)
    assert {test: entry["outcome"] for test, entry in found.items()} == {"a": "passed", "b": "hung"}
    assert counts(found) == {
        "passed": 1, "failed": 0, "skipped": 0, "hung": 1, "overlapped": 2, "moe_forwards": 3,
    }  # fmt: skip


def found(outcome: str = "passed", error: str = "", overlapped: int = 0, ran: int = 4) -> Found:
    entry = {"outcome": outcome, "overlapped": overlapped, "moe_forwards": ran}
    return {"f::t": entry | ({"error": error} if error else {})}


@pytest.mark.parametrize(
    ("with_", "forced", "said"),
    [
        (found(overlapped=1), found(overlapped=1), None),
        (found(), found("failed", "megatron_fluid.errors.ConfigError: moe_backend: found"), None),
        (found(ran=0), found(ran=0), None),
        (found("failed", "AssertionError"), found(overlapped=1), "passed without, failed with"),
        (found(overlapped=1), found("failed", "AssertionError"), "failed with a backend forced"),
        (found("hung"), found(overlapped=1), "passed without, hung with"),
        (found(), found(), "none was overlapped, and nothing says why"),
    ],
)
def test_what_may_and_what_may_not_be_new(with_: Found, forced: Found, said: str | None) -> None:
    lines = problems({"f": {"without": found(), "with": with_, "forced": forced}})
    assert bool(lines) == (said is not None), lines
    if said is not None:
        assert said in lines[0]


@pytest.mark.parametrize(
    ("code", "ran"), [("1", ["a", "b", "c"]), ("ended after 5 s", ["a"])], ids=["hung", "cut"]
)
def test_a_session_goes_on_behind_a_hang_and_ends_with_its_time(
    code: str, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that ran when the time was up has not hung: it has not been run."""
    done: list[list[str]] = []

    def attempt(self: Sessions, tests: Any, way: str, folder: Path, limit_s: float) -> str:
        done.append((folder / "done").read_text().split())
        lines = [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "started"}]
        if len(done) > 1:
            lines = [{"test": "c", "outcome": "passed"}]
        (folder / "rank-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return code if len(done) == 1 else "0"

    monkeypatch.setattr(Sessions, "_attempt", attempt)
    sessions = Sessions(tmp_path, 1, "rounds", 5, 60.0, time.monotonic() + 60, (), 1, False)
    tests, ended = sessions.run(["f"], "with")
    assert list(tests) == ran
    assert ended == ("0" if code == "1" else code)
    assert done == ([[], ["a", "b"]] if code == "1" else [[]])
