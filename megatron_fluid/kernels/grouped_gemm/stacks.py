"""Matrices of several experts that lie in one tensor, in the order of the experts or in reverse.

Shapes: El experts, widths in, out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["ReversedStack"]


class ReversedStack(Sequence[Tensor]):
    """The matrices of a stack [El, in, out] in reverse order, as Megatron's parameter buffers hold
    them: our kernels read it in one launch, and others take it for a sequence."""

    def __init__(self, stack: Tensor) -> None:
        self.stack = stack

    def __len__(self) -> int:
        return int(self.stack.shape[0])

    def __getitem__(self, index: Any) -> Any:
        return self.stack[range(len(self))[::-1][index]]
