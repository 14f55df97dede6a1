"""Sessions of Megatron-LM's own unit tests: some files, one way, all ranks, and what they gave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["TESTS", "WAYS", "Found", "Sessions", "by_file", "read_results"]

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/unit_tests"
WAYS = ("without", "with", "forced")
# From best to worst; a test is as good as its worst rank.
_ORDER = ("skipped", "passed", "failed", "hung")
# Modules that take the place of others in a session. Megatron's conftest downloads data sets that
# none of these tests reads, by `requests`. Transformer Engine computes on GPUs only, and Megatron
# takes it for usable wherever it can be imported.
_NO_DOWNLOADS = "def get(*args, **kwargs):\n    raise RuntimeError('no downloads in this run')\n"
_NO_ENGINE = "raise ModuleNotFoundError('Transformer Engine is hidden in runs without a GPU')\n"
_MOST_RESUMES = 20  # of one session
_SESSION_S = 3600.0
_LOG_LINES = 30  # of a session that left no result
_PLUGIN, _RECORDER = "megatron_pytest_plugin", "record_megatron_tests"  # beside this file

type Found = dict[str, dict[str, Any]]  # test -> outcome, error, overlapped, moe_forwards


def read_results(folder: Path) -> Found:
    """What the pytest plug-in wrote, by test: the worst outcome over ranks ("hung" where a rank
    started it and never ended), that rank's error, and the most calls of any rank. A failing
    teardown fails the test. A file that could not be collected stands under its own name."""
    found: Found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        started: set[str] = set()
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            test = entry["test"]
            if entry["outcome"] == "started":
                started.add(test)
                continue
            started.discard(test)
            _take(found, test, entry["outcome"], entry)
        for test in started:
            _take(found, test, "hung", {"error": "did not end"})
    return found


def _take(found: Found, test: str, outcome: str, entry: Mapping[str, Any]) -> None:
    new = test not in found
    known = found.setdefault(test, {"outcome": _ORDER[0], "overlapped": 0, "moe_forwards": 0})
    if new or _ORDER.index(outcome) > _ORDER.index(known["outcome"]):
        known["outcome"] = outcome
        if "error" in entry:
            known["error"] = entry["error"]
    for key in ("overlapped", "moe_forwards"):
        known[key] = max(known[key], entry.get(key, 0))


def by_file(found: Found) -> dict[str, Found]:
    """The tests of each file, whose name is relative to the tests' folder."""
    files: dict[str, Found] = {}
    for test, entry in found.items():
        files.setdefault(test.partition("::")[0].removeprefix(f"{TESTS}/"), {})[test] = entry
    return files


@dataclass
class Sessions:
    """How sessions run, and those that are running. `run` may be called from several threads; `end`
    ends what they started.

    Attributes:
        checkout: the folder of Megatron-LM.
        ranks: processes of a session.
        backend: of the forced way.
        test_timeout: seconds for one test.
    """

    checkout: Path
    ranks: int
    backend: str
    test_timeout: int
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self, tests: Sequence[str], way: str, until: float) -> tuple[Found, str]:
        """Run files or tests on all ranks, and again from behind a test that hung, until
        `time.monotonic()` is `until`. Returns what was found, and how the last attempt ended:
        pytest's exit status, or why it was cut short."""
        found: Found = {}
        deadline = min(time.monotonic() + _SESSION_S, until)
        code = "no time left"
        for _ in range(_MOST_RESUMES):
            left = deadline - time.monotonic()
            if left <= 0 or self._ending.is_set():
                return found, "no time left"
            with tempfile.TemporaryDirectory(prefix="mlm-", ignore_cleanup_errors=True) as name:
                folder = Path(name)
                (folder / "done").write_text("\n".join(found))
                code = self._attempt(tests, way, folder, left)
                new = read_results(folder)
            hung = {test for test, entry in new.items() if entry["outcome"] == "hung"}
            if not code.isdigit():  # what ran when the session's time was up has not hung
                new = {test: entry for test, entry in new.items() if test not in hung}
            found |= new
            if not code.isdigit() or not hung:
                break
        return found, code

    def end(self) -> None:
        """End every session that runs, and let none begin."""
        self._ending.set()
        for process in list(self._running):
            _end(process)

    def _attempt(self, tests: Sequence[str], way: str, folder: Path, limit_s: float) -> str:
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self._command(tests), cwd=self.checkout,
                env=_environment(folder, way, self.backend),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            try:
                code = str(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                code = f"ended after {limit_s:.0f} s"
            finally:
                _end(process)
                self._running.discard(process)
        if not read_results(folder):
            print("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))
        return code

    def _command(self, tests: Sequence[str]) -> list[str]:
        command = [sys.executable]
        if torch.cuda.is_available():
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={self.ranks}", "-m", "pytest"]
        else:
            command += [str(ROOT / "tools" / "forked_ranks.py"), str(self.ranks)]
        command += ["-p", _PLUGIN, "-p", _RECORDER]
        command += ["-p", "no:cacheprovider", "-q"]
        command += ["-W", "ignore", "--continue-on-collection-errors"]
        command += [f"--timeout={self.test_timeout}", "--timeout-method=thread"]
        return [*command, *(f"{TESTS}/{test}" for test in tests)]


def _environment(folder: Path, way: str, backend: str) -> dict[str, str]:
    """The environment of one session: the package on the path (but not this folder's `tests`), the
    choice of patches, and a temporary folder of its own (tests use fixed names in it)."""
    path = folder / "path"
    gpu = torch.cuda.is_available()
    path.mkdir()
    (path / "megatron_fluid").symlink_to(ROOT / "megatron_fluid", target_is_directory=True)
    for plugin in (_PLUGIN, _RECORDER):
        (path / f"{plugin}.py").symlink_to(ROOT / "tools" / f"{plugin}.py")
    (path / "requests.py").write_text(_NO_DOWNLOADS)
    if not gpu:
        for name in ("transformer_engine", "transformer_engine_torch"):
            (path / f"{name}.py").write_text(_NO_ENGINE)
    choice = {
        "forced": {"MEGATRON_FLUID_MOE_BACKEND": backend},
        "without": {"MEGATRON_FLUID": "off"} if gpu else {"MEGATRON_FLUID_PATCHES": "cpu"},
    }
    return {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else processes, in every rank
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])),
        "MEGATRON_FLUID_TEST_RESULTS": str(folder),
        "TMPDIR": str(folder),
        **choice.get(way, {}),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a session's processes, first by asking. They are gone when this returns, also where they
    outlived the one that started them."""
    for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 30.0)):
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # else it stays in its group
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.poll()
