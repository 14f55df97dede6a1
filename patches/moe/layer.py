"""Megatron's MoELayer with its exchange overlapped: the replacement of `MoELayer.forward`.

The seam is the whole forward, not its phases. Megatron keeps what decides numbers: the router
(scores, auxiliary losses, expert bias, capacity, group limits, padding mask), the shared experts
and every parameter. From the router's `probs` [T, E] and `routing_map` [T, E] on, the routing plan,
dispatch, experts and combine are ours. The phases that other code calls one by one (the 1F1B expert
overlap, CUDA graphs, `intermediate_tensors`) stay Megatron's own.

Recompute of "moe" keeps the plan of the first forward: the router runs once, outside the
checkpoint, and what is recomputed is the dispatch, the experts and the shared experts. Recompute of
whole layers is Megatron's, around this function.

What is not honoured (limits.py) keeps Megatron's own path: overlap_decision.py says how the ranks
agree on it.

Shapes: S sequence, B batch, T = S * B tokens of this rank, E experts, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig, current_config
from megatron_fluid.moe.local.transport import local_unsupported_reason
from megatron_fluid.patches.cpu.table import cpu_mode_active
from megatron_fluid.patches.moe.limits import unsupported_reason
from megatron_fluid.patches.overlap_decision import (
    Decision,
    Finding,
    OverlapDecisions,
    first_of_ranks,
)
from megatron_fluid.topology import detect_domains

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_fluid.patches.moe.overlapped import OverlappedLayer

__all__ = ["DECISIONS", "backend_of", "expert_order", "forward", "init", "moe_forward"]


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MoELayer.__init__`: announce for the start-up table what the built layer will do.

    The new __init__ raises ConfigError where a backend is asked for by name and the configuration
    rules it out.
    """

    @functools.wraps(original)
    def fluid_init(self: MoELayer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        DECISIONS.announce_built(self)

    return fluid_init


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.forward` by the overlapped one, which falls back on `original`."""

    @functools.wraps(original)
    def fluid_forward(
        self: MoELayer,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        return moe_forward(self, original, hidden_states, intermediate_tensors, padding_mask)

    return fluid_forward


def moe_forward(
    layer: MoELayer,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    intermediate_tensors: Any = None,
    padding_mask: torch.Tensor | None = None,
) -> Any:
    """The overlapped forward of a layer, or Megatron's own where that is to be kept.

    Args:
        layer: the layer.
        original: Megatron's `MoELayer.forward`.
        hidden_states: [S, B, H].
        intermediate_tensors: set by Megatron when it runs one phase alone, which is left to it.
        padding_mask: [B, S] bool as Megatron has it, or None.

    Returns:
        (output [S, B, H], None), as Megatron's.

    Raises:
        ConfigError: a backend asked for by name cannot be had; or a hook was put on an expert after
            the first forward.
    """
    decision = DECISIONS.get(layer)
    if decision is None or not decision.settled:
        decision = DECISIONS.settle(layer)
    path = decision.path
    if (
        path is None
        or intermediate_tensors is not None
        or path.inference_active()
        or path.hooks.logged()
        # Megatron wants sequence parallelism here, and says so.
        or (
            layer.training and layer.attn_tp_group.size() > 1 and not layer.config.sequence_parallel
        )
    ):
        return original(
            layer,
            hidden_states,
            intermediate_tensors=intermediate_tensors,
            padding_mask=padding_mask,
        )
    return path.forward(layer, hidden_states, padding_mask)


def backend_of(layer: MoELayer) -> tuple[str, str | None]:
    """What a layer does, as ("rounds" or "nvlink", None) or ("megatron", why); before its first
    forward, what it is about to do."""
    decision = DECISIONS.get(layer)
    if decision is None:
        config = current_config()
        reason = DECISIONS.setting_reason(config, layer) or unsupported_reason(layer.config, layer)
        decision = Decision(config, DECISIONS.backend_of(config, layer), reason)
    return (str(decision.backend), None) if not decision.reason else ("megatron", decision.reason)


def expert_order(layer: MoELayer) -> list[int] | None:
    """The order in which an overlapped layer computes its local experts, None before its first
    overlapped forward."""
    decision = DECISIONS.get(layer)
    return None if decision is None or decision.path is None else list(decision.path.weights.order)


class _MoEDecisions(OverlapDecisions["OverlappedLayer"]):
    """The negotiation of MoE layers, over their expert-parallel group."""

    feature, patch, setting = "overlapped MoE layer", "moe-layer", "moe_backend"

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def group(self, layer: MoELayer) -> dist.ProcessGroup:
        return layer.ep_group

    def counts(self, decision: Decision[OverlappedLayer]) -> bool:
        return patches.off_reason(self.patch) is None

    def setting_reason(self, config: FluidConfig, layer: MoELayer) -> str | None:
        if config.moe_backend == "megatron":
            return "moe_backend='megatron'"
        if (reason := _unsupported(config, layer.config)) is not None:
            return reason
        if config.moe_backend == "local":
            return local_unsupported_reason(layer.ep_group) or _probs_on_input(layer.config)
        if config.moe_backend == "auto" and layer.ep_group.size() == 1:
            return "expert_model_parallel_size=1: there is no exchange to overlap"
        return None

    def backend_of(self, config: FluidConfig, layer: MoELayer) -> str:
        if config.moe_backend != "auto":
            return config.moe_backend
        if cpu_mode_active():
            return "rounds"
        return "nvlink where all GPUs of the group reach each other's memory"

    def describe(self, backend: str, layer: MoELayer) -> str:
        return f"{backend}, {layer.ep_group.size()} expert-parallel ranks"

    def find(self, config: FluidConfig, layer: MoELayer) -> Finding:
        """Its details: why `auto` cannot take symmetric memory, or None; and whether this rank
        keeps its experts in descending order."""
        reason = _unsupported(config, layer.config, layer)
        if reason is not None:
            return Finding(reason)
        from megatron_fluid.patches.moe.expert_parameters import ExpertParameters

        automatic = config.moe_backend == "auto" and not cpu_mode_active()
        no_nvlink = _nvlink_reason(layer.config) if automatic else None
        return Finding(None, (no_nvlink, ExpertParameters(layer.experts).arrange()))

    def choose(
        self, decision: Decision[OverlappedLayer], layer: MoELayer, found: Sequence[Finding]
    ) -> tuple[OverlappedLayer | None, str | None]:
        no_nvlink = first_of_ranks([finding.details[0] for finding in found])
        path, reason = choose_path(layer, decision.config, no_nvlink)
        if path is not None:
            path.start([finding.details[1] for finding in found])
            decision.backend = path.backend
        return path, reason

    def allowed(self, config: FluidConfig, layer: MoELayer, reason: str) -> str | None:
        if config.moe_backend in ("auto", "megatron"):
            return None
        # What rules out symmetric memory alone (settings, alike on all ranks) leaves the rounds.
        rounds = config.moe_backend == "nvlink" and reason == _nvlink_reason(layer.config)
        return f"{'auto, rounds or megatron' if rounds else 'auto or megatron'}, because {reason}"


DECISIONS = _MoEDecisions()


def choose_path(
    layer: MoELayer, config: FluidConfig, no_nvlink: str | None
) -> tuple[OverlappedLayer | None, str | None]:
    """The path of a supported layer; or None, and why Megatron's own is kept. Collective over the
    layer's group.

    `auto` takes symmetric memory where the group's GPUs reach each other's, else the rounds on
    CPUs and between NVLink domains. Inside one domain NCCL's kernels and the GEMMs want the same
    SMs, and rounds are slower than one all-to-all.

    Args:
        layer: the layer.
        config: its settings.
        no_nvlink: why `auto` cannot take symmetric memory for the layers of some rank, or None.
    """
    from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
    from megatron_fluid.patches.moe.rounds import RoundsLayer

    if config.moe_backend == "rounds" or (config.moe_backend == "auto" and cpu_mode_active()):
        return RoundsLayer(layer, config), None
    if config.moe_backend == "local":
        from megatron_fluid.patches.moe.local import LocalLayer

        return LocalLayer(layer, config), None
    from megatron_fluid.patches.moe.nvlink import NvlinkLayer

    if config.moe_backend == "nvlink":
        return NvlinkLayer(layer, config), None
    no_nvlink = no_nvlink or symmetric_unsupported_reason(layer.ep_group)
    if no_nvlink is None:
        return NvlinkLayer(layer, config), None
    limit_s = wait_timeout_s(layer.ep_group, config.timeout_s)
    if len(set(detect_domains(layer.ep_group, limit_s))) > 1:
        return RoundsLayer(layer, config), None
    why = f"no symmetric memory ({no_nvlink}), and peer rounds do not pay inside one NVLink domain"
    return None, why


def _unsupported(
    config: FluidConfig, model: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why the path that is asked for cannot serve a model, or a layer of it."""
    reason = unsupported_reason(model, layer)
    if reason is None and config.moe_backend == "nvlink":
        return _nvlink_reason(model)
    return reason


def _probs_on_input(model: TransformerConfig) -> str | None:
    if model.moe_apply_probs_on_input:
        return "moe_apply_probs_on_input: backend local applies probabilities before fc2"
    return None


def _nvlink_reason(model: TransformerConfig) -> str | None:
    from megatron_fluid.patches.moe.nvlink import configuration_reason

    return configuration_reason(model)
