"""examples/run_record.py: means over every rank's tokens, whichever ranks compute a loss."""

import math
import sys
from pathlib import Path

import pytest
import torch

from tests.support.launch import on_ranks

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")


@on_ranks(3)
def test_means_are_over_all_tokens_of_all_ranks(rank: int, world_size: int) -> None:
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
    tokens = {1: 10 + 11, 2: 20 + 21}
    assert sorted(result.train_losses) == [3, 4]
    for iteration, loss in result.train_losses.items():
        total = sum(count * (iteration + 0.5 * other) for other, count in tokens.items())
        assert loss == pytest.approx(total / sum(tokens.values()), rel=1e-12)
    *found, last = [(each.iteration, each.loss) for each in result.evaluations]
    assert found == [(5, (6.0 + 12.0) / 4), (5, (12.0 + 24.0) / 4)]
    assert last[0] == 5 and math.isnan(last[1])
    assert result.step_s is None  # two iterations: one warms up, and one start is no duration
