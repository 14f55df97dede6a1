"""Peer rounds over NCCL: correct beside the oracle at any number of hardware queues, and a lost
peer ends the process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.comm.watcher import EXIT_CODE
from tests.support.launch import run_ranks_outcomes
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
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={GPUS}",
        str(script),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all correct" in done.stdout


def lose_a_peer(rank: int, world: int, silent: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    rounds = P2PRounds(group, timeout_s=5.0)
    last = 2 * len(rounds.partners) - 1
    for step in range(
        last + 1
    ):  # two passes: in the second all connections are there, and only the GPU waits
        index = step % len(rounds.partners)
        if rank == 1 and step == last:
            torch.cuda.synchronize()
            if not silent:
                os._exit(0)
            time.sleep(60)
        sent = torch.full((1 << 20,), float(rank), device=rounds.device)
        received = torch.empty_like(sent)
        peer = rounds.partners[index]
        filled = [[sent], [received]] if peer is not None else [[], []]
        rounds.start("token dispatch", index, *filled).wait()
    # never returns on the lost rank's partner: the monitor ends the process
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device=rounds.device))
    torch.cuda.synchronize()


@pytest.mark.parametrize("silent", [False, True], ids=["dead", "silent"])
def test_a_lost_peer_ends_the_waiting_process(silent: bool) -> None:
    outcomes = run_ranks_outcomes(lose_a_peer, 2, silent, backend="nccl", timeout_s=50)
    # NCCL's own watchdog may notice a dead process first and abort; a silent one only the monitor
    # can notice in time.
    assert outcomes[0].error is not None
    if silent:
        assert f"exit code {EXIT_CODE}" in outcomes[0].error
