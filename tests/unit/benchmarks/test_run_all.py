"""`make bench`: every suite gets its time, none takes the others' with it, and each file has its
place."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness import run_all
from benchmarks.harness.run_all import SUITES, Job, main
from benchmarks.report.descriptions import SUITES as WORDS

ROOT = Path(__file__).resolve().parents[3]


def test_every_suite_that_has_words_is_run() -> None:
    assert {job.suite for job in SUITES} | {"slow_wire"} == set(WORDS)  # which needs no GPU
    suites = ROOT / "benchmarks" / "suites"
    assert all((suites / f"{job.suite}.py").is_file() for job in SUITES)


def test_the_others_are_measured_after_one_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def fake(job: Job, gpus: int, factor: float, command: Sequence[str] | None = None) -> str:
        seen.append(job.suite)
        return "failed, exit code 1" if job.suite == "attention" else "measured"

    monkeypatch.setattr(run_all, "run", fake)
    monkeypatch.setattr(run_all.torch.cuda, "device_count", lambda: 2)
    assert main(["--only", "block", "attention"]) == 1
    assert seen == ["attention", "block"]
    assert "failed, exit code 1" in capfd.readouterr().out
    assert main(["--only", "block"]) == 0


@pytest.mark.parametrize(("name", "ranks"), [("pictures", 1), ("pretrain", 1), ("moe_layer", 2)])
def test_a_program_of_one_process_is_launched_once(name: str, ranks: int) -> None:
    """The Python that launch.sh starts only prints its arguments."""
    command = [str(ROOT / "benchmarks" / "launch.sh"), name, "--help"]
    environment = {**os.environ, "NPROC": "2", "PYTHON": "/bin/echo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    launched = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}" in done.stdout
    assert launched is (ranks > 1), done.stdout
    assert re.search(rf"-m benchmarks\.\w+\.{name} --help$", done.stdout.strip()), done.stdout
