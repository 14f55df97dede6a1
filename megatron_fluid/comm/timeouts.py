"""How long a rank waits for a peer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_fluid.config import current_config

__all__ = ["group_timeout_s", "wait_timeout_s"]


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a process group's collectives, in seconds: the longest of its backends,
    and torch's default where they do not say."""
    found = [
        backend.options._timeout.total_seconds()
        for device in ("cuda", "cpu")
        if (backend := _backend(group, device)) is not None
    ]
    return max(found, default=dist.constants.default_pg_timeout.total_seconds())


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
