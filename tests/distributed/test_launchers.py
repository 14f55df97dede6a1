"""The all-to-all's test and benchmark, started in each way that their docstrings print."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.report import all_to_all_by_ranks
from benchmarks.report.all_to_all_by_ranks import main, table
from tests.support.graph_jobs import free_port
from tests.support.machine import GPUS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600  # four processes that import torch, on machines that do more than this
ONE_TEST = (
    *(sys.executable, "-m", "pytest", "-svx", "-p", "no:cacheprovider"),
    *("tests/test_all_to_all.py", "-k", "whole and top-16 and combine"),
)
MPIRUN = shutil.which("mpirun", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
GLOO_ONLY = pytest.mark.skipif(bool(GPUS), reason="more ranks than GPUs: the CPU's part")


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | settings, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def said_by(*processes: subprocess.Popen[str]) -> str:
    """What they print, all of which must end well."""
    said = "\n".join(process.communicate(timeout=TIMEOUT_S)[0] for process in processes)
    assert not any(process.returncode for process in processes), said
    return said


def row(case: str, mode: str, variant: str, mean: float, **config: object) -> dict[str, object]:
    measured = {"mean_us": mean, "deviation_us": 0.25, **config}
    return {"case": case, "mode": mode, "variant": variant, "config": measured}


def test_the_table_has_a_row_for_each_transport_and_rival_and_a_column_for_each_world() -> None:
    eight = [
        row("r1-1", "dispatch", "fluid", 12.0, transport="nvlink"),
        row("r1-1", "dispatch_eager", "fluid", 99.0, transport="nvlink"),
        row("r1-1", "dispatch", "torch_ata", 24.04, transport="nvlink"),
        row("r1-1", "dispatch_eager", "nvshmem_ata", 59.9),
        row("r1-1", "combine", "torch_ata", 48.0, transport="nvlink"),
        row("r1-128", "dispatch", "fluid", 77.0, transport="nvlink"),
        row("r1-1", "combine", "fluid", 13.5, transport="nvlink"),
        row("r1-1", "dispatch", "fluid", 40.0, transport="nccl"),
    ]
    four = [row("r1-1", "combine", "fluid", 11.0, transport="nvlink")]
    lines = table({8: eight, 4: four}, "r1", 1, eager=False)
    assert lines[0] == "1 token per GPU:"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0] == ["1 tok per GPU", "EP8", "EP4"]
    assert all(set(cell) == {":", "-"} for cell in cells[1])
    assert cells[2:] == [
        ["NVLINK Dispatch", "12.0μs ±  0.2μs", "x"],
        ["NCCL Dispatch", "40.0μs ±  0.2μs", "x"],
        ["NVLINK Combine", "13.5μs ±  0.2μs", "11.0μs ±  0.2μs"],
        ["Torch AtA Dispatch", "24.0μs ±  0.2μs", "x"],
        ["Torch AtA Combine", "48.0μs ±  0.2μs", "x"],
    ]
    assert "NVSHMEM AtA Dispatch" in "".join(table({8: eight}, "r1", 1, eager=True))
    assert len({len(line) for line in lines[2:]}) == 1


@pytest.mark.slow
@pytest.mark.process
def test_the_benchmark_starts_its_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Defaults follow torch's number of GPUs, which a test before this one may have replaced.
    words = "--ranks 2 --iters 2 --transports gloo --tokens 1 --shape v2-lite"
    assert main("", words.split()) == 0
    said = capsys.readouterr().out
    labels = [line.split("|")[1].strip() for line in said.splitlines() if "μs ±" in line]
    assert labels == ["GLOO Dispatch", "GLOO Combine", "Torch AtA Dispatch", "Torch AtA Combine"]


def test_the_benchmark_says_what_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(all_to_all_by_ranks, "detect_launch", lambda: None)
    monkeypatch.setattr(all_to_all_by_ranks, "_start", lambda *_: "found 'nvlink', not to be met")
    assert main("", ["--ranks", "2", "--transports", "nvlink"]) == 1
    assert "EP2 nvlink: found 'nvlink', not to be met" in capsys.readouterr().out


@pytest.mark.slow
@GLOO_ONLY
def test_two_nodes_of_two_ranks_each_run_the_test_together() -> None:
    world = {"WORLD_SIZE": "4", "WORLD_LOCAL_SIZE": "2"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [start(*ONE_TEST, NODE_RANK=node, **world) for node in ("0", "1")]
    assert said_by(*nodes).count("1 passed") == 2


@pytest.mark.slow
@GLOO_ONLY
@pytest.mark.skipif(MPIRUN is None, reason="Open MPI's mpirun is not installed")
def test_mpirun_starts_the_ranks_of_the_test() -> None:
    mpi = start(
        *(str(MPIRUN), "-np", "2", *ONE_TEST),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1",  # Open MPI 4
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",  # Open MPI 5
        MASTER_PORT=str(free_port()),
    )
    assert said_by(mpi).count("1 passed") == 2
