"""Top-k and softmax in one kernel against the plain router."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fluid.backward.autograd import apply, once_differentiable
from megatron_fluid.backward.deferred_linear import deferred_linear
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.fused_router import topk_softmax
from megatron_fluid.moe.router import route

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(37, 24, 3), (16, 8, 1), (5, 4, 4), (0, 8, 2)]
)
def test_forward_and_backward_equal_the_plain_router(tokens: int, experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator).to(DEVICE).requires_grad_()
    plain = logits.detach().clone().requires_grad_()
    expected = route(plain, top_k)
    ids, probs = topk_softmax(logits, top_k)
    assert torch.equal(ids.long(), expected.ids)
    assert torch.allclose(probs, expected.probs, atol=1e-6)
    grad = torch.randn(tokens, top_k, generator=generator).to(DEVICE)
    probs.backward(grad)
    expected.probs.backward(grad)
    assert torch.allclose(logits.grad, plain.grad, atol=1e-6)


@pytest.mark.interpreter
def test_equal_logits_choose_the_lower_number() -> None:
    ids, _ = topk_softmax(torch.zeros(3, 6, device=DEVICE), 2)
    assert ids.tolist() == [[0, 1]] * 3


@pytest.mark.interpreter
def test_numbers_that_are_none_choose_experts_that_exist_once_each() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [
        [1.0, -inf, -inf, -inf, -inf],
        [-inf] * 5,
        [nan] * 5,
        [0.0, nan, 2.0, nan, 1.0],
        [0.0, inf, 2.0, -inf, 1.0],
        [0.0, 1.0, 2.0, 3.0, 4.0],
    ]
    ids, probs = topk_softmax(torch.tensor(rows, device=DEVICE), 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 3, 2], [1, 2, 4], [4, 3, 2]]
    expected = torch.tensor(rows).gather(1, ids.long().cpu()).softmax(1)
    assert torch.allclose(probs.cpu(), expected, equal_nan=True)


def test_logits_equal_a_linear_layer() -> None:
    x, weight = (torch.randn(n, 16, device=DEVICE).requires_grad_() for n in (10, 6))
    grad = torch.randn(10, 6, device=DEVICE)
    found = torch.autograd.grad(deferred_linear(x, weight, wide=True), (x, weight), grad)
    expected = torch.autograd.grad(x @ weight.t(), (x, weight), grad)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        topk_softmax(torch.zeros(3, 6), 7)
    with pytest.raises(ConfigError, match="float32"):
        topk_softmax(torch.zeros(3, 6, dtype=torch.bfloat16), 2)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_functions_are_differentiable_once() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    y = apply(_Square, x)
    assert type(y.grad_fn).__name__ == "_SquareBackward"
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert dx.item() == 6 and not dx.requires_grad
    with pytest.raises(ConfigError, match="_Square.backward: create_graph: found True"):
        torch.autograd.grad(y, x, torch.ones(1), create_graph=True)
