"""Megatron's MoE layer and ours in low precision against one in fp32 with the same weights: neither
may be further off than the other by more than a little."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BIASED", "draw_biases", "errors_of", "fp32_passes", "two_passes", "worse_of"]

# A router with a bias is multiplied in TF32 where its dtype is fp32; fp64 leaves every choice of an
# expert to the case, not to rounding.
BIASED = {"add_bias_linear": True, "moe_router_dtype": "fp64"}


def draw_biases(layer: nn.Module, seed: int) -> None:
    """Random biases of the experts. What all experts added alike would cancel in the router's
    gradient, and leave rounding."""
    for name, parameter in layer.named_parameters():
        if "bias" in name and not name.startswith("router"):
            draws = torch.Generator(parameter.device).manual_seed(seed)
            seed += 1
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn_like(parameter.float(), generator=draws))


def _name_in(parameters: Mapping[str, Any], name: str) -> str:
    """The name in a layer with TEGroupedMLP or SequentialMLP of a parameter of the latter."""
    if name in parameters:
        return name
    *_, index, linear, kind = name.split(".")  # experts.local_experts.3.linear_fc1.weight
    return f"experts.{linear}.{kind}{index}"


def two_passes(layer: nn.Module, hidden: Tensor, fp8: Any) -> dict[str, Tensor]:
    """Two accumulated passes: output, input gradient and weight gradients, in fp32."""
    x = hidden.detach().clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    for _ in range(2):
        with fp8():
            output, _ = layer(x)
        weights = torch.linspace(-1, 1, output.shape[-1], device=output.device)
        (output.float() * weights).square().sum().mul(1e-2).backward()
    found = {"output": output.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value.float() for name, value in found.items() if value is not None}


def fp32_passes(right: nn.Module, stock: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """two_passes of a layer in fp32 (SequentialMLP) that gets the weights of `stock`, under the
    names that parameters have there."""
    values = dict(stock.named_parameters())
    with torch.no_grad():
        for name, parameter in right.named_parameters():
            parameter.copy_(values[_name_in(values, name)])
    found = two_passes(right, hidden.float(), contextlib.nullcontext)
    kept = {name: found.pop(name) for name in ("output", "input")}
    return kept | {_name_in(values, name): value for name, value in found.items()}


def errors_of(
    expected: Mapping[str, Tensor], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Relative errors of theirs and of ours."""
    errors = {}
    for name, value in expected.items():
        size = value.norm() + 1e-30
        off = ((found[name] - value).norm() / size for found in (theirs, ours))
        errors[name] = tuple(map(float, off))
    return errors  # type: ignore[return-value]


def worse_of(
    errors: Mapping[str, tuple[float, float]], fp8: bool
) -> dict[str, tuple[float, float]]:
    """The errors where ours are larger than theirs, or large."""
    # In fp8 both are far from fp32, and rows of a tile of zeros have scales of their own.
    factor, most = (1.2, 0.2) if fp8 else (1.1, 0.02)
    return {
        what: both
        for what, both in errors.items()
        if not (both[1] <= factor * both[0] + 1e-5 and both[1] < most)
    }
