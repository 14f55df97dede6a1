"""Megatron's training with its peers watched."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_fluid.comm.peer_watch import watched_peers

__all__ = ["pretrain"]


def pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `megatron.training.pretrain`: a collective that waits for a rank which is gone names
    it."""

    @functools.wraps(original)
    def fluid_pretrain(*args: Any, **kwargs: Any) -> Any:
        with watched_peers():
            return original(*args, **kwargs)

    return fluid_pretrain
