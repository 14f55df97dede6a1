"""The suite that measures fixed orders of sums: its forms agree, and bits that differ are seen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness.results import read_results
from benchmarks.suites.determinism import _alike, _check

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="one tiny case without a GPU")
def test_one_tiny_case_gives_the_same_bits_in_every_form_of_ours(tmp_path: Path) -> None:
    output = tmp_path / "determinism.json"
    command = [sys.executable, "-m", "benchmarks.suites.determinism", "--smoke"]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "over the fastest forms: " in done.stdout
    rows = read_results(output)["rows"]
    assert {row["mode"] for row in rows} == {"combine", "row order", "rank sum", "layer train"}
    ours = [row for row in rows if row["variant"] == "fluid"]
    assert len(ours) == 4
    assert all(row["config"]["bitwise"] for row in ours)


def test_results_that_differ_are_seen() -> None:
    count = itertools.count()
    assert _alike(lambda: (torch.ones(3), torch.zeros(2)))
    assert not _alike(lambda: (torch.ones(3), torch.full((2,), float(next(count) > 3))))


def test_a_form_that_computes_something_else_is_refused() -> None:
    forms = {"fluid": lambda: (torch.ones(3),), "wrong": lambda: (torch.full((3,), 1.1),)}
    with pytest.raises(AssertionError, match=r"combine wrong is off by 1\.0e-01"):
        _check("combine", forms)
