"""Whether the experts of an overlapped MoE layer are still those that it was made for: one cheap
look in every call.

The overlapped path never calls the experts' modules. Adapters and quantisers replace modules,
classes or forwards, register hooks, or add parameters; made after the first forward, they would be
left out of the arithmetic. Such a change is an error (overlap_decision.py). Weights that were
moved, replaced by others like them, frozen or thawed are read where they are.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.moe.expert_parameters import (
    ExpertParameters,
    Looked,
    expert_gemm,
    expert_modules_reason,
)
from megatron_fluid.patches.moe.limits import PHASES

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["ExpertWatch"]

_phases_of = operator.attrgetter(*PHASES)


class ExpertWatch:
    """The experts of one layer as they were when its path was made. It holds their modules, and
    neither the layer nor a parameter.

    Args:
        layer: an MoELayer whose experts the overlapped path stands for.
        weights: the parameters of these experts.

    Attributes:
        hooks: those of the experts' modules.
    """

    def __init__(self, layer: MoELayer, weights: ExpertParameters) -> None:
        self._weights = weights
        self.hooks = ModuleHooks(experts=layer.experts)
        self._mlps = [vars(module) for module in layer.experts.modules()]
        self._mlps = [attributes for attributes in self._mlps if "activation_func" in attributes]
        self._known = self._surroundings(layer)
        self._state = weights.look().state

    def _surroundings(self, layer: MoELayer) -> tuple[Any, ...]:
        """What decides beside the experts' own modules and parameters; none of it compares by
        value."""
        kind, held = type(layer), vars(layer)
        return (
            layer._modules["experts"],
            type(held.get("token_dispatcher")),
            _phases_of(kind),
            held.keys().isdisjoint(PHASES),
            expert_gemm(),
            [*map(dict.get, self._mlps, itertools.repeat("activation_func"))],
        )

    def look(self, layer: MoELayer) -> Looked | str:
        """The parameters as they are now; or what has changed that the path does not honour."""
        found = self._surroundings(layer)
        if found != self._known:
            pairs = zip(_SURROUNDINGS, found, self._known, strict=True)
            return next(what for what, now, known in pairs if now != known)
        if (reason := self.hooks.replaced() or self.hooks.foreign()) is not None:
            return reason
        try:
            looked = self._weights.look()
            if looked.state == self._state:
                return looked
        except (AttributeError, KeyError, RuntimeError, TypeError):  # missing, or without memory
            pass
        if (reason := expert_modules_reason(layer.experts)) is not None:
            return reason
        now = ExpertParameters(layer.experts)
        if (now.biased, now.packed) != (self._weights.biased, self._weights.packed):
            return "biases of the experts were added or taken away, or their parameters packed"
        self._weights.share_storages()
        looked = self._weights.look()
        self._state = looked.state
        return looked


_SURROUNDINGS = (
    "experts was replaced",
    "the token dispatcher was replaced",
    "a phase of the layer's class was replaced",
    "a phase of the layer was replaced",
    "the GEMM of Megatron's linears was replaced",
    "activation_func of an expert was replaced",
)
