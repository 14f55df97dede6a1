"""The phases of Megatron's MoELayer in which SeparateExperts compute: between dispatch and combine,
and where its schedule asks for weight gradients that it delays.

What they are is in separate_experts.py; which layers have them, in decision.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_fluid.patches.moe.layer import path_of
from megatron_fluid.patches.moe.separate_experts import (
    PhaseByPhase,
    SeparateExperts,
    delayed_gradients,
)

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["backward_dw", "routed_experts_compute"]


def routed_experts_compute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.routed_experts_compute`, Megatron's phase between dispatch and combine,
    where a layer has SeparateExperts."""

    @functools.wraps(original)
    def fluid_routed_experts(self: MoELayer, hidden_states: Tensor, probs: Tensor) -> Any:
        experts = _separate_experts(self)
        looked = None if experts is None else experts.look(self)
        if experts is None or looked is None:
            return original(self, hidden_states, probs)
        dispatcher = self.token_dispatcher
        rows, counts, row_probs = dispatcher.dispatch_postprocess(hidden_states, probs)
        if self.config.overlap_moe_expert_parallel_comm and _share(rows, hidden_states):
            rows = rows.clone()  # the schedule frees what enters a phase after it
        output = experts.compute(self, looked, rows, counts.tolist(), row_probs)
        return dispatcher.combine_preprocess(output), None

    return fluid_routed_experts


def backward_dw(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.backward_dw`, by which Megatron's schedule asks for delayed weight
    gradients: those of SeparateExperts wait in a queue."""

    @functools.wraps(original)
    def fluid_backward_dw(
        self: MoELayer, routed_experts: bool = True, shared_experts: bool = False
    ) -> Any:
        queue = delayed_gradients(self)
        if routed_experts and queue is not None:
            experts = _separate_experts(self)
            served = queue.run() > 0 or (experts is not None and experts.look(self) is not None)
            routed_experts = not served
        return original(self, routed_experts=routed_experts, shared_experts=shared_experts)

    return fluid_backward_dw


def _separate_experts(layer: MoELayer) -> SeparateExperts | None:
    """This package's experts of a layer that runs phase by phase, or None."""
    path = path_of(layer)
    return path.experts if isinstance(path, PhaseByPhase) else None


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
