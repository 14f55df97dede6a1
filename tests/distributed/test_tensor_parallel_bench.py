"""The bench of tensor-parallel strategies as a user starts it: what it prints, verifies and leaves
behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fluid.profiling.traces import read_document
from tests.support.forked_program import run_program

ROOT = Path(__file__).resolve().parents[2]


def launched(script: str, flags: list[str], folder: Path) -> tuple[int, str]:
    command = [str(ROOT / "benchmarks" / "launch.sh"), script, *flags]
    environment = {**os.environ, "NPROC": "2", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def forked(script: str, flags: list[str], folder: Path) -> tuple[int, str]:
    return run_program(ROOT / "benchmarks" / script, 2, flags, folder, {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "script", "case", "flags"),
    [
        (launched, "test_ag_kernel", "ag-256-512-128", ["--dtype=bfloat16", "--has_bias"]),
        (forked, "test_gemm_rs.py", "rs-256-512-128", ["--dtype=float16", "--transpose_weight"]),
    ],
)
def test_one_problem_is_verified_and_traced(
    start: Callable[[str, list[str], Path], tuple[int, str]],
    script: str,
    case: str,
    flags: list[str],
    tmp_path: Path,
) -> None:
    sizes = case.split("-")[1:]
    flags = [*sizes, *flags, "--iters=2", "--warmup=1", "--verify", "--profile"]
    flags += ["--profile-folder", str(tmp_path)]
    flags += "--backends gemm_only torch fluid flux".split()
    code, output = start(script, flags, tmp_path)
    assert code == 0, output[-6000:]
    words = [line.split() for line in output.splitlines()]
    fluid = next(line for line in words if line[:1] == ["fluid"])
    assert float(fluid[-1]) < 1e-2, "the error against NCCL's way"
    assert any(line[:2] == ["flux", "absent:"] for line in words)
    assert {tuple(line[:3]) for line in words if line[:1] == ["rank"]} >= {
        ("rank", r, "fluid") for r in "01"
    }
    for variant in ("gemm_only", "torch", "fluid"):
        assert read_document(tmp_path / case / f"{variant}.json.gz")["traceEvents"]
    assert (tmp_path / case / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "fluid" in (tmp_path / case / "timeline.html").read_text()
