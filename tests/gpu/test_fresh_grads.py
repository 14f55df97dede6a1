"""Gradients that hold no sums when a CUDA graph is captured by hand: the graph adds."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.backward.fresh_grads import GradGroup
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import RowGroups, add_to_main_grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EXPERTS, WIDE, DEEP = 3, 128, 256


@pytest.mark.parametrize("stacked", [False, True])
def test_a_captured_call_adds_to_zeros_that_no_replay_writes(stacked: bool) -> None:
    counts = [70, 0, 30]
    torch.manual_seed(1)
    dy = torch.randn(sum(counts), WIDE, device="cuda").bfloat16()
    x = torch.randn(sum(counts), DEEP, device="cuda").bfloat16()
    shape = (EXPERTS, WIDE, DEEP) if stacked else (WIDE, DEEP)
    number = 1 if stacked else EXPERTS
    params = [
        torch.nn.Parameter(torch.zeros(shape, device="cuda", dtype=torch.bfloat16))
        for _ in range(number)
    ]
    for param in params:
        param.main_grad = torch.full(shape, torch.nan, device="cuda")  # type: ignore[attr-defined]
    given = params[0] if stacked else params
    fc, groups = ExpertWeights(given, EXPERTS), RowGroups.of_counts(counts)
    groups.offsets = groups.offsets.cuda()

    group = GradGroup(params)
    group.mark()
    add_to_main_grads(fc, dy, x, groups)  # written: also compiles what the graph captures
    once = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    for param in params:
        param.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]
    group.mark()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_to_main_grads(fc, dy, x, groups)
    assert not group.fresh
    assert not any(param.main_grad.any() for param in params)  # type: ignore[attr-defined]
    for times in (1, 2):
        graph.replay()
        for param, wanted in zip(params, once, strict=True):
            found = param.main_grad  # type: ignore[attr-defined]
            torch.testing.assert_close(found, times * wanted)
