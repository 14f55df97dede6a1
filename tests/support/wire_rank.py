"""A rank of the tests of a faulty wire: an MoE layer trained step by step over two hosts. Each step
is a line of its output: number, seconds, sum of the gradients.

    python -m tests.support.wire_rank STEPS TIMEOUT_S LATE_S

The ranks of the second host come LATE_S seconds late to the second step.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.moe.sharding import local_part


def main() -> int:
    """Train; 3 where a peer did not answer."""
    steps, timeout_s, late_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    shared_rounds(dist.group.WORLD, timeout_s)
    layer = MoELayer(MoEConfig(64, 48, 4, 2), dist.group.WORLD)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(rank))
    for step in range(steps):
        if step == 1 and os.environ["GROUP_RANK"] == "1":
            time.sleep(late_s)
        begun = time.perf_counter()
        try:
            layer(x).square().sum().backward()
        except PeerTimeoutError as error:
            print(f"failed {time.perf_counter() - begun:.2f} {error}", flush=True)
            os._exit(3)
        found = sum(
            float(local_part(p.grad).abs().sum()) for p in layer.parameters() if p.grad is not None
        )
        layer.zero_grad()
        print(f"step {step} {time.perf_counter() - begun:.3f} {found:.4f}", flush=True)
    assert layer.backend == "hierarchical"
    os._exit(0)  # a peer's end is no matter of these tests


if __name__ == "__main__":
    sys.exit(main())
