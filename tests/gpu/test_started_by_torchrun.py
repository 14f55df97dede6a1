"""Tests that run on all ranks of a torchrun job, started from a plain pytest, so that `make test`
has them, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two or more GPUs"),
    pytest.mark.skipif("RANK" in os.environ, reason="these ranks are running already"),
]


@pytest.mark.parametrize("file", [
    "tests/gpu/test_nvlink_moe.py",
    "tests/gpu/test_nvlink_moe_graphs.py",
    "tests/test_all_to_all.py",
])  # fmt: skip
def test_all_ranks_pass(file: str) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={GPUS}",
    ]  # fmt: skip
    command += ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", file]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
