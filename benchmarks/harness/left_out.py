"""What fails on any rank is left out on all, and named."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["everywhere"]


def everywhere[Result](name: str, attempt: Callable[[], Result]) -> Result | None:
    """What ``attempt`` gives where it succeeds on every rank, else None on all; rank 0 says who
    failed, and why. Collective."""
    result, reason = None, None
    try:
        result = attempt()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    failed = [f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None]
    if failed and dist.get_rank() == 0:
        print(f"{name} left out: " + "; ".join(failed), file=sys.stderr, flush=True)
    return None if failed else result
