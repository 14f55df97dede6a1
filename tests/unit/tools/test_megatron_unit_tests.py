"""The comparison of Megatron's own unit tests with this package and without."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tools.megatron_test_sessions import Found, Sessions, read_results
from tools.megatron_test_table import kept
from tools.run_megatron_unit_tests import _Record, counts, problems


def test_the_worst_rank_decides_and_a_test_that_never_ended_has_hung(tmp_path: Path) -> None:
    calls = {"overlapped": 2, "moe_forwards": 3}
    ranks: tuple[list[dict[str, Any]], ...] = (
        [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "skipped"}],
        [
            {"test": "a", "outcome": "failed", "error": "why"},
            {"test": "c", "outcome": "started"},
            {"test": "c", "outcome": "passed", **calls},
            {"test": "d", "outcome": "started"},
        ],
    )
    for rank, lines in enumerate(ranks):
        (tmp_path / f"rank-{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_results(tmp_path)
    outcomes = {"a": "failed", "b": "skipped", "c": "passed", "d": "hung"}
    assert {test: entry["outcome"] for test, entry in found.items()} == outcomes
    assert found["a"]["error"] == "why"
    assert counts(found) == {"passed": 1, "failed": 1, "skipped": 1, "hung": 1, **calls}


def test_what_was_found_is_kept_and_a_later_run_goes_on(tmp_path: Path) -> None:
    output, files = tmp_path / "found.json", ["f.py", "g.py"]
    entry = {"outcome": "failed", "overlapped": 0, "moe_forwards": 0, "error": "x"}
    first = _Record(output, files, 2)
    first.take(["f.py"], "with", {"f.py::t": entry}, "0", again=False)
    later = _Record(output, files, 2)
    assert [later.todo(files, way) for way in ("with", "forced")] == [["g.py"], ["g.py"]]
    later.take(["f.py::t"], "with", {"f.py::t": {**entry, "outcome": "passed"}}, "0", again=True)
    later.take(["g.py"], "with", {}, "ended after 5 s", again=False)
    found = json.loads(output.read_text())
    assert found["cut_short"] == {"g.py with": "ended after 5 s"}
    assert found["files"]["f.py"]["with"]["f.py::t"]["first"] == "failed"
    small = kept(found)
    assert small["files"] == {"f.py": {"with": {"passed": 1}}}
    assert small["not_run"] == {"f.py": ["without"], "g.py": ["without", "with", "forced"]}
    assert small["again"] == [
        {"test": "f.py::t", "way": "with", "first": "failed", "second": "passed"}
    ]


def found(outcome: str = "passed", error: str = "", overlapped: int = 0, ran: int = 4) -> Found:
    entry = {"outcome": outcome, "overlapped": overlapped, "moe_forwards": ran}
    return {"f::t": entry | ({"error": error} if error else {})}


@pytest.mark.parametrize(("with_", "forced", "said"), [
    (found(overlapped=1), found(overlapped=1), None),
    (found(), found("failed", "megatron_fluid.errors.ConfigError: moe_backend: found"), None),
    (found(ran=0), found(ran=0), None),
    (found("failed", "AssertionError"), found(overlapped=1), "passed without, failed with"),
    (found(overlapped=1), found("failed", "AssertionError"), "failed with a backend forced"),
    (found("hung"), found(overlapped=1), "passed without, hung with"),
    (found(), found(), "none was overlapped, and nothing says why"),
])  # fmt: skip
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
    sessions = Sessions(tmp_path, 1, "rounds", 5)
    tests, ended = sessions.run(["f"], "with", time.monotonic() + 60)
    assert list(tests) == ran
    assert ended == ("0" if code == "1" else code)
    assert done == ([[], ["a", "b"]] if code == "1" else [[]])
