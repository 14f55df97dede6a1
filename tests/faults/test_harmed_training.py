"""A real training whose numbers are not finite: all ranks end in bounded time and say why.

Ranks with different settings are in tests/unit/comm/test_same_settings.py, harmed caches in
tests/unit/examples/test_text_dataset.py and tests/unit/cuda/test_kernel_build.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.faulty_training import FIRST_SAVE, SHARDED, Training, train

pytest.importorskip("megatron.training")
pytestmark = [
    *(pytest.mark.world, pytest.mark.slow),
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode"),
]

RANKS = 2
_SAID = re.compile(r"(?:Error|Exception): .*|no answer from .*")


def last_words(training: Training) -> list[str]:
    """What each rank said of its end; every rank must have ended, by an error."""
    words = []
    for outcome, log in zip(training.outcomes, training.logs, strict=True):
        assert outcome.finished, f"{outcome.stacks}\n{log[-3000:]}"
        assert not outcome.ok
        words.append("\n".join(_SAID.findall(f"{log}\n{outcome.error}")))
    return words


def poison(what: str, value: float, rank: int) -> Sequence[str]:
    """Put a number that is none into the second layer of rank 1, in its third iteration."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import get_args

    from megatron_fluid.patches.moe import layer as patched

    real = patched.moe_forward

    def forward(
        layer: MoELayer, original: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if rank == 1 and layer.layer_number == 2 and get_args().curr_iteration == 2:
            with torch.no_grad():
                if what == "tokens":
                    tokens = tokens.clone()
                    tokens[0, 0] = value
                else:
                    next(layer.experts.parameters()).fill_(value)
        return real(layer, original, tokens, *args, **kwargs)

    patched.moe_forward = forward
    return ()


@pytest.mark.parametrize(("what", "value"), [("tokens", float("nan")), ("weights", float("inf"))])
def test_numbers_that_are_not_finite_end_the_training_by_name(
    what: str, value: float, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    poisoned = train(
        tmp_path,
        "log",
        "--save",
        str(saved),
        SHARDED,
        ranks=RANKS,
        prepare=functools.partial(poison, what, value),
    )
    for words, log in zip(last_words(poisoned), poisoned.logs, strict=True):
        assert "found NaN in local grad norm" in log
        assert "exit status 16" in words  # Megatron's own: it ran the iteration twice, alike
    assert len(poisoned.losses) == FIRST_SAVE, "no step after it"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(FIRST_SAVE)
