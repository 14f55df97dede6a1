"""Megatron's MoE layer and ours in low precision against one in fp32 with the same weights: neither
may be further off than the other by more than a little."""

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A router with a bias is multiplied in TF32 where its dtype is fp32; fp64 leaves every choice of an
# expert to the case, not to rounding.
BIASED = {"add_bias_linear": True, "moe_router_dtype": "fp64"}

# Most that a layer with activation_func_clamp_value in bf16 may be off: rounding of h decides on
# which side of the clamp an element lies, and with that whether it has a gradient. Megatron's own
# gradients are 5 to 7 % off.
CLAMPED_ERROR = 0.1


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
    """Two accumulated passes: output, input gradient and weight gradients (from main_grad where
    Megatron fuses their accumulation), in fp32; a single grouped parameter's by expert."""
    x = hidden.detach().clone().requires_grad_()
    config: Any = layer.config
    for parameter in layer.parameters():
        parameter.grad = None
        if config.gradient_accumulation_fusion:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for _ in range(2):
        with fp8():
            output, _ = layer(x)
        weights = torch.linspace(-1, 1, output.shape[-1], device=output.device)
        (output.float() * weights).square().sum().mul(1e-2).backward()
    found = {"output": output.detach(), "input": x.grad}
    for name, parameter in layer.named_parameters():
        added = getattr(parameter, "grad_added_to_main_grad", False)
        grad = parameter.main_grad if added else parameter.grad  # type: ignore[attr-defined]
        if re.fullmatch(r"experts\.linear_fc\d\.(weight|bias)", name):
            found |= {f"{name}{i}": member for i, member in enumerate(grad.unbind(0))}
        else:
            found[name] = grad
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


class Errors(NamedTuple):
    """Relative errors of what is one tensor, or one kind of parameter of all experts: norms of what
    is off, over the norm of what is right, and how many elements they are of."""

    theirs: float
    ours: float
    elements: int


def _pooled(name: str) -> str:
    """What a tensor's error is part of: experts.linear_fc1.weight3 and
    experts.local_experts.3.linear_fc1.weight are of experts.linear_fc1.weight."""
    name = re.sub(r"\bexperts\.local_experts\.\d+\.", "experts.", name)
    return re.sub(r"\b(experts\.linear_fc[12]\.(?:weight|bias))\d+$", r"\1", name)


def errors_of(
    expected: Mapping[str, Tensor], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> dict[str, Errors]:
    """Errors of theirs and of ours. Those of all experts' weights of one linear are one, and so are
    those of their biases: a single expert's few rows would leave the comparison to chance."""
    sums: dict[str, list[float]] = {}
    for name, value in expected.items():
        parts = value, theirs[name] - value, ours[name] - value
        squares = [float(part.double().square().sum()) for part in parts]
        found = sums.setdefault(_pooled(name), [0.0, 0.0, 0.0, 0.0])
        for number, more in enumerate((*squares, value.numel())):
            found[number] += more
    return {
        name: Errors(*(math.sqrt(off / (size + 1e-60)) for off in both), int(elements))
        for name, (size, *both, elements) in sums.items()
    }


def worse_of(errors: Mapping[str, Errors], fp8: bool, most: float = 0.02) -> dict[str, Errors]:
    """The errors where ours are larger than theirs, or than `most`."""
    # In fp8 both are far from fp32, and rows of a tile of zeros have scales of their own.
    least, most = (1.2, 0.2) if fp8 else (1.1, most)
    worse = {}
    for what, error in errors.items():
        # Of few elements, a router's bias say, the rounding's luck decides more than 10 %.
        factor = max(least, 1 + 2 / math.sqrt(error.elements))
        if not (error.ours <= factor * error.theirs + 1e-5 and error.ours < most):
            worse[what] = error
    return worse
