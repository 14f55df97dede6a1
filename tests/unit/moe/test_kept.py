"""Activations that a call of experts keeps for its backward, offloaded in between: that nothing
else holds them. What Megatron's manager does with them: tests/unit/patches/test_moe_offload.py."""

import gc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fluid.errors import ConfigError
from tests.support.expert_calls import expert_rows, local_moe
from tests.support.fp8_emulation import emulate
from tests.support.moe_reference import ExpertProblem

T, K, E, H, F = 11, 2, 3, 6, 5


class _Offload:
    parts = ("rows", "hidden")

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.seen: list[StorageWeakRef] = []

    def put(self, part: str, tensors: Sequence[Tensor]) -> Any:
        self.log.append(("put", part))
        self.seen += (StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        copies = [tensor.detach().clone() for tensor in tensors]

        def take() -> list[Tensor]:
            self.log.append(("taken", part))
            return copies

        return SimpleNamespace(take=take, finish=lambda: self.log.append(("finished", part)))


def _local(problem: ExpertProblem, offload: _Offload | None) -> Tensor:
    return local_moe(*problem.arguments, biases=problem.biases, offload=offload)


def _rows(problem: ExpertProblem, offload: _Offload | None) -> Tensor:
    x, _, probs, w1, w2 = problem.arguments
    # Not the caller's leaf, which stays.
    given = x * 1.0, probs[:, 0], [4, 0, T - 4], w1, w2, "swiglu"
    return expert_rows(*given, biases=problem.biases, offload=offload)


@pytest.mark.parametrize("call", [_local, _rows])
def test_nothing_else_holds_what_is_away_and_it_comes_back_for_the_same_bits(
    call: Callable[[ExpertProblem, _Offload | None], Tensor],
) -> None:
    ids = torch.arange(T * K).view(T, K) % E
    problem, offload = ExpertProblem.draw(ids, E, H, F, biased=True), _Offload()
    y = call(problem, offload)
    assert offload.log == [("put", "rows"), ("put", "hidden")]
    gc.collect()
    assert len(offload.seen) == 2 and all(memory.expired() for memory in offload.seen)
    expected = problem.gradients(call(problem, None))
    torch.testing.assert_close(problem.gradients(y), expected, rtol=0, atol=0)
    back = ("hidden", "rows")  # of both parts the later comes back first
    wanted = [("taken", part) for part in back] + [("finished", part) for part in back]
    assert offload.log[2:] == wanted


def test_fp8_experts_say_that_they_put_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch.setattr)
    x, w1, w2 = (
        torch.zeros(*shape).bfloat16() for shape in ((4, 128), (2, 256, 128), (2, 128, 128))
    )
    with pytest.raises(ConfigError, match="fp8_recipe.*do not support activation offloading"):
        expert_rows(x, torch.ones(4), [1, 3], w1, w2, "swiglu", fp8=True, offload=_Offload())
