"""A rank of the tests of a faulty wire: an MoE layer trained step by step over two hosts."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.moe.sharding import local_part

__all__ = ["LOST", "train"]

LOST = 3
"""Exit status of a rank whose peer did not answer."""


def train(
    rank: int, world: int, hosts: Sequence[str], environments: Sequence[Mapping[str, str]],
    folder: str, steps: int, timeout_s: float, late_s: float,
) -> None:  # fmt: skip
    """Train in the network namespace ``hosts[rank]``. Each step is a line of folder/RANK.txt:
    number, seconds, sum of the gradients. Rank 1 comes `late_s` seconds late to the second step."""
    output = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.setns(os.open(f"/run/netns/{hosts[rank]}", os.O_RDONLY), os.CLONE_NEWNET)
    os.environ.update(environments[rank])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    shared_rounds(dist.group.WORLD, timeout_s)
    layer = MoELayer(MoEConfig(64, 48, 4, 2), dist.group.WORLD)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(rank))
    for step in range(steps):
        if step == 1 and rank == 1:
            time.sleep(late_s)
        begun = time.perf_counter()
        try:
            layer(x).square().sum().backward()
        except PeerTimeoutError as error:
            print(f"failed {time.perf_counter() - begun:.2f} {error}", flush=True)
            os._exit(LOST)
        found = sum(
            float(local_part(p.grad).abs().sum()) for p in layer.parameters() if p.grad is not None
        )
        layer.zero_grad()
        print(f"step {step} {time.perf_counter() - begun:.3f} {found:.4f}", flush=True)
    assert layer.backend == "hierarchical"
    os._exit(0)  # how a peer ends is not tested here
