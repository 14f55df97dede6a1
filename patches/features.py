"""What became of each feature (an overlapped layer, a linear), object by object: for the start-up
report and the log."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_fluid.errors import ranks_text

__all__ = ["FeatureReport", "features"]

# (feature, on or off, text): of how many objects it is true.
_features: dict[tuple[str, bool, str], int] = {}


def features() -> list[tuple[str, bool, str, int]]:
    """What was recorded: feature, on or off, why or how, and for how many objects."""
    return [(*key, count) for key, count in _features.items()]


class FeatureReport:
    """What became of one feature.

    Args:
        feature: its name.
        by_class: whether a text starts with the name of the object's class.
    """

    def __init__(self, feature: str, by_class: bool = False) -> None:
        self.feature, self.by_class = feature, by_class
        self.said: set[str] = set()
        # Keyed by layer and not stored in it: a layer is copied, pickled and walked by others.
        self._last: weakref.WeakKeyDictionary[Any, tuple[bool, str]] = weakref.WeakKeyDictionary()

    def note(
        self, layer: Any, on: bool, text: str, ranks: Sequence[int] | None = None, when: str = ""
    ) -> None:
        """Record that the feature is on or off for a layer, and how or why, in place of what was
        recorded of the layer before. ranks: print it too, as `say` does."""
        if self._last.get(layer) == (on, text):
            return
        self.withdraw(layer)
        self._last[layer] = on, text
        text = self._text(layer, text)
        if ranks is not None:
            self.say(on, text, when, ranks)
        self._count(on, text, 1)

    def withdraw(self, layer: Any) -> None:
        """Take back what was recorded of a layer."""
        if (before := self._last.pop(layer, None)) is not None:
            self._count(before[0], self._text(layer, before[1]), -1)

    def note_late(self, when: str, reason: str, ranks: Sequence[int] = (0,)) -> None:
        """Record and print, once, a reason that is known only after the start-up report."""
        if reason not in self.said:
            self._count(False, f"{when}: {reason}", 1)
            self.say(False, reason, f" {when}", ranks)

    def say(self, on: bool, text: str, when: str = "", ranks: Sequence[int] = (0,)) -> None:
        """Print each text once, on the first of the ranks that it is true of."""
        if text not in self.said:
            self.said.add(text)
            if not dist.is_initialized() or dist.get_rank() == ranks[0]:
                state = "on" if on else "off"
                of = f" ({ranks_text(ranks)})" if ranks[0] else ""
                print(f"megatron_fluid: {self.feature} {state}{when}{of}: {text}", flush=True)

    def _text(self, layer: Any, text: str) -> str:
        return f"{type(layer).__name__}: {text}" if self.by_class else text

    def _count(self, on: bool, text: str, change: int) -> None:
        key = (self.feature, on, text)
        _features[key] = _features.get(key, 0) + change
        if _features[key] <= 0:
            del _features[key]
