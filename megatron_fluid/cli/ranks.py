"""Join the job that torchrun has started, for a command that runs on its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_fluid.errors import ConfigError

__all__ = ["run_rank"]

_TIMEOUT_S = 60.0  # of a collective; NCCL connects in the first


def run_rank[Result](compute: Callable[[dist.ProcessGroup, torch.device], Result]) -> Result | None:
    """Call `compute` with the world group and this rank's device; its result on rank 0, else None.

    Raises:
        ConfigError: a host has more ranks than GPUs.
    """
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpus and local >= gpus:
        raise ConfigError.of("ranks of this host", f"{local + 1} or more", f"{gpus}, one a GPU")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        device_id=device if gpus else None,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        result = compute(world, device)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
