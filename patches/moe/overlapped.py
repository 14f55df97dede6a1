"""What the overlapped forwards of one MoE layer share: the experts' parameters and hooks, the
shared experts, and recomputation. rounds.py and nvlink.py move the tokens.

This file and its siblings import Megatron at the top: they are imported in the first forward.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden, W ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from megatron.core import tensor_parallel
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.moe.expert_parameters import ExpertParameters
from megatron_fluid.patches.moe.router import route

__all__ = ["ChosenExpertsLayer", "Compute", "OverlappedLayer"]

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class OverlappedLayer:
    """What the overlapped forward of one layer needs from call to call. It holds no state of any
    call, and not the layer.

    Attributes:
        backend: who moves the tokens.
        columns: the experts in the order in which ranks keep them, where that is not their own
            order. [E]
    """

    backend: str

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        self.config = config
        self.group = layer.ep_group
        self.weights = ExpertParameters(layer.experts)
        self.weights.arrange()
        self.hooks = ModuleHooks(experts=layer.experts)
        self.inference_active = InferenceMode.is_active
        self.top_k = int(layer.config.moe_router_topk)
        self.fused_main_grad = bool(layer.config.gradient_accumulation_fusion)
        self.name = f"{'MTP ' if layer.is_mtp_layer else ''}MoE layer {layer.layer_number}"
        self.columns: torch.Tensor | None = None

    def start(self, descends: Sequence[bool]) -> None:
        """What every rank of the group has to do with the others before the first call.

        Args:
            descends: whether a rank keeps its experts in descending order. [W]
        """
        self.rounds = shared_rounds(self.group, self.config.timeout_s)
        if self.config.defer_weight_grads:
            get_backward_scheduler().enable()
        if any(descends):
            local = range(len(self.weights.order))
            numbers = [
                rank * len(local) + e
                for rank, d in enumerate(descends)
                for e in (reversed(local) if d else local)
            ]
            self.columns = torch.tensor(numbers, device=self.rounds.device)

    def forward(
        self, layer: MoELayer, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """[S, B, H] -> ([S, B, H], None)."""
        self._run_hooks()
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()  # [B, S] -> [S, B], as hidden_states
        recompute = layer.moe_layer_recompute and layer.training
        compute, probs = self.route(layer, hidden_states, padding_mask, recompute)
        if not recompute:
            return compute(hidden_states, probs), None
        return tensor_parallel.checkpoint(compute, False, hidden_states, probs), None

    def route(
        self,
        layer: MoELayer,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None,
        recompute: bool,
    ) -> tuple[Compute, torch.Tensor]:
        """Run the router and plan the exchange.

        Args:
            layer: the layer.
            hidden_states: [S, B, H].
            padding_mask: [S, B] bool, or None.
            recompute: `compute` runs again in backward, and shall find the same plan.

        Returns:
            (compute, probs): `compute(hidden_states, probs)` gives the layer's output, [S, B, H].
        """
        raise NotImplementedError

    def _run_hooks(self) -> None:
        """What calling the experts' modules would have done first."""
        if not self.hooks.registered():
            return
        if (hook := self.hooks.foreign()) is not None:
            allowed = (
                "hooks on experts from before the layer's first forward, or moe_backend megatron"
            )
            raise ConfigError.of("hooks", hook, allowed)
        self.hooks.run_parameter_gather()

    @staticmethod
    def _shared_experts(
        layer: MoELayer, hidden_states: torch.Tensor
    ) -> Callable[[], torch.Tensor] | None:
        """Start the shared experts, on their own stream where Megatron overlaps them; gives a way
        to get their output."""
        if not layer.use_shared_expert:
            return None
        if not layer.shared_expert_overlap:
            output = layer.shared_experts_compute(hidden_states)
            return lambda: output
        shared = layer.shared_experts
        shared.pre_forward_comm(hidden_states)
        shared.linear_fc1_forward_and_act()
        shared.linear_fc2_forward()
        shared.post_forward_comm()
        return shared.get_output


class ChosenExpertsLayer(OverlappedLayer):
    """One layer whose transport takes choices and not maps."""

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        # Of each expert, its index in the order of `columns`. [E] int32
        self._indices: torch.Tensor | None = None
        self._prepared: tuple[ExpertWeights, ExpertWeights] | None = None
        self._addresses: list[int] = []

    def start(self, descends: Sequence[bool]) -> None:
        """As OverlappedLayer's."""
        super().start(descends)
        self._indices = None if self.columns is None else self.columns.argsort().int()

    def choices(
        self, layer: MoELayer, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices of the chosen experts in the order in which ranks keep them [T, K], -1 where
        dropped; fp32 probs [T, K])."""
        probs, chosen, compact = route(layer, hidden_states, padding_mask)
        if not compact:
            return _chosen_of(probs, chosen, self.top_k, self.columns)
        return chosen if self._indices is None else self._indices.take(chosen), probs.float()

    def matrices(self) -> tuple[ExpertWeights, ExpertWeights]:
        """The parameters as grouped GEMMs take them, looked at again only when one was replaced or
        moved."""
        w1, w2 = self.weights.current()
        # Of a hundred parameters in every call: map, whose loop is in C.
        addresses = [*map(torch.Tensor.data_ptr, w1), *map(torch.Tensor.data_ptr, w2)]
        found = self._prepared
        if found is None or addresses != self._addresses or not _same(found, (w1, w2)):
            first, second = (ExpertWeights(w, len(w), name=n) for w, n in ((w1, "w1"), (w2, "w2")))
            found = self._prepared = first, second
            self._addresses = addresses
        return found


def _same(prepared: tuple[ExpertWeights, ...], found: tuple[Sequence[torch.Tensor], ...]) -> bool:
    """Whether the objects are the same; comparing tuples would go on to the values."""
    return all(
        all(map(operator.is_, held.params, now)) for held, now in zip(prepared, found, strict=True)
    )


def _chosen_of(
    probs: torch.Tensor, routing_map: torch.Tensor, top_k: int, columns: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of maps [T, E]: by a kernel on a GPU, else by torch."""
    if probs.is_cuda:
        from megatron_fluid.moe.fused_router import chosen_of

        return chosen_of(probs, routing_map, top_k, columns)
    if columns is not None:
        probs, routing_map = probs.index_select(1, columns), routing_map.index_select(1, columns)
    # Stable: the chosen experts in ascending order, then the others.
    kept, ids = routing_map.int().sort(dim=1, descending=True, stable=True)
    kept, ids = kept[:, :top_k], ids[:, :top_k]
    return torch.where(kept != 0, ids, -1), probs.gather(1, ids).float()
