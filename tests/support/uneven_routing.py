"""A rank of the end-to-end benchmark whose routers turn uneven: from the iterations of TURNS on
they send every token to the first experts, then to the last ones. One expert-parallel rank holds
them.

Run as a module under torchrun with Megatron's flags, among them --moe-router-enable-expert-bias.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

TURNS = (6, 9)
"""The first uneven iterations, counted from 1; Megatron captures an iteration in the fourth."""


def main() -> None:
    """Train, and turn uneven."""
    rank = importlib.import_module("benchmarks.cases.pretrain_rank")
    training = importlib.import_module("megatron.training.training")
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    step, steps = training.train_step, iter(range(1, 1_000_000))

    @functools.wraps(step)
    def turning(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if (now := next(steps)) in TURNS:
            routers = [one for chunk in model for one in chunk.modules() if isinstance(one, router)]
            assert routers
            for one in routers:
                first = slice(None, one.topk) if now == TURNS[0] else slice(-one.topk, None)
                one.expert_bias[first] = 10.0 * (1 + TURNS.index(now))
        return step(forward_step, data, model, *args, **kwargs)

    training.train_step = turning
    rank.main()


if __name__ == "__main__":
    main()
