"""Two jobs on one cache, as processes of their own: both start on an empty one, and one is killed
while it writes. The other goes on, and nothing half written is ever read."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from megatron_fluid.cuda import kernel_build
from tests.support.launch import run_ranks, run_ranks_outcomes

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
CODE = b"machine code" * 100_000
LINES = "".join(f"line number {index}\n" for index in range(2000))


def _write_and_die(folder: str) -> None:
    """As a job that is killed a second after it began to write."""
    Path(folder, "writing").touch()
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_writing(folder: str) -> None:
    while not Path(folder, "writing").exists():
        time.sleep(0.01)


def _kernel(rank: int, jobs: int, folder: str, killed: bool = False) -> int:
    """How often this job compiled. killed: rank 0, before the file has its name."""
    triton.knobs.cache.dir = folder
    made = []

    def compile_() -> bytes:
        made.append(rank)
        time.sleep(0.5)
        return CODE

    if killed and rank == 0:
        os.fchmod = lambda number, mode: _write_and_die(folder)
    elif killed:
        _wait_for_writing(folder)
        assert not list(Path(folder, "megatron_fluid").glob("*.cubin"))
    unit = SimpleNamespace(name="unit", key="k" * 64, compile=compile_)
    assert kernel_build._obtain(unit) == CODE  # type: ignore[arg-type]
    return len(made)


def test_a_kernel_is_made_once_by_two_jobs_that_start_together(tmp_path: Path) -> None:
    assert sorted(run_ranks(_kernel, 2, str(tmp_path), backend="")) == [0, 1]
    names = sorted(path.name for path in (tmp_path / "megatron_fluid").iterdir())
    assert names == [f"{'k' * 64}.cubin", f"{'k' * 64}.lock"]


def test_a_job_killed_while_it_writes_a_kernel_leaves_none(tmp_path: Path) -> None:
    lost, other = run_ranks_outcomes(_kernel, 2, str(tmp_path), True, backend="", grace_s=60)
    assert lost.exitcode == -signal.SIGKILL
    assert other.value == 1, other.error


def _text(rank: int, jobs: int, folder: str) -> tuple[str, int]:
    """The folder of the dataset and its bytes. Rank 0 is killed at the third piece; rank 1 asks
    after it: the first to come does the work."""
    sys.path.insert(0, EXAMPLES)
    import text_dataset

    class Tokenizer(text_dataset.ByteTokenizer):  # type: ignore[name-defined, misc]
        def encode(self, piece: bytes, source: str) -> object:
            if rank == 0 and source.endswith("(piece 3)"):
                _write_and_die(folder)
            return super().encode(piece, source)

    if rank == 1:
        _wait_for_writing(folder)
        partial = list(Path(folder, "cache").glob("*.partial.*"))
        assert any(any(path.iterdir()) for path in partial)
    built = text_dataset.build_text_dataset(
        text_dataset.find_text_files([Path(folder, "in")]),
        *(Tokenizer(), (0.5, 0.5, 0.0), Path(folder, "cache"), 300.0),
    )
    return str(built.folder), sum(built.bytes.values())


def test_a_job_killed_while_it_tokenises_is_followed_by_the_one_that_waits(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(LINES)
    lost, other = run_ranks_outcomes(_text, 2, str(tmp_path), backend="", grace_s=60)
    assert lost.exitcode == -signal.SIGKILL
    assert other.ok, other.error
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert other.value == (str(folder), len(LINES))
    assert json.loads((folder / "dataset.json").read_text())["files"] == 1
