"""Which path an MoE layer takes.

`part_reasons` says which parts of a layer are megatron_fluid's, by the tables of limits.py, by the
modules of a built layer and by the backend: exchange, experts, and both fused into one. In the
layer's first forward `MoEDecisions` agrees on them with the expert-parallel group
(overlap_decision.py), with the backend that follows (moe/choose.py).

FluidConfig is everywhere the settings that the layer keeps, not those in force.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.groups import wait_timeout_s
from megatron_fluid.comm.p2p_rounds import detect_hosts
from megatron_fluid.config import FluidConfig, names_exchange
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe import choose
from megatron_fluid.moe.backends import BACKENDS
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.engine.module_hooks import is_foreign
from megatron_fluid.patches.limits import Limit, first_reason
from megatron_fluid.patches.moe.graphed_router import Held, held_by_graphs
from megatron_fluid.patches.moe.limits import (
    DISPATCHER_STEPS,
    EXCHANGE_LIMITS,
    EXPERT_LIMITS,
    FUSION_LIMITS,
    LAYER_LIMITS,
    PHASES,
    activation_name,
    batch_invariant,
)
from megatron_fluid.patches.moe.own_experts import FEATURE, ExpertParameters
from megatron_fluid.patches.overlap_decision import (
    Decision,
    Finding,
    OverlapDecisions,
    Reason,
    first_of_ranks,
)
from megatron_fluid.patches.versions import unknown_setting
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "MakePath",
    "MoEDecisions",
    "PartReasons",
    "fp8_reason",
    "nvlink_unsupported_reason",
    "part_reasons",
]


@dataclass(frozen=True, kw_only=True)
class PartReasons:
    """Why parts of a layer are not megatron_fluid's, None where they are: a sentence that starts
    with the setting (`setting=value: reason`) or names the module.

    Attributes:
        exchange: why the exchange is Megatron's.
        experts: why the experts are Megatron's.
        fusion: why exchange and experts, where neither is Megatron's, run phase by phase.
    """

    exchange: str | None = None
    experts: str | None = None
    fusion: str | None = None

    @property
    def by_phase(self) -> str | None:
        """Why a layer with this package's exchange runs phase by phase, or None."""
        return self.experts or self.fusion

    @property
    def fused(self) -> str | None:
        """Why the layer is not fused, or None where it is."""
        return self.exchange or self.by_phase


def part_reasons(
    config: TransformerConfig,
    fluid: FluidConfig,
    layer: MoELayer | None = None,
    backend: str | None = None,
    exchange: str | None = None,
) -> PartReasons:
    """Why the parts of a layer are not megatron_fluid's.

    Args:
        config: the model's configuration.
        fluid: the settings that the layer keeps.
        layer: a built layer, whose modules are checked too; None checks the settings alone.
        backend: who moves the tokens; None: any.
        exchange: why the exchange is Megatron's, if that is known already.
    """

    # SequentialMLP may have its own copy of the config, made before a change.
    copied = config if layer is None else getattr(layer.experts, "config", config)

    def limit(*tables: tuple[Limit[Any], ...]) -> str | None:
        limits = [*itertools.chain(*tables)]
        reason = first_reason(limits, config, fluid, backend)
        return reason or first_reason(limits, copied, fluid, backend)

    unknown = unknown_setting(config)
    exchange = exchange or limit(LAYER_LIMITS, EXCHANGE_LIMITS) or unknown
    experts = limit(LAYER_LIMITS, EXPERT_LIMITS) or fp8_reason(config, fluid)
    experts = experts or fp8_reason(copied, fluid) or unknown
    fusion = limit(FUSION_LIMITS)
    if layer is not None:
        from megatron_fluid.patches.moe.expert_modules import expert_modules_reason

        exchange = exchange or _dispatcher_reason(layer, fluid)
        experts = experts or _overridden(layer, "routed_experts_compute")
        experts = experts or expert_modules_reason(layer.experts)
        fusion = fusion or _overridden(layer, *PHASES)
    phases, graphed = experts or fusion, _graphed_phases_reason(config)
    if exchange is None and phases and graphed:
        exchange = f"{phases}; and {graphed}"
    if layer is not None and experts is None and (exchange or fusion):
        experts = _separate_experts_reason(layer)
    return PartReasons(exchange=exchange, experts=experts, fusion=fusion)


def _forward_reason(layer: MoELayer) -> str | None:
    """Why a layer is left alone as a whole, or None: nothing is sent, or its class has a forward of
    its own."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if layer.ep_group.size() > 1 and dist.get_backend(real_group(layer.ep_group)) == "fake":
        return "auto: the ranks of a fake process group send nothing"
    found = getattr(type(layer), "forward", MoELayer.forward)
    if found is MoELayer.forward or found.__module__.startswith("megatron_fluid."):
        return None
    return f"{type(layer).__name__}.forward is its own, and megatron_fluid leaves it alone"


def _separate_experts_reason(layer: MoELayer) -> str | None:
    """Why megatron_fluid's experts cannot stand alone in the phases of this layer; or None."""
    needs_patches = not getattr(layer, "needs_no_patch", False)
    if needs_patches and not patches.is_applied("moe-experts"):
        left_out = patches.off_reason("moe-experts")
        return f"the patch moe-experts is {f'left out: {left_out}' if left_out else 'not applied'}"
    delays = needs_patches and layer.config.delay_wgrad_compute
    if delays and not patches.is_applied("moe-delayed-gradients"):
        return "delay_wgrad_compute: the patch moe-delayed-gradients is not applied"
    return _graphed_phases_reason(layer.config)


def fp8_reason(config: TransformerConfig, fluid: FluidConfig) -> str | None:
    """Why the fp8 experts that a configuration asks for stay Megatron's, or None."""
    if not config.fp8:
        return None
    if fluid.moe_fp8 == "megatron":
        return f"fp8={config.fp8!r}: --fluid-moe-fp8 is megatron"
    from megatron_fluid.kernels.fp8_grouped_gemm.launch import fp8_unsupported_reason

    if os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "0":
        return "NVTE_FP8_BLOCK_SCALING_FP32_SCALES: megatron_fluid's scales are powers of two"
    widths = config.hidden_size, int(config.moe_ffn_hidden_size or config.ffn_hidden_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
    plain = plain and config.moe_mlp_glu_interleave_size is None
    kind = str(activation_name(config)) if plain else "its own clamp or offset"
    reason = fp8_unsupported_reason(*widths, kind, config.params_dtype, device)
    if reason is None and config.add_bias_linear:
        reason = "fp8 experts have no biases"
    return None if reason is None else f"fp8={config.fp8!r}: {reason}"


def _graphed_phases_reason(config: TransformerConfig) -> str | None:
    """Why a layer with a part of megatron_fluid's cannot run phase by phase in a model with CUDA
    graphs that may hold a fused layer, or its router; or None."""
    held = held_by_graphs(config)
    if held.experts:
        return "cuda_graph_impl: row counts are read on the host between dispatch and experts"
    if held is not Held.ROUTER:
        return None
    names = {module.name for module in config.cuda_graph_modules} & {"moe_router", "moe_preprocess"}
    return (
        f"cuda_graph_impl: a graph holds {' and '.join(sorted(names))}, which a fused layer alone "
        "can do without"
    )


def nvlink_unsupported_reason(config: TransformerConfig) -> str | None:
    """Why symmetric memory cannot serve the exchange of a configuration, or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    width = config.moe_latent_size or config.hidden_size
    return choose.nvlink_layer_reason(width, None, config.params_dtype, torch.device("cuda"))


def _dispatcher_reason(layer: MoELayer, fluid: FluidConfig) -> str | None:
    """Why this layer's token dispatcher cannot be replaced, or None."""
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
        MoEFlexTokenDispatcher,
    )

    known: tuple[type, ...] = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
    if names_exchange(fluid):
        known = (*known, MoEFlexTokenDispatcher)
    dispatcher: Any = getattr(layer.token_dispatcher, "stock", layer.token_dispatcher)
    kind = type(dispatcher)
    if kind not in known:
        return f"the token dispatcher is a {kind.__name__}, not alltoall or allgather"
    for step in DISPATCHER_STEPS:
        if step in vars(dispatcher) or is_foreign(getattr(kind, step)):
            return f"{kind.__name__}.{step} was replaced"
    if dispatcher.tp_size > 1:
        return f"experts are split over {dispatcher.tp_size} tensor-parallel ranks"
    return None


def _overridden(layer: MoELayer, *phases: str) -> str | None:
    """Say that one of these phases of the layer is from elsewhere, or None."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    kind = type(layer)
    for phase in phases:
        method = getattr(kind, phase)
        own = method.__module__.startswith("megatron_fluid.")
        known = own or (method is getattr(MoELayer, phase) and not is_foreign(method))
        if phase in layer.__dict__ or not known:
            text = f"{kind.__name__}.{phase} is overridden"
            return f"{text}, and the overlapped path does not call it"
    return None


class _Found(NamedTuple):
    """What one rank knows of its layer beyond whether the exchange can be replaced.

    Attributes:
        parts: why parts of it stay Megatron's, by backend.
        descends: whether it keeps its experts in descending order.
    """

    parts: dict[str, PartReasons]
    descends: bool


# Makes what serves a layer, or a part of it: of the layer, its settings, the backend that moves its
# tokens (None: Megatron), the reasons, and whether each rank stores its experts in descending
# order [W].
MakePath = Callable[["MoELayer", FluidConfig, str | None, PartReasons, Sequence[bool]], Any]


class MoEDecisions(OverlapDecisions[Any]):
    """The negotiation of MoE layers, over their expert-parallel group: who runs the exchange, and
    who the experts.

    Args:
        make_path: see MakePath.
    """

    feature, patch, setting = FEATURE, "moe-layer", "moe_backend"
    compared = (
        *(*OverlapDecisions.compared, "num_moe_experts", "moe_ffn_hidden_size"),
        *("moe_router_topk", "gated_linear_unit"),
    )

    def __init__(self, make_path: MakePath) -> None:
        super().__init__()
        self._make_path = make_path

    def is_layer(self, module: object) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def group(self, layer: MoELayer) -> dist.ProcessGroup:
        return real_group(layer.ep_group)

    def reason(self, config: FluidConfig, layer: MoELayer) -> str | None:
        if (reason := _forward_reason(layer)) is not None:
            return reason
        backend, model = config.moe_backend, layer.config
        if backend in ("experts", "megatron"):
            return f"moe_backend={backend!r}"
        if backend == "local" and layer.ep_group.size() > 1:
            return choose.local_unsupported_reason(self.group(layer))
        asked = None if backend == "auto" else backend
        reason = part_reasons(model, config, layer, asked).exchange
        if reason is None and backend == "nvlink":
            return nvlink_unsupported_reason(model)
        return reason

    def backend_of(self, config: FluidConfig, layer: MoELayer) -> str:
        if config.moe_backend != "auto":
            return config.moe_backend
        if layer.ep_group.size() == 1:
            return "local"
        if cpu_mode_active():
            here = int(os.environ.get("LOCAL_WORLD_SIZE", layer.ep_group.size()))
            one_host = layer.ep_group.size() <= here or batch_invariant(layer.config, config)
            return "rounds" if one_host else "hierarchical where ranks are on several hosts"
        return "nvlink where all GPUs of the group reach each other's memory"

    def describe(self, layer: MoELayer) -> str:
        parts, ranks = self.parts_of(layer), layer.ep_group.size()
        if parts.exchange is not None:
            kept = parts.experts is not None
            return parts.exchange if kept else f"{parts.exchange}; the experts are megatron_fluid's"
        text = f"{self.backend(layer)}, {ranks} expert-parallel rank{'s' if ranks > 1 else ''}"
        if parts.experts is not None:
            return f"{text}; Megatron's experts: {parts.experts}"
        return text if parts.fusion is None else f"{text}; phase by phase: {parts.fusion}"

    def backend(self, layer: MoELayer) -> str | None:
        """Who moves the tokens of a layer, or before its first forward is about to; None for
        Megatron."""
        found = self.get(layer)
        return None if found is None or found.reason else found.backend

    def parts_of(self, layer: MoELayer) -> PartReasons:
        """Why parts of a layer are Megatron's: as the ranks have agreed, or before its first
        forward as far as this rank knows."""
        found = self.get(layer)
        if found is None:
            unknown = "it was built without the patches"
            return PartReasons(exchange=unknown, experts=unknown)
        if found.details is not None:
            agreed: PartReasons = found.details
            return agreed
        whole = found.config.moe_backend == "megatron" or _forward_reason(layer) is not None
        if whole or self.left_out(layer) is not None:
            return PartReasons(exchange=found.reason, experts=found.reason)
        backend = None if found.backend is None else found.backend.split()[0]
        return part_reasons(layer.config, found.config, layer, backend, found.reason)

    def rest(self, decision: Decision[Any], layer: MoELayer) -> Any:
        decision.details = self.parts_of(layer)
        return self._make_path(layer, decision.config, None, decision.details, ())

    def find(self, config: FluidConfig, layer: MoELayer) -> Finding:
        if (reason := self.reason(config, layer)) is not None:
            return Finding(reason)
        parts = {name: part_reasons(layer.config, config, layer, name) for name in BACKENDS}
        descends = False
        if any(over.experts is None for over in parts.values()):
            descends = ExpertParameters(layer.experts).arrange()
        return Finding(None, _Found(parts, descends))

    def decide(
        self, config: FluidConfig, layer: MoELayer, found: Sequence[Finding]
    ) -> Any | Reason:
        ranks: list[_Found] = [finding.details for finding in found]
        group, on_gpu = self.group(layer), not cpu_mode_active()

        def parts_over(backend: str) -> PartReasons:
            parts = [rank.parts[backend] for rank in ranks]
            return PartReasons(
                exchange=first_of_ranks([part.exchange for part in parts]),
                experts=first_of_ranks([part.experts for part in parts]),
                fusion=first_of_ranks([part.fusion for part in parts]),
            )

        choice = choose.choose_transport(
            config.moe_backend,
            choose.ExchangeCase(
                group=group,
                domains=lambda: detect_hosts(group, wait_timeout_s(group, config.timeout_s))[0],
                on_gpu=on_gpu,
                nvlink_reason=nvlink_unsupported_reason(layer.config) if on_gpu else None,
                by_phase=lambda backend: parts_over(backend).by_phase,
                batch_invariant=batch_invariant(layer.config, config),
                megatron=True,
            ),
        )
        if choice.transport is None:
            return Reason(choice.reason)
        parts = parts_over(choice.transport)
        if parts.exchange is not None:
            return Reason(parts.exchange)
        if config.batch_invariant and parts.experts is not None:
            return Reason(f"Megatron computes the experts: {parts.experts}")
        decision = self._decisions[layer]
        decision.backend, decision.details = choice.transport, parts
        descends = [rank.descends for rank in ranks]
        return self._make_path(layer, config, choice.transport, parts, descends)

    def _refuse_if_named(self, config: FluidConfig, layer: MoELayer, reason: str) -> None:
        super()._refuse_if_named(config, layer, reason)
        if config.batch_invariant:
            why = f"False, because Megatron's own path is not batch-invariant, and {reason}"
            raise ConfigError.of("batch_invariant", True, why)

    def allowed(self, config: FluidConfig, layer: MoELayer, reason: str) -> str | None:
        return f"auto or megatron, because {reason}" if names_exchange(config) else None
