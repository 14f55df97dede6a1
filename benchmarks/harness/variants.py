"""Variants of a benchmark that run on every rank; one that fails on any is left out on all, and
named."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.attention import step_call

__all__ = ["everywhere", "runnable"]


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


def _run(module: nn.Module, x: Tensor) -> bool:
    step_call(module, x)()
    return True


def runnable(
    builders: Mapping[str, Callable[[], nn.Module]], wanted: set[str], x: Tensor
) -> dict[str, nn.Module]:
    """The wanted variants (all where none is named) that could be built and have run forward and
    backward of ``x`` everywhere.

    Ranks agree after building and again after running. A rank that fails between the two halves of
    a collective still leaves the others waiting for it until they time out.
    """
    found: dict[str, nn.Module] = {}
    for name, build in builders.items():
        if wanted and name not in wanted:
            continue
        module = everywhere(name, build)
        if module is not None and everywhere(name, functools.partial(_run, module, x)):
            found[name] = module
    return found
