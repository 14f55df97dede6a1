"""The benchmark's program, run over gloo: its figures mean nothing there, its rows and tables must
be whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.results import Row, read_results
from benchmarks.suites.all_to_all import TARGETS_US, targets

ROOT = Path(__file__).resolve().parents[3]


def test_a_small_run_writes_every_row_and_prints_every_table(tmp_path: Path) -> None:
    output = tmp_path / "all_to_all.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "benchmarks.suites.all_to_all",
        "--cases",
        "v2-lite-1",
        "--gemm",
        "16",
        "16",
        "16",
        "--iters",
        "2",
        "--output",
        str(output),
    ]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["mode"], row["variant"]) for row in read_results(output)["rows"]}
    assert rows == {
        *((mode, "fluid") for mode in ("dispatch", "combine", "dispatch_split", "combine_split")),
        *((mode, "fluid_eager") for mode in ("dispatch", "combine")),
        *(
            (f"{mode}_{half}", "fluid_eager")
            for mode in ("dispatch", "combine")
            for half in ("send", "receive")
        ),
        *((mode, "fluid_packed") for mode in ("dispatch", "combine")),
        *(
            (mode, variant)
            for mode in ("gemm", "gemm_with_dispatch")
            for variant in ("after_dispatch", "between_halves")
        ),
        ("combine", "fluid_weights_at_combine"),
        ("dispatch", "torch_ata"),
    }
    for words in (
        "v2-lite, captured",
        "v2-lite, eager",
        "v2-lite, a GEMM",
        "loses",
        "NVSHMEM AtA is missing: no GPU",
    ):
        assert words in done.stdout


def test_targets_are_judged_by_the_median() -> None:
    limit = TARGETS_US["r1-128"][0] / 1e3
    rows = [
        Row("r1-128", "dispatch", "fluid", limit * factor, 0.0, 1.0, 1) for factor in (0.9, 1.1)
    ]
    met, missed = targets(rows)
    assert met.endswith("met") and missed.endswith("MISSED")
