"""Run tests/gpu on the GPUs of this machine and write which test passed, failed or was skipped.

    python -m tools.run_gpu_tests --output benchmarks/results/gpu_tests.json

Each file runs in a pytest of its own, first with one visible GPU each, as many at a time as there
are GPUs (times --jobs). Tests that were skipped for want of GPUs then run with two, and at last
with all; --sizes names other numbers of GPUs. The result file is written after each file; a row
names the test, its outcome, the GPUs it had, its seconds and, where it was skipped or failed, the
reason. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import environment

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
_WANTS_GPUS = re.compile(r"\b(GPUs?|ranks?)\b")  # in the reason of a skip


def read_junit(path: Path) -> dict[str, dict[str, Any]]:
    """The outcome of each test of a JUnit file, by its name `tests/gpu/test_x.py::test_y[z]`.

    A file of which nothing was collected (`pytest.importorskip`) has one row, by the file's name.
    """
    rows: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        test = (
            f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"
        )
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("skipped", "failure", "error"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                message, text = child.get("message", ""), (child.text or "").strip()
                reason = text if message == "collection skipped" else message or text
                # The first lines say what failed, the last ones of a traceback say why.
                reason = reason if len(reason) < 1500 else f"{reason[:400]} ... {reason[-1000:]}"
        rows[test] = {"outcome": outcome, "seconds": round(float(case.get("time", 0)), 1)}
        if reason:
            rows[test]["reason"] = reason
    return rows


def run_file(file: str, gpus: list[str], limit_s: float) -> dict[str, dict[str, Any]]:
    """Run one file of tests with `gpus` visible; a run that outlives `limit_s` seconds is one row
    that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
        command += [file, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            reason = f"did not end within {limit_s:.0f} s"
            return {file: {"outcome": "failed", "seconds": limit_s, "reason": reason}}
        if not report.exists():
            reason = f"pytest ended with status {process.returncode} and wrote no report"
            return {file: {"outcome": "failed", "seconds": 0.0, "reason": reason}}
        return {test: {**row, "gpus": len(gpus)} for test, row in read_junit(report).items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file of what was found")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="default: all of tests/gpu")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="GPUS", help="default: 1, 2, all")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time on the same GPUs")
    parser.add_argument("--limit", type=float, default=400, help="seconds a file may take")
    options = parser.parse_args()
    # Devices are counted without a context of CUDA: the tests need the memory.
    count = torch.cuda.device_count()
    if not count:
        parser.error("no GPU is visible to torch: run it where nvidia-smi lists one")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(index) for index in range(count)]
    files = options.files or sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )
    head, rows, started = environment(count), {}, time.monotonic()

    def write() -> None:
        listed = [{"test": test, **row} for test, row in sorted(rows.items())]
        seconds = round(time.monotonic() - started)
        document = {**head, "seconds": seconds, "tests": listed}
        options.output.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")

    for size in options.sizes or sorted({1, min(2, count), count}):
        free: queue.Queue[list[str]] = queue.Queue()
        for first in options.jobs * list(range(0, count - size + 1, size)):
            free.put(devices[first : first + size])

        def run(file: str, free: queue.Queue[list[str]] = free) -> dict[str, dict[str, Any]]:
            mine = free.get()
            try:
                return run_file(file, mine, options.limit)
            finally:
                free.put(mine)

        wanted = files if not rows else sorted(
            {test.split("::")[0] for test, row in rows.items() if _lacks_gpus(row)}
        )  # fmt: skip
        with ThreadPoolExecutor(max(1, free.qsize())) as pool:
            for done in as_completed([pool.submit(run, file) for file in wanted]):
                for test, row in done.result().items():
                    if test not in rows or _lacks_gpus(rows[test]) or row["outcome"] == "failed":
                        rows[test] = row
                write()
    outcomes = [row["outcome"] for row in rows.values()]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    for test, row in sorted(rows.items()):
        if row["outcome"] == "failed":
            print(f"failed with {row.get('gpus')} GPUs: {test}: {row.get('reason')}")
    return int("failed" in outcomes)


def _lacks_gpus(row: dict[str, Any]) -> bool:
    return row["outcome"] == "skipped" and bool(_WANTS_GPUS.search(row.get("reason", "")))


if __name__ == "__main__":
    raise SystemExit(main())
