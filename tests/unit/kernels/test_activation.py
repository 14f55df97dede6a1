"""Activations with a bias of fc1, by the kernels and by torch's operations: against autograd in
fp32, for every activation that the kernels have and for each variant of the gated ones."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_fluid.kernels.activation.kernel import ACTIVATIONS
from megatron_fluid.moe.activations import Activation, RowBiases, Variant, resolve_activation
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.experts import activation_backward, activation_forward
from tests.support.kernel_references import stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = [0, 5, 0, 9, 1, 0]  # of the experts
SPARE = 3  # rows behind the last expert's
F = 12
VARIANTS = [
    Variant(0.5), Variant(offset=1.0), Variant(0.5, 1.0), Variant(interleave=4),
    Variant(0.5, 0.25, 2),
]  # fmt: skip
GATED = [name for name, (_, gated) in ACTIVATIONS.items() if gated]
OWN = resolve_activation(torch.nn.functional.softplus)
CASES = [OWN, *(resolve_activation(name) for name in ACTIVATIONS)]
CASES += [resolve_activation(name, variant=variant) for name in GATED for variant in VARIANTS]


class _Rows(NamedTuple):
    h: Tensor
    bias: RowBiases
    probs: Tensor
    da: Tensor
    groups: RowGroups


def _make(activation: Activation, dtype: torch.dtype, way: str) -> _Rows:
    """Rows as a local layer's kernels have them, whose count the host does not know and of which
    the last are NaN; or as torch's operations have them."""
    g = torch.Generator().manual_seed(7)
    n, spare = sum(COUNTS), SPARE if way == "kernels" else 0
    width = 2 * F if activation.gated else F
    h = torch.randn(n + spare, width, generator=g)
    table = torch.randn(len(COUNTS), width, generator=g)
    probs, da = torch.rand(n + spare, generator=g), torch.randn(n + spare, F, generator=g)
    for tensor in (h, probs, da):
        tensor[n:] = float("nan")
    offsets = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32).to(DEVICE)
    groups = RowGroups(offsets, None, None, offsets[-1:] if way == "kernels" else None)
    bias = RowBiases(table.to(DEVICE, dtype), groups.experts_of(n + spare))
    return _Rows(h.to(DEVICE, dtype), bias, probs.to(DEVICE), da.to(DEVICE, dtype), groups)


def _sum(rows: _Rows) -> Tensor:
    """h + bias in fp32. [N, F1]"""
    n = sum(COUNTS)
    return rows.h[:n].float() + rows.bias.table[rows.bias.experts[:n].long()].float()


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.interpreter)])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("activation", CASES, ids=lambda a: f"{a.name} {tuple(a.variant)}")
def test_forward_and_backward_agree_with_autograd(
    way: str, activation: Activation, weighted: bool
) -> None:
    if way == "kernels" and activation is OWN:
        pytest.skip("the kernels have no function of a caller's")
    rows, n = _make(activation, torch.float32, way), sum(COUNTS)
    probs = rows.probs if weighted else None
    whole = _sum(rows).requires_grad_()
    p = (rows.probs[:n] if weighted else torch.ones(n, device=DEVICE)).requires_grad_()
    right = activation.forward(whole) * p[:, None]
    dwhole, dp = torch.autograd.grad(right, (whole, p), rows.da[:n])

    a = activation_forward(activation, rows.h, probs, rows.groups.count, rows.bias)
    torch.testing.assert_close(a[:n], right.detach(), rtol=1e-5, atol=1e-6)
    kept = rows.h.clone()
    dh, again, dprobs = activation_backward(
        activation, rows.h, rows.da, probs, rows.groups, bias=rows.bias
    )
    assert torch.equal(rows.h.nan_to_num(7.0), kept.nan_to_num(7.0))
    torch.testing.assert_close(again[:n], right.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dh[:n], dwhole, rtol=1e-4, atol=1e-5)
    assert (dprobs is not None) is weighted
    if dprobs is not None:
        torch.testing.assert_close(dprobs[:n], dp, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_the_sum_with_the_bias_is_not_rounded_to_the_rows_dtype(
    way: str, dtype: torch.dtype, gated: bool
) -> None:
    """Of activations that are exact in fp32, on inputs where a rounded sum gives other bits."""
    activation = resolve_activation("relu2")
    if gated:  # a clamp's side is that of the sum in fp32, too
        activation = resolve_activation("quick_geglu", variant=Variant(0.5, 1.0))
    rows, n = _make(activation, dtype, way), sum(COUNTS)
    rows.probs.fill_(1.0)
    whole = _sum(rows)
    rounded = whole.to(dtype).float()

    def right(value: Tensor) -> tuple[Tensor, Tensor]:
        value = value.detach().requires_grad_()
        a = activation.forward(value)
        found = a.detach(), torch.autograd.grad(a, value, rows.da[:n].float())[0]
        if way == "torch":
            return found[0].to(dtype), found[1].to(dtype)
        return stored(found[0], dtype), stored(found[1], dtype)

    expected = right(whole)
    assert not torch.equal(expected[0], right(rounded)[0])
    a = activation_forward(activation, rows.h, rows.probs, rows.groups.count, rows.bias)
    dh, _, _ = activation_backward(
        activation, rows.h, rows.da.clone(), rows.probs, rows.groups, bias=rows.bias
    )
    for found, value in zip((a[:n], dh[:n]), expected, strict=True):
        if gated:  # exponentials may differ in their last bit
            off = (found != value).float().mean()
            assert off < 0.01, off
        else:
            assert torch.equal(found, value)
