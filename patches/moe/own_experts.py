"""This package's experts of a Megatron layer: their parameters, and what is looked at in every
call; and these experts behind a token dispatcher.

Where a setting or a module rules out the fused path but not our experts (limits.py), the layer runs
Megatron's forward, phase by phase, with our token dispatcher or with Megatron's. SeparateExperts
takes the place of the experts' modules in it (phases.py): rows sorted by expert, their counts and
their probabilities go in, and the rows' results come out, biases included. Where experts are split
over tensor-parallel ranks, each computes with its shards, and the dispatcher gathers and reduces
around it.

Nothing is agreed on with other ranks: what these experts do, no other rank sees.

Shapes: N expert rows of this rank, El local experts, H hidden.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from megatron_fluid.backward.readiness import counted
from megatron_fluid.backward.weight_grads import (
    WeightGradScheduler,
    WeightGradTask,
    get_backward_scheduler,
)
from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.moe.autograd import run_experts
from megatron_fluid.moe.call import ExpertCall, prepare
from megatron_fluid.moe.expert_rows import InPlace
from megatron_fluid.patches.gradient_readiness import ParameterGathers
from megatron_fluid.patches.moe.fp8 import computes_in_fp8, expire_casts
from megatron_fluid.patches.moe.offload import offload_of

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid.patches.moe.expert_parameters import Looked

__all__ = ["OwnExperts", "SeparateExperts", "delayed_gradients"]


class OwnExperts:
    """The experts of one layer from call to call. It holds no state of any call, and neither the
    layer nor a parameter.

    Args:
        layer: an MoELayer whose experts are ours.
        config: the settings that the layer keeps.
        ordered: whether the experts may be computed in descending order, as they may lie in memory.

    Attributes:
        weights: the experts' parameters.
        hooks: those of the experts' modules.
        fp8: whether they compute in fp8.
    """

    def __init__(self, layer: MoELayer, config: FluidConfig, ordered: bool = True) -> None:
        from megatron.core.inference.utils import InferenceMode

        from megatron_fluid.patches.moe.expert_parameters import ExpertParameters, resolve
        from megatron_fluid.patches.moe.expert_watch import ExpertWatch

        self.config = config
        self.activation = resolve(layer.config, hasattr(layer.experts, "linear_fc1"))
        self.weights = ExpertParameters(layer.experts)
        self.weights.arrange(ordered)
        self._watch = ExpertWatch(layer, self.weights)
        self.hooks = self._watch.hooks
        self._gathers = ParameterGathers()
        self.inference_active = InferenceMode.is_active
        self.fused_main_grad = bool(layer.config.gradient_accumulation_fusion)
        self.fp8 = computes_in_fp8(layer)
        self.name = f"{'MTP ' if layer.is_mtp_layer else ''}MoE layer {layer.layer_number}"

    def look(self, layer: MoELayer) -> Looked | str:
        """The parameters as they are now; or what has changed of the experts that this may not
        honour."""
        return self._watch.look(layer)

    def changed(self, layer: MoELayer) -> str | None:
        """What has changed, or None."""
        looked = self.look(layer)
        return looked if isinstance(looked, str) else None

    def gather_parameters(self) -> None:
        """Wait for the parameters, as calling the experts' modules would have done."""
        # Replaced parameters were found before.
        if not self._gathers.finished(self.weights.first(), self.weights.every):
            self.hooks.run_parameter_gather()


class _DelayedGradients(WeightGradScheduler):
    """Weight gradients of one layer that wait until Megatron's schedule calls its backward_dw."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self._queue: deque[Callable[[], None]] = deque()

    def submit(
        self, name: str, params: Sequence[Tensor], compute: Callable[[], Sequence[Tensor] | None]
    ) -> None:
        self._queue.append(counted(params, WeightGradTask(name, params, compute).run))

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
        self._probs_on_input = bool(layer.config.moe_apply_probs_on_input)
        self._recompute = set(moe_recompute(config)) & {"hidden"}
        self._offload = offload_of(layer.config, config)
        self._scheduler: WeightGradScheduler | None = None
        if layer.config.delay_wgrad_compute:
            self._scheduler = _delayed.setdefault(layer, _DelayedGradients())
        elif config.defer_weight_grads:
            get_backward_scheduler().enable()

    def start(self, descends: Sequence[bool]) -> None:
        """What the first call needs of all ranks: nothing."""

    def compute(self, layer: MoELayer, rows: Tensor, counts: list[int], probs: Tensor) -> Tensor:
        """rows [N, H], their probabilities [N], counts [El] -> [N, H]. A dispatcher may give more
        rows than it counts: what they become is zero."""
        self.gather_parameters()
        w1, w2 = self.weights.matrices()
        if self.fp8:
            expire_casts(layer, lambda: (w1, w2))
        probs, spare = probs.reshape(-1), rows.shape[0] - sum(counts)
        if spare:
            rows, probs = rows[: len(rows) - spare], probs[: len(probs) - spare]
        scale: Tensor | None = probs
        if self._probs_on_input:
            rows, scale = (probs.unsqueeze(1) * rows).to(rows.dtype), None
        call = ExpertCall(
            x=rows,
            probs=scale,
            w1=w1,
            w2=w2,
            num_experts=len(counts),
            activation=self.activation,
            biases=self.weights.biases(),
            fp8=self.fp8,
            fp8_weight_grads=self.config.moe_fp8_weight_grads == "fp8",
            fused_main_grad=self.fused_main_grad,
            recompute=self._recompute,
            offload=self._offload,
            scheduler=self._scheduler,
            name=self.name,
        )
        output = run_experts(prepare(call), InPlace(counts))
        return F.pad(output, (0, 0, 0, spare)) if spare else output
