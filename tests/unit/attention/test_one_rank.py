"""Attention of one rank, where nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.overlap import overlapped_attention
from megatron_fluid.attention.packed import Rotary


def _layer(**settings: Any) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(16, 4, num_kv_heads=2, sequence_layout="zigzag", **settings)


def _input(length: int = 7) -> Tensor:
    return torch.randn(length, 2, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _results(layer: SelfAttention, x: Tensor, y: Tensor) -> list[Tensor]:
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("rotary", [None, Rotary(4)])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_chain_of_nodes_has_the_bits_of_the_one_node(
    rotary: Rotary | None, qk_norm: bool, bias: bool
) -> None:
    layer = _layer(rotary=rotary, qk_norm=qk_norm, qkv_bias=bias, output_bias=bias)
    x = _input()
    found = _results(layer, x, layer(x))
    assert len(found) == 4 + 2 * qk_norm + 2 * bias
    call = layer.call(x)
    layer.zero_grad()
    x = _input()
    expected = _results(layer, x, overlapped_attention(x, layer.weights(), call))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rotary", [None, Rotary(4)])
def test_rows_that_are_not_contiguous_are_attended_like_others(rotary: Rotary | None) -> None:
    layer = _layer(rotary=rotary)
    expected = _results(layer, x := _input(), layer(x))
    layer.zero_grad()
    leaf = _input().detach().transpose(0, 1).contiguous().requires_grad_()
    y = layer(leaf.transpose(0, 1))
    y.square().sum().backward()
    assert leaf.grad is not None
    assert torch.equal(y, expected[0]) and torch.equal(leaf.grad.transpose(0, 1), expected[1])
    for parameter, gradient in zip(layer.parameters(), expected[2:], strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_a_call_is_made_anew_only_where_something_changed() -> None:
    layer, x = _layer(dropout=0.5), _input()
    call = layer.call(x)
    assert layer.call(_input()) is call
    assert layer.call(_input(5)).exchange.sequence.length == 5
    assert layer.call(x.bfloat16()).case.dtype == torch.bfloat16
    assert layer.eval().call(x).case.dropout == 0.0
    assert layer.train().call(x).case.dropout == 0.5
    layer.dx_chunks = 3
    assert layer.call(x).dx_chunks == 3
    layer.head_groups = 2
    assert layer.call(x).exchange.heads.groups == 2
