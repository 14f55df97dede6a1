"""Agreements of ranks that are threads of one process, on one store."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.agreement import Agreement


def agreements(
    ranks: int, store: dist.Store | None = None, group: str = "group", timeout_s: float = 60.0
) -> list[Agreement]:
    """A new session of a group: the agreement of each rank."""
    store = dist.HashStore() if store is None else store
    return [Agreement(store, group, rank, range(ranks), lambda: timeout_s) for rank in range(ranks)]


def joined(ranks: int, group: str = "group") -> list[Agreement]:
    """The same, of ranks that have met once."""
    channels = agreements(ranks, group=group)
    on_all(channels, lambda w: w.barrier("begin"))
    return channels


def on_all(channels: Sequence[Agreement], call: Callable[[Agreement], Any]) -> list[Any]:
    """What `call` returns or raises on each rank, called at once."""

    def run(of: Agreement) -> Any:
        try:
            return call(of)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(run, channels))


class FrozenStore:
    """A store whose host is stopped."""

    def __init__(self) -> None:
        self.calls = 0

    def check(self, *_: object) -> bool:
        self.calls += 1
        threading.Event().wait(30.0)
        return False

    set = get = check
