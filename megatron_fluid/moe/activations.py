"""Activations of expert MLPs, each with its derivative; any other callable works through autograd.

Legend: N rows, El experts, F1 width of fc1's output (2F for gated ones: first half gate, second
half up), F width of fc2's input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_fluid.errors import ConfigError

__all__ = ["ACTIVATIONS", "Activation", "RowBiases", "Variant", "resolve_activation"]


class Variant(NamedTuple):
    """What a gated activation may have beyond act(gate) * up.

        act(min(gate, limit)) * (clamp(up, -limit, limit) + offset)

    Attributes:
        limit: None for no clamp.
        offset: of the up half.
        interleave: columns of gate that alternate with as many of up in h; 0 where h is one half
            gate, then one half up.
    """

    limit: float | None = None
    offset: float = 0.0
    interleave: int = 0


_PLAIN = Variant()


class RowBiases(NamedTuple):
    """Biases of fc1, and whose rows they are added to.

    Attributes:
        table: a bias for each expert, contiguous. [El, F1]
        experts: of each row. int32 [N]
    """

    table: Tensor
    experts: Tensor

    def part(self, rows: slice) -> RowBiases:
        return RowBiases(self.table, self.experts[rows])


@dataclass(frozen=True)
class Activation:
    """An activation and its derivative, both in plain torch.

    Attributes:
        name: its name in ACTIVATIONS, or the callable's.
        gated: whether F1 is 2F.
        forward: h [N, F1] -> v [N, F].
        backward: h [N, F1], dv [N, F] -> dh [N, F1].
        variant: of a gated one, what it has beyond its name.
    """

    name: str
    gated: bool
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    variant: Variant = _PLAIN

    @functools.cached_property
    def built_in(self) -> bool:
        """Whether it is that of its name in ACTIVATIONS, which kernels have, too, or a variant of
        it, and not a caller's own. A copy of it is."""
        known = self.name in ACTIVATIONS
        return known and resolve_activation(self.name, variant=self.variant) == self

    @functools.cached_property
    def plain(self) -> bool:
        """Whether it is built in, and no variant."""
        return self.built_in and self.variant == _PLAIN

    @functools.cached_property
    def gates(self) -> int:
        """F1 / F: 2 where it is gated, else 1."""
        return 2 if self.gated else 1


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


def _quick_gelu_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(1.702 * g)
    value = g * s
    return value, s + 1.702 * value * (1 - s)


def _relu_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(g), (g > 0).to(g.dtype)


def _relu2_slope(g: Tensor) -> tuple[Tensor, Tensor]:
    r = torch.relu(g)
    return r * r, 2 * r


def _gelu_tanh(g: Tensor) -> Tensor:
    return functional.gelu(g, approximate="tanh")


def _quick_gelu(g: Tensor) -> Tensor:
    return g * torch.sigmoid(1.702 * g)


def _relu2(g: Tensor) -> Tensor:
    return torch.relu(g).square()


Slope = Callable[[Tensor], tuple[Tensor, Tensor]]


def _plain(name: str, value: Callable[[Tensor], Tensor], slope: Slope) -> Activation:
    return Activation(name, False, value, lambda h, dv: dv * slope(h)[1])


def _gated(
    name: str, value: Callable[[Tensor], Tensor], slope: Slope, variant: Variant = _PLAIN
) -> Activation:
    limit, offset, interleave = variant

    def halves(h: Tensor) -> tuple[Tensor, Tensor]:
        if not interleave:
            gate, up = h.chunk(2, dim=-1)
            return gate, up
        gate, up = h.unflatten(-1, (-1, 2, interleave)).unbind(-2)
        return gate.flatten(-2), up.flatten(-2)

    def limited(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate, up + offset if offset else up

    def forward(h: Tensor) -> Tensor:
        gate, up = limited(*halves(h))
        return value(gate) * up

    def backward(h: Tensor, dv: Tensor) -> Tensor:
        raw_gate, raw_up = halves(h)
        gate, up = limited(raw_gate, raw_up)
        v, dv_dgate = slope(gate)
        dgate, dup = dv * up * dv_dgate, dv * v
        if limit is not None:
            dgate, dup = dgate * (raw_gate <= limit), dup * (raw_up.abs() <= limit)
        if not interleave:
            return torch.cat([dgate, dup], dim=-1)
        parts = [part.unflatten(-1, (-1, interleave)) for part in (dgate, dup)]
        return torch.stack(parts, dim=-2).flatten(-3)

    return Activation(name, True, forward, backward, variant)


_GATES: dict[str, tuple[Callable[[Tensor], Tensor], Slope]] = {
    "swiglu": (functional.silu, _silu_slope),
    "geglu": (functional.gelu, _gelu_slope),
    "geglu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "quick_geglu": (_quick_gelu, _quick_gelu_slope),
}

ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        *(_gated(name, *functions) for name, functions in _GATES.items()),
        _plain("silu", functional.silu, _silu_slope),
        _plain("gelu", functional.gelu, _gelu_slope),
        _plain("gelu_tanh", _gelu_tanh, _gelu_tanh_slope),
        _plain("quick_gelu", _quick_gelu, _quick_gelu_slope),
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


@functools.cache
def _variant(name: str, variant: Variant) -> Activation:
    """One object for each, so that equality tells it from a caller's own."""
    return _gated(name, *_GATES[name], variant)


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
    activation: str | Activation | Callable[[Tensor], Tensor],
    gated: bool = False,
    variant: Variant = _PLAIN,
) -> Activation:
    """An Activation from its name or from a callable of the pre-activation.

    Args:
        activation: a name in ACTIVATIONS; an Activation; or a callable, as
            torch.nn.functional.gelu. One that halves the last dimension counts as gated. Callables
            without a known derivative are differentiated by autograd.
        gated: put a linear gate on a callable: function(gate) * up, as Megatron's gated_linear_unit
            does.
        variant: of a gated one that is given by its name.

    Raises:
        ConfigError: an unknown name, or neither a name nor a callable.
    """
    if variant != _PLAIN:
        if not isinstance(activation, str) or activation not in _GATES:
            allowed = f"one of {', '.join(_GATES)}, for {variant}"
            raise ConfigError.of("activation", activation, allowed)
        return _variant(activation, variant)
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
