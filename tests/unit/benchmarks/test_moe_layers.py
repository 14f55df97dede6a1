"""Layers of Megatron's that a benchmark builds in several variants."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.cases.moe_layers import share_parameters


def test_variants_hold_the_same_parameters_and_one_gradient() -> None:
    first, second = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)) for _ in range(2))
    share_parameters(second, first)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(one is other for one, other in pairs)
    x = torch.randn(4, 3)
    assert torch.equal(first(x), second(x))
    second(x).sum().backward()
    assert all(parameter.grad is not None for parameter in first.parameters())
