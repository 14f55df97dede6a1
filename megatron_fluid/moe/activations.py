"""Activations of expert MLPs, each with its derivative; any other callable works through autograd.

Legend: N rows, F1 width of fc1's output (2F for gated ones: first half gate, second half up), F
width of fc2's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_fluid.errors import ConfigError

__all__ = ["ACTIVATIONS", "Activation", "resolve_activation"]


@dataclass(frozen=True)
class Activation:
    """An activation and its derivative, both in plain torch.

    Attributes:
        name: its name in ACTIVATIONS, or the callable's.
        gated: whether F1 is 2F.
        forward: h [N, F1] -> v [N, F].
        backward: h [N, F1], dv [N, F] -> dh [N, F1].
    """

    name: str
    gated: bool
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]

    @property
    def built_in(self) -> bool:
        """Whether it is that of its name in ACTIVATIONS, which kernels have, too, and not a
        caller's own. A copy of it is."""
        return ACTIVATIONS.get(self.name) == self

    def ffn_width(self, fc1_width: int) -> int:
        """F for F1, fc1's output width."""
        return fc1_width // 2 if self.gated else fc1_width


def _silu_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(g)
    value = g * s
    return value, s + value * (1 - s)


def _gelu_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
    return g * cdf, cdf + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (g + 0.044715 * g * g * g))
    value = 0.5 * g * (1 + t)
    return value, 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * c * (1 + 3 * 0.044715 * g * g)


def _relu_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(g), (g > 0).to(g.dtype)


def _relu2_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    r = torch.relu(g)
    return r * r, 2 * r


def _gelu_tanh(g: Tensor) -> Tensor:
    return functional.gelu(g, approximate="tanh")


def _relu2(g: Tensor) -> Tensor:
    return torch.relu(g).square()


Slope = Callable[[Tensor], tuple[Tensor, Tensor]]


def _plain(name: str, value: Callable[[Tensor], Tensor], slope: Slope) -> Activation:
    return Activation(name, False, value, lambda h, dv: dv * slope(h)[1])


def _gated(name: str, value: Callable[[Tensor], Tensor], slope: Slope) -> Activation:
    def forward(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return value(gate) * up

    def backward(h: Tensor, dv: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        v, dv_dgate = slope(gate)
        return torch.cat([dv * up * dv_dgate, dv * v], dim=-1)

    return Activation(name, True, forward, backward)


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        _gated("swiglu", functional.silu, _silu_slope),
        _gated("geglu", functional.gelu, _gelu_slope),
        _gated("geglu_tanh", _gelu_tanh, _gelu_tanh_slope),
        _plain("silu", functional.silu, _silu_slope),
        _plain("gelu", functional.gelu, _gelu_slope),
        _plain("gelu_tanh", _gelu_tanh, _gelu_tanh_slope),
        _plain("relu2", _relu2, _relu2_slope),
        _plain("relu", torch.relu, _relu_slope),
    )
}

_KNOWN_CALLABLES: dict[Callable[..., Tensor], str] = {
    functional.silu: "silu", functional.gelu: "gelu", functional.relu: "relu", torch.relu: "relu"
}  # fmt: skip
_GATED = {
    "silu": ACTIVATIONS["swiglu"],
    "gelu": ACTIVATIONS["geglu"],
    "relu": _gated("reglu", torch.relu, _relu_slope),
}


def _through_autograd(function: Callable[[Tensor], Tensor]) -> Activation:
    def backward(h: Tensor, dv: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            (dh,) = torch.autograd.grad(function(leaf), leaf, dv)
        return dh

    with torch.no_grad():
        gated = function(torch.zeros(1, 8)).shape[-1] == 4
    name = getattr(function, "__name__", type(function).__name__)
    return Activation(name, gated, function, backward)


def resolve_activation(
    activation: str | Activation | Callable[[Tensor], Tensor], gated: bool = False
) -> Activation:
    """An Activation from its name or from a callable of the pre-activation.

    Args:
        activation: a name in ACTIVATIONS; an Activation; or a callable, as
            torch.nn.functional.gelu. One that halves the last dimension counts as gated. Callables
            without a known derivative are differentiated by autograd.
        gated: put a linear gate on a callable: function(gate) * up, as Megatron's gated_linear_unit
            does.

    Raises:
        ConfigError: an unknown name, or neither a name nor a callable.
    """
    if isinstance(activation, Activation):
        return activation
    found: Any = ACTIVATIONS.get(activation) if isinstance(activation, str) else activation
    if not callable(found) and not isinstance(found, Activation):
        allowed = ", ".join(sorted(ACTIVATIONS)) + ", or a callable"
        raise ConfigError.of("activation", activation, allowed)
    if isinstance(found, Activation):
        return found
    known = _KNOWN_CALLABLES.get(found)
    if not gated:
        return _through_autograd(found) if known is None else ACTIVATIONS[known]
    if known is not None:
        return _GATED[known]
    function = found

    def with_gate(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up

    return _through_autograd(with_gate)
