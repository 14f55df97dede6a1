"""The transports of MoELayer, one row each in BACKENDS, and the choice between them.

Triton is imported only by what needs it: rounds need torch alone.

Shapes: T tokens of this rank, K top-k, H hidden.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.config import current_config, moe_recompute
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.choose import ExchangeCase, choose_transport, nvlink_layer_reason
from megatron_fluid.moe.config import MoEConfig
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.hierarchical.choice import ExpertShape
from megatron_fluid.moe.hierarchical.transport import plan_hierarchical, start_hierarchical_moe
from megatron_fluid.moe.local.transport import local_moe
from megatron_fluid.moe.rounds.plan import ExactPlan, permute, permute_probs, unpermute
from megatron_fluid.moe.rounds.transport import start_overlapped_moe
from megatron_fluid.moe.router import Routing

__all__ = ["BACKENDS", "LayerBackend", "choose_backend"]

_LOGGER = logging.getLogger("megatron_fluid")


class ServedLayer(Protocol):
    """What a backend asks of a layer."""

    config: MoEConfig
    rounds: P2PRounds
    activation: Activation
    name: str
    layout: str
    weight1: nn.Parameter
    weight2: nn.Parameter
    training: bool

    def expert_weights(self) -> tuple[ExpertWeights, ExpertWeights]: ...

    def shared_expert(self, tokens: Tensor) -> Tensor | None: ...


type Results = tuple[Tensor, Tensor | None]  # of the experts and of the shared expert


class LayerBackend:
    """How one MoELayer moves its tokens. It holds no state of any call, and not the layer.

    Attributes:
        name: as in MoEConfig.backend.
    """

    name: str

    def __init__(self, layer: ServedLayer) -> None:
        """Raises ConfigError where a setting of the layer cannot be met."""

    def forward(self, layer: ServedLayer, x: Tensor, routing: Routing) -> Results:
        """The experts' results [T, H] for x [T, H], and those of the shared expert."""
        raise NotImplementedError

    def check_overflow(self) -> None:
        """Raise FluidError where the capacity was exceeded."""


class _Local(LayerBackend):
    name = "local"

    def forward(self, layer: ServedLayer, x: Tensor, routing: Routing) -> Results:
        ids, probs = routing.ids, routing.probs
        weights: Sequence[Tensor | ExpertWeights] = layer.expert_weights()
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weights = x.to(dtype), [fc.params[0].to(dtype) for fc in layer.expert_weights()]
        given = (x, ids, probs, weights[0], weights[1], layer.activation)
        out = local_moe(layer.rounds.group, *given, **_settings(layer))
        return out, layer.shared_expert(x)


class _Nvlink(LayerBackend):
    name = "nvlink"

    def __init__(self, layer: ServedLayer) -> None:
        from megatron_fluid.moe.nvlink.buffers import SizedBuffers

        c = layer.config
        shape = (c.ffn_hidden_size, c.top_k, c.num_experts)
        self.sized = SizedBuffers(layer.rounds.group, *shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nvlink:
        # A copy shares the buffers: they are used by one layer after the other.
        copied = copy.copy(self)
        copied.sized = copy.copy(self.sized)
        return copied

    def forward(self, layer: ServedLayer, x: Tensor, routing: Routing) -> Results:
        from megatron_fluid.moe.nvlink.transport import nvlink_moe

        buffers = self.sized.of(x.shape[0], x.shape[1], x.dtype)
        shared, capacity = layer.shared_expert(x), None
        if (factor := layer.config.capacity_factor) is not None:
            buffers.check_overflow()
            capacity = buffers.bounded_rows(factor)
        ids, probs, activation = routing.ids, routing.probs.float(), layer.activation.name
        arguments = (buffers, x, ids, probs, *layer.expert_weights(), activation, capacity)
        return nvlink_moe(*arguments, grow=self.sized.grow, **_settings(layer)), shared

    def check_overflow(self) -> None:
        if self.sized.buffers is not None:
            self.sized.buffers.check_overflow()


class _Hierarchical(LayerBackend):
    name = "hierarchical"

    def __init__(self, layer: ServedLayer) -> None:
        if (factor := layer.config.capacity_factor) is not None:
            raise ConfigError.of("capacity_factor", factor, "None over several hosts")
        if (recipe := layer.config.fp8_recipe) is not None:
            raise ConfigError.of("fp8_recipe", recipe, "None over several hosts")

    def forward(self, layer: ServedLayer, x: Tensor, routing: Routing) -> Results:
        experts, rounds = layer.config.num_experts, layer.rounds
        row_bytes = x.shape[1] * x.element_size()
        weights = layer.expert_weights()
        plan = plan_hierarchical(
            *(routing.ids, experts, rounds, row_bytes),
            name=layer.name,
            experts=ExpertShape.of(*weights),
            learns=torch.is_grad_enabled() or layer.training,
        )
        started = start_hierarchical_moe(
            *(x, routing.probs, plan, *weights, layer.activation, rounds),
            name=layer.name,
            layout=layer.layout,
            recompute=_recompute(layer),
        )
        shared = layer.shared_expert(x)
        return started.finish(), shared


class _Rounds(LayerBackend):
    name = "rounds"

    def __init__(self, layer: ServedLayer) -> None:
        if (factor := layer.config.capacity_factor) is not None:
            raise ConfigError.of("capacity_factor", factor, "None over rounds")
        if (recipe := layer.config.fp8_recipe) is not None:
            raise ConfigError.of("fp8_recipe", recipe, "None over rounds")

    def forward(self, layer: ServedLayer, x: Tensor, routing: Routing) -> Results:
        c = layer.config
        counts = c.num_experts, layer.rounds, f"{layer.name} row counts"
        plan = ExactPlan.from_topk(routing.ids, *counts)
        rows, probs = permute(x, plan), permute_probs(routing.probs, plan)
        started = start_overlapped_moe(
            *(rows, probs, plan, layer.weight1, layer.weight2, layer.activation, layer.rounds),
            dx_chunks=current_config().dx_chunks if c.dx_chunks is None else c.dx_chunks,
            name=layer.name,
            layout=layer.layout,
            recompute=_recompute(layer),
        )
        shared = layer.shared_expert(x)
        return unpermute(started.finish(), plan), shared


BACKENDS: dict[str, type[LayerBackend]] = {
    backend.name: backend for backend in (_Local, _Nvlink, _Hierarchical, _Rounds)
}


def _recompute(layer: ServedLayer) -> tuple[str, ...]:
    found = layer.config.recompute
    return moe_recompute(current_config()) if found is None else tuple(found)


def _settings(layer: ServedLayer) -> dict[str, Any]:
    """Of a call over symmetric memory or on one rank."""
    config = layer.config
    gradients = config.fp8_weight_grads or current_config().moe_fp8_weight_grads
    return {
        "recompute": _recompute(layer),
        "fp8": config.fp8_recipe is not None,
        "fp8_weight_grads": gradients == "fp8",
        "name": layer.name,
    }


def choose_backend(layer: ServedLayer, wanted: str) -> type[LayerBackend]:
    """What moves the tokens of a layer. Collective over its group the first time.

    Args:
        wanted: as for moe.choose.choose_transport.

    Raises:
        ConfigError: an unknown name, or one that is unavailable; "experts" and "megatron" are for
            Megatron's layers.
    """
    weight, activation = layer.weight1, layer.activation
    # A callable may bear the name of a kernel that computes something else.
    name = activation.name if activation.built_in else f"{activation.name}, the caller's own"
    case = ExchangeCase(
        group=layer.rounds.group,
        domains=lambda: layer.rounds.domains,
        on_gpu=weight.device.type == "cuda",
        nvlink_reason=nvlink_layer_reason(
            layer.config.hidden_size, name, weight.dtype, weight.device
        ),
    )
    transport, reason = choose_transport(wanted, case)
    assert transport is not None
    if transport == "rounds" and case.on_gpu and reason is not None:
        _warn_of_rounds(reason)
    return BACKENDS[transport]


@functools.cache
def _warn_of_rounds(reason: str) -> None:
    _LOGGER.warning(
        "moe_backend=auto takes round-robin P2P exchanges: no symmetric memory (%s)", reason
    )
