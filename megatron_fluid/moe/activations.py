"""Activations of expert MLPs, in plain torch. Their derivatives are autograd's.

Legend: N rows, El experts, F1 width of fc1's output (2F for gated ones: first half gate, second
half up), F width of fc2's input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fixed_tiles.launch import row_by_row

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


@dataclass(frozen=True)
class Activation:
    """An activation.

    Attributes:
        name: its name in ACTIVATIONS, or the callable's.
        gated: whether F1 is 2F.
        forward: h [N, F1] -> v [N, F].
        variant: of a gated one, what it has beyond its name.
        by_rows: `value` goes row by row, as row_by_row does.
    """

    name: str
    gated: bool
    forward: Callable[[Tensor], Tensor]
    variant: Variant = _PLAIN
    by_rows: bool = field(default=False, compare=False)

    def value(self, h: Tensor) -> Tensor:
        """forward(h), row by row where that is asked for."""
        return row_by_row(self.forward, h) if self.by_rows else self.forward(h)

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


def _gelu_tanh(g: Tensor) -> Tensor:
    return functional.gelu(g, approximate="tanh")


def _quick_gelu(g: Tensor) -> Tensor:
    return g * torch.sigmoid(1.702 * g)


def _relu2(g: Tensor) -> Tensor:
    return torch.relu(g).square()


type _Value = Callable[[Tensor], Tensor]


def _gated(name: str, value: _Value, variant: Variant = _PLAIN) -> Activation:
    limit, offset, interleave = variant

    def forward(h: Tensor) -> Tensor:
        if interleave:
            gate, up = h.unflatten(-1, (-1, 2, interleave)).unbind(-2)
            gate, up = gate.flatten(-2), up.flatten(-2)
        else:
            gate, up = h.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return value(gate) * (up + offset if offset else up)

    return Activation(name, True, forward, variant)


_GATES: dict[str, _Value] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": _gelu_tanh,
    "quick_geglu": _quick_gelu,
}

ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        *(_gated(name, value) for name, value in _GATES.items()),
        Activation("silu", False, functional.silu),
        Activation("gelu", False, functional.gelu),
        Activation("gelu_tanh", False, _gelu_tanh),
        Activation("quick_gelu", False, _quick_gelu),
        Activation("relu2", False, _relu2),
        Activation("relu", False, torch.relu),
    )
}

_KNOWN_CALLABLES: dict[Callable[..., Tensor], str] = {
    functional.silu: "silu", functional.gelu: "gelu", functional.relu: "relu", torch.relu: "relu"
}  # fmt: skip
_GATED = {
    "silu": ACTIVATIONS["swiglu"],
    "gelu": ACTIVATIONS["geglu"],
    "relu": _gated("reglu", torch.relu),
}


_NO_PARAMETERS = "a function without parameters, since they would get no gradient"


@functools.cache
def _variant(name: str, variant: Variant) -> Activation:
    """One object for each, so that equality tells it from a caller's own."""
    return _gated(name, _GATES[name], variant)


def _of_callable(function: Callable[[Tensor], Tensor]) -> Activation:
    name = getattr(function, "__name__", type(function).__name__)
    with torch.enable_grad():
        value = function(torch.zeros(1, 8))
    if value.requires_grad:
        raise ConfigError.of("activation", name, _NO_PARAMETERS)
    return Activation(name, value.shape[-1] == 4, function)


def resolve_activation(
    activation: str | Activation | Callable[[Tensor], Tensor],
    gated: bool = False,
    variant: Variant = _PLAIN,
) -> Activation:
    """An Activation from its name or from a callable of the pre-activation.

    Args:
        activation: a name in ACTIVATIONS; an Activation; or a callable, as
            torch.nn.functional.gelu. One that halves the last dimension counts as gated. It is
            called again in the backward and must return the same.
        gated: put a linear gate on a callable: function(gate) * up, as Megatron's gated_linear_unit
            does.
        variant: of a gated one that is given by its name.

    Raises:
        ConfigError: an unknown name, neither a name nor a callable, or a callable with parameters.
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
    if isinstance(found, torch.nn.Module) and next(found.parameters(), None) is not None:
        raise ConfigError.of("activation", found, _NO_PARAMETERS)
    if isinstance(found, Activation):
        return found
    known = _KNOWN_CALLABLES.get(found)
    if not gated:
        return _of_callable(found) if known is None else ACTIVATIONS[known]
    if known is not None:
        return _GATED[known]
    function = found

    def with_gate(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up

    return _of_callable(with_gate)
