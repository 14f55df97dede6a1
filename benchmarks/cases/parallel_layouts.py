"""How several GPUs divide the training of the end-to-end benchmark, as flags of Megatron's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LAYOUTS", "Layout"]


@dataclass(frozen=True)
class Layout:
    """One way to divide a model over the ranks.

    Attributes:
        flags: beside those that all share, whose expert parallelism is over all ranks; of a flag
            given twice Megatron takes the last.
        ranks: the number of ranks must be a multiple of it.
        expert_parallel: None for all ranks.
    """

    flags: Sequence[str] = ()
    ranks: int = 1
    expert_parallel: int | None = None

    def unsupported_reason(self, ranks: int) -> str | None:
        """Why so many ranks cannot be divided so, or None."""
        return f"{ranks} ranks are no multiple of {self.ranks}" if ranks % self.ranks else None


_EXPERTS_OF_TP = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")

LAYOUTS: Mapping[str, Layout] = {
    "ep": Layout(),
    "cp2": Layout(("--context-parallel-size", "2", "--cp-comm-type", "a2a"), ranks=2),
    "tp2-ep2": Layout(
        ("--tensor-model-parallel-size", "2", "--sequence-parallel", *_EXPERTS_OF_TP),
        ranks=2,
        expert_parallel=2,
    ),
}
"""`ep`: experts over all ranks, and data parallelism. `cp2`: sequences over pairs beside it."""
