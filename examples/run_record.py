"""What a training run did, measured by the training script itself.

Losses are collected where the script computes them, so that nothing is parsed from logs: a sum and
a token count per iteration stay on the device, and one reduction at the end makes them global.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["Evaluation", "RunRecord", "RunResult"]


@dataclass(frozen=True)
class Evaluation:
    """One pass over held-out batches: after how many iterations it ran (0: before any), the mean
    loss a token in nats."""

    iteration: int
    loss: float


@dataclass(frozen=True)
class RunResult:
    """A run in numbers: losses in nats a token, by iteration from 0, ``step_s`` the median seconds
    of an iteration."""

    train_losses: dict[int, float]
    evaluations: list[Evaluation]
    step_s: float | None


@dataclass
class RunRecord:
    """Collects the losses of one process; :meth:`result` reduces them over all processes."""

    _train: dict[int, torch.Tensor] = field(default_factory=dict)
    _began: dict[int, float] = field(default_factory=dict)
    _evaluations: list[tuple[int, torch.Tensor | None]] = field(default_factory=list)
    _pending: torch.Tensor | None = None
    _at_first: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether anything was computed."""
        return bool(self._began or self._evaluations)

    def at_first(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the second training iteration starts: the first has settled what is
        overlapped."""
        self._at_first = call

    def begin(self, iteration: int) -> None:
        """A microbatch of training iteration ``iteration`` (from 0) starts; the first one counts
        for the clock."""
        self._began.setdefault(iteration, time.monotonic())
        if self._at_first is not None and len(self._began) > 1:
            self._at_first()
            self._at_first = None

    def train(self, iteration: int, loss_sum: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add one microbatch: the loss summed over its tokens, and their number. Nothing is read
        from the device."""
        self._train[iteration] = _add(self._train.get(iteration), loss_sum, tokens)

    def evaluate(self, loss_sum: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add one microbatch of the evaluation that is running."""
        self._pending = _add(self._pending, loss_sum, tokens)

    def end_evaluation(self, loaded: int) -> None:
        """Close the evaluation that is running; called by every rank, also by one that computes no
        loss.

        Args:
            loaded: iterations that were done before this run, for an evaluation without any
                training.
        """
        self._evaluations.append((max(self._began, default=loaded - 1) + 1, self._pending))
        self._pending = None

    def result(self) -> RunResult:
        """Reduce over all ranks (a collective).

        Ranks that compute no loss add zeros; ranks that compute the same tokens (tensor parallel)
        count in the sum and in the number of tokens alike.
        """
        iterations = sorted(self._began)
        sums = [self._train.get(iteration) for iteration in iterations] + [
            total for _, total in self._evaluations
        ]
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        table = torch.zeros(len(sums) + 1, 2, dtype=torch.float64, device=device)  # never empty
        for row, total in zip(table, sums, strict=False):
            if total is not None:
                row.copy_(total)
        torch.distributed.all_reduce(table)
        means = [total / tokens if tokens else math.nan for total, tokens in table.tolist()]
        starts = [
            self._began[iteration] for iteration in iterations[1:]
        ]  # the first iteration warms up
        steps = [after - before for before, after in itertools.pairwise(starts)]
        held_out = zip(self._evaluations, means[len(iterations) :], strict=False)
        return RunResult(
            train_losses=dict(zip(iterations, means, strict=False)),
            evaluations=[Evaluation(iteration, mean) for (iteration, _), mean in held_out],
            step_s=statistics.median(steps) if steps else None,
        )


def _add(total: torch.Tensor | None, loss_sum: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    more = torch.stack((loss_sum.detach().double(), tokens.detach().double()))
    return more if total is None else total + more
