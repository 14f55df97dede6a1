"""What is kept for a process group: symmetric memory, buffers, connections and cached decisions.

Layers and operations share these, so a model of any depth holds them once. They are keyed by the
group object and not by its name, because a name may come back after destroy_process_group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.lone_rank import is_lone
from megatron_fluid.topology import real_group

__all__ = ["close_group", "group_resource", "held_everywhere", "is_destroyed"]


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
        key: name of the resource within its group; begins with the name of the wing that owns it.
        make: builds the resource. It may be collective: all ranks then ask in the same order.
        close: gives its memory back in `close_group`. It may be collective.
    """
    group = real_group(group)
    kept = _resources.get(group)
    if kept is None:
        _drop_destroyed_groups()
        kept = _resources[group] = {}
    found = kept.get(key)
    if found is None:
        found = kept[key] = _Resource(make(), close)
    value: T = found.value
    return value


def held_everywhere(key: Hashable) -> list[Any]:
    """Return what groups that are not destroyed keep under `key`. Makes nothing."""
    found = [(group, kept[key]) for group, kept in [*_resources.items()] if key in kept]
    return [resource.value for group, resource in found if not is_destroyed(group)]


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
    for group in [group for group in _resources if is_destroyed(group)]:
        del _resources[group]
