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

import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from megatron_fluid.backward.readiness import counted, gradient_owner
from megatron_fluid.backward.weight_grads import (
    WeightGradScheduler,
    WeightGradTask,
    get_backward_scheduler,
)
from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.moe.autograd import run_experts
from megatron_fluid.moe.call import ExpertCall, prepare
from megatron_fluid.moe.expert_rows import InPlace
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.moe.fp8 import computes_in_fp8, expire_casts
from megatron_fluid.patches.moe.limits import PHASES
from megatron_fluid.patches.moe.offload import offload_of

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid.patches.moe.expert_parameters import ExpertParameters, Looked

__all__ = ["OwnExperts", "SeparateExperts", "delayed_gradients"]


_phases_of = operator.attrgetter(*PHASES)


class ParameterGathers:
    """Whether the parameters of a layer are gathered already, of its few bucket groups: Megatron's
    hook asks for each of some hundred parameters, in every microbatch."""

    def __init__(self) -> None:
        self._owner: object = None
        self._groups: tuple[Any, ...] = ()

    def finished(self, first: Tensor, params: Callable[[], Sequence[Tensor]]) -> bool:
        """Whether the hooks would find nothing to do. False where that is not known.

        Args:
            first: one of the parameters.
            params: gives all of them.
        """
        owner = gradient_owner(first)
        if owner is not self._owner:
            self._owner = owner
            groups = getattr(owner, "bucket_groups", None)  # of Megatron's DistributedDataParallel
            self._groups = () if groups is None else groups(params())
        return bool(self._groups) and all(
            group.param_gather_dispatched and group.param_gather_handle is None
            for group in self._groups
        )


class ExpertWatch:
    """Whether the experts of an overlapped layer are still those that it was made for: one cheap
    look in every call.

    The overlapped path never calls the experts' modules. Adapters and quantisers replace modules,
    classes or forwards, register hooks, or add parameters; made after the first forward, they would
    be left out of the arithmetic. Such a change is an error (overlap_decision.py). Weights that
    were moved, replaced by others like them, frozen or thawed are read where they are.

    The experts of one layer as they were when its path was made. It holds their modules, and
    neither the layer nor a parameter.

    Args:
        layer: an MoELayer whose experts the overlapped path stands for.
        weights: the parameters of these experts.

    Attributes:
        hooks: those of the experts' modules.
    """

    def __init__(self, layer: MoELayer, weights: ExpertParameters) -> None:
        from megatron_fluid.patches.moe.expert_parameters import expert_gemm

        self._weights, self._gemm = weights, expert_gemm
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
            self._gemm(),
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
        from megatron_fluid.patches.moe.expert_parameters import (
            ExpertParameters,
            expert_modules_reason,
        )

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
