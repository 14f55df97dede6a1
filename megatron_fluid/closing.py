"""Giving back what is kept for a process group."""

from __future__ import annotations

import sys

import torch.distributed as dist

__all__ = ["close_group"]

_KEPT = {
    "megatron_fluid.attention.head_domain": "close_head_domain",
    "megatron_fluid.moe.nvlink_shared": "close_domains",
    "megatron_fluid.tensor_parallel.choice": "close_backends",
}


def close_group(group: dist.ProcessGroup) -> None:
    """Give back the symmetric memory that layers and operations share on `group`: before the group is destroyed in a process that goes on.
    Collective; layers that have used it are not to be called again. Without it that memory goes when the next group takes some.
    """
    for module, close in _KEPT.items():
        if module in sys.modules:  # else nothing is kept, and importing it may need Triton
            getattr(sys.modules[module], close)(group)
