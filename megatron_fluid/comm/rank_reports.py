"""Reports between ranks through a store: bounded in time, and never in a collective, in which
a missing rank would hold all others."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.watchdog import STORE_S, bounded

__all__ = ["gather_reports", "publish_report", "ranks_text", "settings_difference"]

_POLL_S = 0.02


def publish_report(store: dist.Store, key: str, rank: int, report: Any) -> None:
    """Put a report into a store, for whoever gathers reports of that key. Bounded."""

    def publish() -> None:
        store.set(f"{key}/{rank}", pickle.dumps(report))  # type: ignore[arg-type]

    bounded(publish, STORE_S)


def gather_reports(
    store: dist.Store, key: str, ranks: Iterable[int], timeout_s: float
) -> dict[int, Any]:
    """The reports of all ranks, by rank; after timeout_s of those that have published theirs.

    Args:
        store: any store that the ranks share.
        key: what they report about; a new one for each gathering.
        ranks: whose reports are wanted.
        timeout_s: bound on the wait, in seconds. If the host of the store does not answer, the
            result is empty a few seconds later.
    """
    found: dict[int, Any] = {}
    missing = list(ranks)
    deadline = time.monotonic() + timeout_s

    def gather() -> None:
        # Polled: a store's own wait holds its connection, which other threads need, too.
        pause = 0.001
        while missing:
            if store.check([f"{key}/{missing[0]}"]):
                found[missing[0]] = pickle.loads(store.get(f"{key}/{missing[0]}"))
                del missing[0]
            elif time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S)
            else:
                break
        for rank in missing[1:]:
            if store.check([f"{key}/{rank}"]):
                found[rank] = pickle.loads(store.get(f"{key}/{rank}"))

    bounded(gather, timeout_s + STORE_S)
    return dict(found)


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them as ranges: "rank 3", "ranks 0, 4-7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def settings_difference(settings: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Name every setting whose values are not alike: its values, and the ranks of each; "" where
    all are alike. `timeout_s` may differ."""
    texts = []
    for name in dict.fromkeys(name for mine in settings for name in mine):
        owners: dict[Any, list[int]] = {}
        for rank, mine in zip(ranks, settings, strict=True):
            owners.setdefault(mine.get(name), []).append(rank)
        if len(owners) > 1 and name != "timeout_s":
            values = (f"{value!r} on {ranks_text(owner)}" for value, owner in owners.items())
            texts.append(f"{name}: found {', '.join(values)}")
    return "; ".join(texts)
