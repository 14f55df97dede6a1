"""Weight gradients of experts in main_grad: added, or written where Megatron asks for that."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from megatron_fluid.moe.experts import add_to_main_grads

WIDE, DEEP = 8, 16


@pytest.mark.parametrize("asked", [(), (0, 1, 2), (1,)], ids=["none", "all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_those_are_overwritten_for_which_it_is_asked(
    asked: tuple[int, ...], dtype: torch.dtype
) -> None:
    counts = [5, 0, 3]
    draw = torch.Generator().manual_seed(2)
    dy = torch.randn(sum(counts), WIDE, generator=draw).to(dtype)
    x = torch.randn(sum(counts), DEEP, generator=draw).to(dtype)
    params = [torch.nn.Parameter(torch.zeros(WIDE, DEEP, dtype=dtype)) for _ in counts]
    for number, param in enumerate(params):
        param.main_grad = torch.full((WIDE, DEEP), 2.0)  # type: ignore[attr-defined]
        param.overwrite_main_grad = number in asked  # type: ignore[attr-defined]
    add_to_main_grads(ExpertWeights(params, len(counts)), dy, x, RowGroups.of_counts(counts))
    rows = zip(dy.float().split(counts), x.float().split(counts), strict=True)
    for number, (param, (left, right)) in enumerate(zip(params, rows, strict=True)):
        wanted = left.T @ right + (0.0 if number in asked else 2.0)
        torch.testing.assert_close(param.main_grad, wanted, rtol=1e-2, atol=1e-2)  # type: ignore[attr-defined]
