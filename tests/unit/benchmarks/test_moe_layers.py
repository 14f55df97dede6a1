"""Layers of Megatron's that a benchmark builds in several variants."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cases import moe_layers
from benchmarks.cases.moe import MoECase
from benchmarks.cases.moe_layers import fluid_layer, own_gemms_call, routed_tokens, share_parameters
from megatron_fluid.moe.local import transport


def test_variants_hold_the_same_parameters_and_one_gradient() -> None:
    first, second = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)) for _ in range(2))
    share_parameters(second, first)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(one is other for one, other in pairs)
    x = torch.randn(4, 3)
    assert torch.equal(first(x), second(x))
    second(x).sum().backward()
    assert all(parameter.grad is not None for parameter in first.parameters())


@pytest.mark.interpreter
@pytest.mark.parametrize("train", [False, True])
def test_own_gemms_multiply_the_rows_of_the_layer_as_it_routes_them(
    monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    monkeypatch.setattr(transport, "_kernels_serve", lambda *given: True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        layer = fluid_layer(MoECase(64, 32, 4, 2), torch.device("cpu"))
        x = routed_tokens(torch.randn(16, 4), 64)
        run = own_gemms_call(layer, x, train)
        with mock.patch.object(
            moe_layers, "grouped_product", wraps=moe_layers.grouped_product
        ) as m:
            run()
    finally:
        dist.destroy_process_group()
    rows = [int(n) for n in torch.bincount(layer.router(x).ids.flatten(), minlength=4).cumsum(0)]
    assert m.call_count == (3 if train else 1)
    for call in m.call_args_list:
        assert call.args[2].offsets.tolist() == rows
