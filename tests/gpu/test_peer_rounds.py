"""Peer rounds over NCCL: correct beside the oracle at any number of hardware queues, and a lost
peer ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fluid.comm.watcher import EXIT_CODE
from tests.support.launch import run_ranks_outcomes
from tests.support.lost_peer import lose_a_peer
from tests.support.machine import GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("queues", ["", "1"])
def test_against_the_oracle(queues: str) -> None:
    script = Path(__file__).resolve().parents[1] / "test_correctness.py"
    environment = dict(os.environ)
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if queues:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={GPUS}",
        str(script),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all correct" in done.stdout


@pytest.mark.parametrize("silent", [False, True], ids=["dead", "silent"])
def test_a_lost_peer_ends_the_waiting_process(silent: bool) -> None:
    outcomes = run_ranks_outcomes(lose_a_peer, 2, silent, backend="nccl", timeout_s=50)
    # NCCL's own watchdog may notice a dead process first and abort; a silent one only the monitor
    # can notice in time.
    assert outcomes[0].error is not None
    if silent:
        assert f"exit code {EXIT_CODE}" in outcomes[0].error
