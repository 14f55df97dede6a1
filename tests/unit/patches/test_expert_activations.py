"""Activations of Megatron's experts, value and gradient, against its own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core import activations
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.moe.activations import ACTIVATIONS
from megatron_fluid.patches.moe.expert_modules import activation_name, resolve


def _config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4,
        moe_ffn_hidden_size=24, add_bias_linear=False, bias_activation_fusion=False, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "gated", "name"),
    [
        (F.silu, True, "swiglu"),
        (F.gelu, True, "geglu"),
        (activations.quick_gelu, True, "quick_geglu"),
        (F.silu, False, "silu"),
        (F.gelu, False, "gelu"),
        (F.relu, False, "relu"),
        (activations.squared_relu, False, "relu2"),
        (activations.quick_gelu, False, "quick_gelu"),
    ],
)
def test_activations_are_megatrons(function: Callable[..., Any], gated: bool, name: str) -> None:
    config = _config(activation_func=function, gated_linear_unit=gated)
    assert activation_name(config) == name and name in ACTIVATIONS
    ours = resolve(config)
    assert ours.gated is gated
    h = torch.randn(
        5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    gate, up = h.chunk(2, dim=-1)
    expected = function(gate) * up if gated else function(h)
    value = ours.forward(h)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    dv = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    wanted, found = (torch.autograd.grad(v, h, dv) for v in (expected, value))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
