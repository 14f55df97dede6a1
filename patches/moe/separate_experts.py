"""This package's experts behind a token dispatcher.

Where a setting or a module rules out the fused path but not these experts (limits.py), the layer
runs Megatron's forward, phase by phase, with FluidTokenDispatcher or with Megatron's.
SeparateExperts takes the place of the experts' modules in it (layer.py): rows sorted by expert,
their counts and their probabilities go in, and the rows' results come out, biases included. Where
experts are split over tensor-parallel ranks, each computes with its shards, and the dispatcher
gathers and reduces around it.

Nothing is agreed on with other ranks: no other rank sees what these experts do.

Shapes: N expert rows of this rank, El local experts, H hidden.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from megatron_fluid.backward.weight_grads import (
    WeightGradScheduler,
    get_backward_scheduler,
    weight_grad_task,
)
from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.autograd import run_experts
from megatron_fluid.moe.backends import Backend
from megatron_fluid.moe.expert_rows import InPlace
from megatron_fluid.patches.moe.offload import offload_of
from megatron_fluid.patches.moe.own_experts import Looked, OwnExperts
from megatron_fluid.patches.moe.recompute import recompute_of

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["PhaseByPhase", "SeparateExperts", "delayed_gradients"]


class _DelayedGradients(WeightGradScheduler):
    """Weight gradients of one layer that wait until Megatron's schedule calls its backward_dw."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self._queue: deque[Callable[[], None]] = deque()

    def submit(
        self, name: str, params: Sequence[Tensor], compute: Callable[[], Sequence[Tensor] | None]
    ) -> None:
        self._queue.append(weight_grad_task(name, params, compute))

    def finish_batch(self) -> None:
        """Nothing: the schedule says when."""

    def run(self) -> int:
        """Compute and deliver what waits, and say how much it was."""
        ran = 0
        while self._queue:
            self._queue.popleft()()
            ran += 1
        return ran


# By layer: a backward may come after its experts were changed.
_delayed: weakref.WeakKeyDictionary[Any, _DelayedGradients] = weakref.WeakKeyDictionary()
delayed_gradients = _delayed.get


class SeparateExperts(OwnExperts):
    """Experts behind a token dispatcher."""

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config, ordered=False)
        self.recompute = recompute_of(config, "where experts run apart from dispatch and combine")
        self.offload = offload_of(layer.config, config)
        self._scheduler: WeightGradScheduler | None = None
        if layer.config.delay_wgrad_compute:
            self._scheduler = _delayed.setdefault(layer, _DelayedGradients())
        elif config.defer_weight_grads:
            get_backward_scheduler().enable()

    def compute(
        self, layer: MoELayer, looked: Looked, rows: Tensor, counts: list[int], probs: Tensor
    ) -> Tensor:
        """rows [N, H], their probabilities [N], counts [El] -> [N, H]. looked: this call's
        parameters. A dispatcher may give more rows than it counts: what they become is zero."""
        self.gather_parameters()
        probs, spare = probs.reshape(-1), rows.shape[0] - sum(counts)
        if spare:
            rows, probs = rows[: len(rows) - spare], probs[: len(probs) - spare]
        call = self.call(rows, probs, self.projections(layer, looked), self._scheduler)
        output = run_experts(call, InPlace(counts))
        return F.pad(output, (0, 0, 0, spare)) if spare else output


@dataclass(frozen=True)
class PhaseByPhase:
    """What serves a layer that runs Megatron's forward, phase by phase.

    Attributes:
        exchange: moves the tokens, for FluidTokenDispatcher; None where Megatron does.
        experts: compute between dispatch and combine; None for Megatron's modules.
    """

    exchange: Backend | None
    experts: SeparateExperts | None
