"""`make bench`: every suite gets its time, none takes the others' with it, and each file has its
place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness import run_all
from benchmarks.harness.run_all import SUITES, Job, main, run
from benchmarks.report.descriptions import SUITES as WORDS

ROOT = Path(__file__).resolve().parents[3]


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_suite_that_has_words_is_run() -> None:
    assert {job.suite for job in SUITES} | {"slow_wire"} == set(WORDS)  # which needs no GPU
    suites = ROOT / "benchmarks" / "suites"
    assert all((suites / f"{job.suite}.py").is_file() for job in SUITES)


@pytest.mark.process
def test_a_suite_that_runs_out_of_time_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_all, "_GRACE_S", 0.5)
    note = tmp_path / "pid"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    code = "import subprocess, sys, time\n"
    code += f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}])\n"
    code += f"open({str(note)!r}, 'w').write(str(child.pid))\ntime.sleep(3600)"
    for seconds in (2, 16, 128):
        assert run(Job("any", seconds), 1, 1.0, _python(code)) == "out of time"
        if note.exists():  # else the machine was too busy to start it in this time
            break
    child = int(note.read_text())
    while _runs(child):
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


@pytest.mark.parametrize("name", ["pictures", "run_all", "pretrain"])
def test_a_program_of_one_process_is_launched_once(name: str) -> None:
    command = [str(ROOT / "benchmarks" / "launch.sh"), name, "--help"]
    environment = {**os.environ, "NPROC": "2", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == 1
