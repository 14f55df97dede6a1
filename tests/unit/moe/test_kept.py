"""Activations that a call of experts keeps for its backward, offloaded in between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fluid.errors import ConfigError
from tests.support.expert_calls import expert_rows, local_moe
from tests.support.fp8_emulation import emulate

T, K, E, H, F = 11, 2, 3, 6, 5
PARTS = (("rows",), ("hidden",), ("rows", "hidden"))


class _Away:
    """Copies of the tensors, and what becomes of them."""

    def __init__(self, part: str, tensors: Sequence[Tensor], log: list[tuple[Any, ...]]) -> None:
        self.part, self.copies, self.log = part, [t.detach().clone() for t in tensors], log

    def take(self) -> list[Tensor]:
        self.log.append(("taken", self.part))
        copies, self.copies = self.copies, []
        return copies

    def finish(self) -> None:
        self.log.append(("finished", self.part))


class _Offload:
    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = parts
        self.log: list[tuple[Any, ...]] = []
        self.seen: list[StorageWeakRef] = []

    def put(self, part: str, tensors: Sequence[Tensor]) -> _Away:
        self.log.append(("put", part, *(tuple(t.shape) for t in tensors)))
        self.seen += (StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        return _Away(part, tensors, self.log)


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in shapes)
    return [tensor.requires_grad_() for tensor in found]


def _local(**settings: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = _leaves((T, H), (T, K), (E, 2 * F, H), (E, H, F), (E, 2 * F), (E, H))
    x, probs, w1, w2, *biases = leaves
    ids = torch.arange(T * K).view(T, K) % E
    given = x, ids, probs, w1, w2, "swiglu"
    return local_moe(*given, biases=tuple(biases), **settings), leaves  # type: ignore[arg-type]


def _rows(**settings: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = _leaves((T * K, H), (T * K,), (E, 2 * F, H), (E, H, F), (E, 2 * F), (E, H))
    x, probs, w1, w2, *biases = leaves
    counts = [4, 0, T * K - 4]
    # Not the caller's leaf, which stays.
    given = x * 1.0, probs, counts, w1, w2, "swiglu"
    return expert_rows(*given, biases=tuple(biases), **settings), leaves  # type: ignore[arg-type]


CALLS = pytest.mark.parametrize("call", [_local, _rows])
Made = Callable[..., tuple[Tensor, list[Tensor]]]


def _results(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(0))]


def _saved(y: Tensor) -> set[tuple[int, ...]]:
    assert y.grad_fn is not None
    found = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
    return {tuple(t.shape) for t in found if t is not None}


@CALLS
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
@pytest.mark.parametrize("recompute", [(), ("hidden",)], ids=str)
def test_parts_go_away_alone_and_come_back_for_the_same_bits(
    call: Made, parts: tuple[str, ...], recompute: tuple[str, ...]
) -> None:
    offload = _Offload(parts)
    y, leaves = call(offload=offload, recompute=recompute)
    shapes = {"rows": (T * K, H), "hidden": (T * K, 2 * F)}
    assert offload.log == [("put", part, shapes[part]) for part in parts]
    kept = set(shapes) - set(parts) - set(recompute)
    assert _saved(y) == {shapes[part] for part in kept}
    found = _results(y, leaves)
    torch.testing.assert_close(found, _results(*call()), rtol=0, atol=0)
    done = offload.log[len(parts) :]
    # Of both parts the later comes back first.
    back = tuple(reversed(parts))
    if recompute and "hidden" not in parts:
        assert back == ("rows",)
    assert done == [("taken", part) for part in back] + [("finished", part) for part in back]


@CALLS
def test_nothing_else_holds_the_memory_of_what_is_away(call: Made) -> None:
    offload = _Offload(("rows", "hidden"))
    y, _ = call(offload=offload)
    gc.collect()
    assert len(offload.seen) == 2 and y.grad_fn is not None
    assert all(memory.expired() for memory in offload.seen)


def test_fp8_experts_say_that_they_put_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch.setattr)
    x, w1, w2 = (
        torch.zeros(*shape).bfloat16() for shape in ((4, 128), (2, 256, 128), (2, 128, 128))
    )
    with pytest.raises(ConfigError, match="fp8_recipe.*do not support activation offloading"):
        expert_rows(
            x, torch.ones(4), [1, 3], w1, w2, "swiglu", fp8=True, offload=_Offload(("rows",))
        )
