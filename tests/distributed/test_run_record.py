"""examples/run_record.py: means over every rank's tokens, whichever ranks compute a loss."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")


def _two_iterations_and_two_evaluations(rank: int, world_size: int) -> Any:
    sys.path.insert(0, EXAMPLES)
    from run_record import RunRecord

    untrained = RunRecord()
    untrained.end_evaluation(12)
    assert [evaluation.iteration for evaluation in untrained.result().evaluations] == [12]
    record = RunRecord()
    for iteration in (3, 4):  # as after a resume
        for microbatch in range(2):
            record.begin(iteration)
            if rank > 0:  # rank 0 is a pipeline stage without a loss
                tokens = torch.tensor(10 * rank + microbatch)
                record.train(iteration, tokens * (iteration + 0.5 * rank), tokens)
    for evaluation in (1, 2):
        if rank > 0:
            record.evaluate(torch.tensor(6.0 * evaluation * rank), torch.tensor(2))
        record.end_evaluation(3)
    record.end_evaluation(3)  # one in which nobody computed a loss
    result = record.result()
    return result.train_losses, [(e.iteration, e.loss) for e in result.evaluations], result.step_s


def test_means_are_over_all_tokens_of_all_ranks() -> None:
    answers = run_ranks(_two_iterations_and_two_evaluations, 3)
    for losses, evaluations, step_s in answers:
        tokens = {1: 10 + 11, 2: 20 + 21}
        for iteration in (3, 4):
            expected = sum(
                count * (iteration + 0.5 * rank) for rank, count in tokens.items()
            ) / sum(tokens.values())
            assert losses[iteration] == pytest.approx(expected, rel=1e-12)
        assert sorted(losses) == [3, 4]
        assert evaluations[:2] == [(5, (6.0 + 12.0) / 4), (5, (12.0 + 24.0) / 4)]
        assert evaluations[2][0] == 5
        assert math.isnan(evaluations[2][1])
        assert step_s is None  # two iterations: one warms up, and one start is no duration
