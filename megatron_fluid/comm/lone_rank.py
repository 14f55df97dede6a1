"""A process group for a process that runs alone, without a launcher and without torch.distributed.

It has one rank, no backend and no name: nothing is ever sent over it. `torch.distributed` does not
know it, so a later init_process_group is not disturbed.
"""

from __future__ import annotations

import functools
import os

import torch.distributed as dist

from megatron_fluid.errors import ConfigError
from megatron_fluid.topology import real_group

__all__ = ["group_or_lone_rank", "is_lone"]

_FIRST = (
    "call torch.distributed.init_process_group() first, then give torch.distributed.group.WORLD"
)
# What torchrun, Open MPI, MPICH and one launch a node set: this rank or node, and all ranks.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("NODE_RANK", "WORLD_SIZE"),
)


@functools.cache
def _lone_group() -> dist.ProcessGroup:
    return dist.ProcessGroup(dist.HashStore(), 0, 1)


def is_lone(group: object) -> bool:
    """Whether `group` is that of a process alone."""
    return _lone_group.cache_info().currsize > 0 and group is _lone_group()


def group_or_lone_rank(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`; for None, the group of this process alone.

    Raises:
        ConfigError: None in a process that is one of several ranks. Each of them would train alone.
    """
    if group is not None:
        return real_group(group)
    if dist.is_initialized():
        world = dist.group.WORLD
        if world is not None and world.size() == 1:
            return world
        ranks = dist.get_world_size()
        allowed = f"an initialised process group, because torch.distributed has {ranks} ranks"
        raise ConfigError.of("group", None, allowed)
    for rank, size in _LAUNCHERS:
        count = os.environ.get(size, "1") if rank in os.environ else "1"
        if count != "1":
            raise ConfigError(f"group: found None in a job of {count} ranks, allowed: {_FIRST}")
    return _lone_group()
