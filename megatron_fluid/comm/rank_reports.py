"""Texts about ranks: runs of them, and which of them have other settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ranks_text", "settings_difference"]


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
