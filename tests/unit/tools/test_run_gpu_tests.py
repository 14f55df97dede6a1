"""tools/run_gpu_tests.py: reports of pytest, and which tests run again with more GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import run_gpu_tests

_REPORT = """<testsuites><testsuite>
<testcase classname="" name="tests.gpu.test_te"><skipped message="collection skipped">('x.py', 15, "Skipped: no engine")</skipped></testcase>
<testcase classname="tests.gpu.test_a" name="test_one[x]" time="1.26"/>
<testcase classname="tests.gpu.test_a" name="test_two" time="0.1"><failure message="assert 1 == 2">long</failure></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_a_report_gives_each_test_its_outcome_and_reason(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(_REPORT)
    assert run_gpu_tests.read_junit(tmp_path / "r.xml") == {
        "tests/gpu/test_te.py": {
            "outcome": "skipped",
            "seconds": 0.0,
            "reason": "('x.py', 15, \"Skipped: no engine\")",
        },
        "tests/gpu/test_a.py::test_one[x]": {"outcome": "passed", "seconds": 1.3},
        "tests/gpu/test_a.py::test_two": {
            "outcome": "failed",
            "seconds": 0.1,
            "reason": "assert 1 == 2",
        },
    }


@pytest.mark.parametrize("fails", [False, True])
def test_tests_that_lack_gpus_run_again_with_two_and_with_all(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, int]] = []

    def run_file(file: str, gpus: list[str], limit_s: float) -> dict[str, dict[str, Any]]:
        runs.append((file, len(gpus)))
        wants = {"one": 1, "two": 2, "four": 4}[file]
        row: dict[str, Any] = {"outcome": "failed" if fails else "passed", "gpus": len(gpus)}
        if len(gpus) < wants:
            row |= {"outcome": "skipped", "reason": f"needs {wants} GPUs"}
        absent = {"outcome": "skipped", "reason": "megatron is not installed"}
        return {f"{file}::test": row, f"{file}::other": absent}

    monkeypatch.setattr(run_gpu_tests, "run_file", run_file)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(run_gpu_tests, "environment", lambda gpus: {"gpus": gpus})
    output = tmp_path / "out.json"
    arguments = ["x", "--output", str(output), "--files", "one", "two", "four"]
    monkeypatch.setattr("sys.argv", arguments)
    assert run_gpu_tests.main() == int(fails)
    assert sorted(runs) == sorted(
        [("one", 1), ("two", 1), ("four", 1), ("two", 2), ("four", 2), ("four", 4)]
    )
    rows = {row["test"]: row for row in json.loads(output.read_text())["tests"]}
    assert {name: rows[f"{name}::test"]["gpus"] for name in ("one", "two", "four")} == {
        "one": 1,
        "two": 2,
        "four": 4,
    }
    assert rows["one::other"]["outcome"] == "skipped"
