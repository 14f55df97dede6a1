"""Two jobs on one cache, as processes of their own: both start on an empty one, and one is killed
while it writes. The other goes on, and nothing half written is ever read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process]

KERNELS = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
import triton
from megatron_fluid.cuda import kernel_build

triton.knobs.cache.dir, role = sys.argv[1:]
code = b"machine code" * 100_000
if role == "killed":
    def stay(number, mode):  # the file is whole but for its name
        print("writing", flush=True)
        time.sleep(600)
    os.fchmod = stay

def make():
    print("making", flush=True)
    time.sleep(0.5)
    return code

unit = SimpleNamespace(name="unit", key="k" * 64, compile=make)
assert kernel_build._obtain(unit) == code
print("done", flush=True)
"""

TEXT = """
import sys, time
from pathlib import Path
sys.path.insert(0, "examples")
import text_dataset as td

folder, role = Path(sys.argv[1]), sys.argv[2]
class Tokenizer(td.ByteTokenizer):
    def encode(self, piece, source):
        if role == "killed" and source.endswith("(piece 3)"):
            print("writing", flush=True)
            time.sleep(600)
        return super().encode(piece, source)

files = td.find_text_files([folder / "in"])
built = td.build_text_dataset(files, Tokenizer(), (0.5, 0.5, 0.0), folder / "cache", 300.0)
print("done", built.folder, sum(built.bytes.values()), flush=True)
"""

type Start = Callable[[str, Path, str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    jobs: list[subprocess.Popen[str]] = []

    def begin(code: str, folder: Path, role: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), role],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        jobs.append(job)
        return job

    yield begin
    for job in jobs:
        job.kill()
        job.wait()


def wait_for(job: subprocess.Popen[str], word: str) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith(word):
            return
    raise AssertionError(f"the job ended with {job.wait()} before it said {word!r}")


def last_line(job: subprocess.Popen[str]) -> str:
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    return out.splitlines()[-1]


def test_a_kernel_is_made_once_by_two_jobs_that_start_together(
    tmp_path: Path, start: Start
) -> None:
    jobs = [start(KERNELS, tmp_path, "whole") for _ in range(2)]
    said = [job.communicate(timeout=300)[0].split() for job in jobs]
    assert sorted(map(len, said)) == [1, 2], said
    assert all(words[-1] == "done" for words in said)
    names = sorted(path.name for path in (tmp_path / "megatron_fluid").iterdir())
    assert names == [f"{'k' * 64}.cubin", f"{'k' * 64}.lock"]


def test_a_job_killed_while_it_writes_a_kernel_leaves_none(tmp_path: Path, start: Start) -> None:
    killed = start(KERNELS, tmp_path, "killed")
    wait_for(killed, "writing")
    assert not list((tmp_path / "megatron_fluid").glob("*.cubin"))
    other = start(KERNELS, tmp_path, "whole")
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    assert last_line(other) == "done"


def test_a_job_killed_while_it_tokenises_is_followed_by_the_one_that_waits(
    tmp_path: Path, start: Start
) -> None:
    texts, cache = tmp_path / "in", tmp_path / "cache"
    texts.mkdir()
    whole = "".join(f"line number {index}\n" for index in range(2000))
    (texts / "a.txt").write_text(whole)
    killed = start(TEXT, tmp_path, "killed")
    wait_for(killed, "writing")
    assert [path for path in cache.glob("*.partial.*") if any(path.iterdir())]
    other = start(TEXT, tmp_path, "whole")  # not before: the first to come does the work
    time.sleep(3)
    killed.send_signal(signal.SIGKILL)
    said = last_line(other)
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert said == f"done {folder} {len(whole)}"
    assert json.loads((folder / "dataset.json").read_text())["files"] == 1
