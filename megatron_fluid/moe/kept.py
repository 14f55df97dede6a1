"""What a call of experts keeps for its backward, and where: its parts "rows" (the input of fc1) and
"hidden" (its output) with autograd, as ever, or wherever an Offload puts them meanwhile.

Autograd's own way, hooks for saved tensors, would give all tensors of a function to one taker, and
at one time. Here each part goes its own way, and the backward says when it needs a part again and
when it is done with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["KeptPart", "Offload", "Offloaded", "keep"]


class Offloaded(Protocol):
    """Tensors that were put away. It holds no memory of theirs once they are elsewhere."""

    def take(self) -> list[Tensor]:
        """The tensors, ready on the current stream. Once.

        Raises:
            RuntimeError: they were taken before.
        """
        ...

    def finish(self) -> None:
        """What the tensors were needed for has been launched on the current stream: those that a
        later backward wants may come."""
        ...


class Offload(Protocol):
    """Puts parts of a call's activations away between forward and backward.

    Attributes:
        parts: which of "rows" and "hidden". They are kept, and not recomputed.
    """

    parts: Collection[str]

    def put(self, part: str, tensors: Sequence[Tensor]) -> Offloaded | None:
        """Take over the tensors of a part, at the end of a call's forward; None where autograd is
        to save them. Of a call without a backward the tensors are none."""
        ...


@dataclass(slots=True)
class KeptPart:
    """One part of one call.

    Attributes:
        kinds: of each value its type where it is two tensors, else None.
        count: tensors that autograd saves.
        away: the others, or None.
    """

    kinds: tuple[Any, ...]
    count: int
    away: Offloaded | None

    def values(self, saved: Iterator[Tensor]) -> list[Any]:
        """What `keep` was given. saved: of autograd, from this part's first tensor on."""
        found = itertools.islice(saved, self.count) if self.away is None else iter(self.away.take())
        return [kind(next(found), next(found)) if kind else next(found) for kind in self.kinds]

    def finish(self) -> None:
        """The values were used."""
        if self.away is not None:
            self.away.finish()


def keep(
    part: str, values: Sequence[Any], offload: Offload | None
) -> tuple[list[Tensor | None], KeptPart]:
    """Keep a part of a call: values that are a tensor, a named tuple of two, or None (which cannot
    be put away).

    Returns:
        What autograd has to save, and the part.
    """
    tensors: list[Tensor | None] = []
    for value in values:
        tensors += value if isinstance(value, tuple) else [value]
    kinds = tuple(type(value) if isinstance(value, tuple) else None for value in values)
    if offload is not None and part in offload.parts:
        given = [tensor for tensor in tensors if tensor is not None]
        if (away := offload.put(part, given)) is not None:
            return [], KeptPart(kinds, 0, away)
    return tensors, KeptPart(kinds, len(tensors), None)
