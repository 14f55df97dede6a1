"""What this package knows of a process group: what is kept for it, how long its waits may last, and
the group of a process that runs alone.

Symmetric memory, buffers, connections and cached decisions are kept for a group and not for a
layer, so a model of any depth holds them once. They are keyed by the group object and not by its
name, because a name may come back after destroy_process_group.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.topology import real_group

__all__ = [
    "close_group",
    "group_or_lone_rank",
    "group_resource",
    "group_timeout_s",
    "held_everywhere",
    "is_destroyed",
    "is_lone",
    "wait_timeout_s",
]


# ---- what is kept for a group


@dataclass
class _Resource:
    value: Any
    close: Callable[[Any], None] | None


_resources: dict[dist.ProcessGroup, dict[Hashable, _Resource]] = {}


def group_resource[T](
    group: dist.ProcessGroup,
    key: Hashable,
    make: Callable[[], T],
    close: Callable[[T], None] | None = None,
) -> T:
    """Return what is kept for `group` under `key`; the first call makes it.

    Args:
        group: the process group.
        key: name of the resource within its group; begins with the name of the package's folder
            that owns it.
        make: builds the resource. It may be collective: all ranks then ask in the same order.
        close: gives its memory back in `close_group`. It may be collective.
    """
    group = real_group(group)
    kept = _resources.get(group)
    if kept is None:
        _drop_destroyed_groups()
        kept = _resources.setdefault(group, {})
    resource = kept.get(key)
    if resource is None:
        resource = kept[key] = _Resource(make(), close)
    value: T = resource.value
    return value


def held_everywhere(key: Hashable) -> list[Any]:
    """Return what groups that are not destroyed keep under `key`. Makes nothing."""
    held = [(group, kept[key]) for group, kept in [*_resources.items()] if key in kept]
    return [resource.value for group, resource in held if not is_destroyed(group)]


def close_group(group: dist.ProcessGroup) -> None:
    """Free the symmetric memory and connections that layers and operations share on `group`.

    Call it before the group is destroyed in a process that goes on. Collective. Layers that have
    used the group must not be called again. Without it, that memory is freed when the next group
    takes some.
    """
    for resource in reversed(_resources.pop(real_group(group), {}).values()):
        if resource.close is not None:
            resource.close(resource.value)


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Return whether destroy_process_group has ended `group`."""
    if is_lone(group):
        return False
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


def _drop_destroyed_groups() -> None:
    """Forget groups that nobody can share anything on: memory goes with its last user."""
    for group in filter(is_destroyed, [*_resources]):
        _resources.pop(group, None)


# ---- how long a rank waits for a peer


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a process group's collectives, in seconds: the longest of its backends,
    and torch's default where they do not say."""
    timeouts_s = [
        backend.options._timeout.total_seconds()
        for device in ("cuda", "cpu")
        if (backend := _backend(group, device)) is not None
    ]
    return max(timeouts_s, default=dist.constants.default_pg_timeout.total_seconds())


def _backend(group: dist.ProcessGroup, device: str) -> Any:
    try:
        backend = group._get_backend(torch.device(device))
    except RuntimeError:  # it has none for this device
        return None
    return backend if hasattr(getattr(backend, "options", None), "_timeout") else None


def wait_timeout_s(group: dist.ProcessGroup | None, timeout_s: float | None = None) -> float:
    """Return the bound on one wait of `group` (None: of all ranks), in seconds.

    It is `timeout_s` if given, else the configuration's, else the group's own timeout.
    """
    for asked in (timeout_s, current_config().timeout_s):
        if asked is not None:
            return asked
    return group_timeout_s(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]


# ---- a process that runs alone, without a launcher and without torch.distributed

# What torchrun, Open MPI, MPICH and one launch a node set: this rank or node, and all ranks.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("NODE_RANK", "WORLD_SIZE"),
)


@functools.cache
def _lone_group() -> dist.ProcessGroup:
    """A group of one rank without a backend and a name. torch.distributed does not know it, so a
    later init_process_group is not disturbed."""
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
            raise ConfigError(
                f"group: found None in a job of {count} ranks, allowed: call torch.distributed."
                "init_process_group() first, then give torch.distributed.group.WORLD"
            )
    return _lone_group()
