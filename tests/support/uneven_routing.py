"""A rank of the end-to-end benchmark whose routers send every token to the first experts, which one
expert-parallel rank holds, from iteration FROM on.

Run as a module under torchrun with Megatron's flags, among them --moe-router-enable-expert-bias.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

FROM = 6
"""The first uneven iteration, counted from 1; Megatron captures an iteration in the fourth."""


def main() -> None:
    """Train, and turn uneven."""
    rank = importlib.import_module("benchmarks.cases.pretrain_rank")
    training = importlib.import_module("megatron.training.training")
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    step, steps = training.train_step, iter(range(1, 1_000_000))

    @functools.wraps(step)
    def turning(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if next(steps) == FROM:
            routers = [one for chunk in model for one in chunk.modules() if isinstance(one, router)]
            assert routers
            for one in routers:
                one.expert_bias[: one.topk] = 10.0
        return step(forward_step, data, model, *args, **kwargs)

    training.train_step = turning
    rank.main()


if __name__ == "__main__":
    main()
