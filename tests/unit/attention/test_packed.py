"""Packed queries, keys and values: views, rotations and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fluid.attention.layouts import HeadLayout
from megatron_fluid.attention.packed import Rotary, pack_gradients, rotate_, split


def test_splitting_a_part_copies_nothing() -> None:
    part = HeadLayout(8, 4, 6, 2).part(1)
    buffer = torch.randn(5, 3, part.width)
    for view in split(buffer, part):
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("rotary", [Rotary(8), Rotary(4, interleaved=True)])
def test_packed_gradients_are_those_of_autograd(kv: int, rotary: Rotary) -> None:
    part = HeadLayout(8, kv, 8, 1).part(0)
    table = rotary.table(7, torch.device("cpu"), torch.float64)
    jacobian_input = torch.randn(7, 2, part.width, dtype=torch.float64)
    weight = torch.randn_like(jacobian_input)

    def loss(buffer: Tensor) -> Tensor:
        rotated = buffer.clone()
        with torch.no_grad():
            rotate_(rotated, part, table)
        return torch.stack(
            [(a * b).sum() for a, b in zip(split(rotated, part), split(weight, part), strict=True)]
        ).sum()

    # The map is linear: its gradient is the transpose applied to the weights, tested on random
    # directions.
    packed = torch.empty_like(weight)
    pack_gradients(split(weight, part), part, table, packed)
    for _ in range(3):
        direction = torch.randn_like(jacobian_input)
        torch.testing.assert_close((packed * direction).sum(), loss(direction))
