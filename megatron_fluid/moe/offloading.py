"""What puts activations of a call away between forward and backward: its parts "rows" (the input of
fc1) and "hidden" (its output). Without one, autograd keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Offload", "Offloaded"]


class Offloaded(Protocol):
    """Handle to offloaded tensors; holds no device memory."""

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
