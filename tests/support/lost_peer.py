"""A rank that goes missing in a round over NCCL. Also run alone: torchrun --nproc_per_node=4
tests/support/lost_peer.py"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_fluid.comm.p2p_rounds import P2PRounds


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


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    lose_a_peer(dist.get_rank(), dist.get_world_size(), silent=True)
