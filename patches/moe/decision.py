"""Which path an MoE layer takes: the negotiation over its expert-parallel group, in the layer's
first forward (overlap_decision.py), and the backend that follows from it.

Exchange and experts are decided about apart: both ours, fused or phase by phase, our exchange under
Megatron's experts, our experts behind Megatron's exchange, or the whole layer Megatron's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.hosts import detect_domains
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig, current_config, names_exchange
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.local.transport import local_unsupported_reason
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.moe.fp8 import follow_microbatches
from megatron_fluid.patches.moe.limits import (
    backend_experts_reason,
    backend_fusion_reason,
    bounds_rows,
    exchange_unsupported_reason,
    experts_unsupported_reason,
    fusion_unsupported_reason,
    graphed_reason,
    graphs_hold_layers,
    nvlink_unsupported_reason,
    separate_experts_reason,
)
from megatron_fluid.patches.moe.own_experts import SeparateExperts
from megatron_fluid.patches.overlap_decision import Decision, OverlapDecisions, first_of_ranks
from megatron_fluid.patches.rank_findings import Finding

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["MoEDecisions", "MoEPath", "choose_backend"]


class MoEPath(Protocol):
    """What serves a layer from call to call."""

    def start(self, descends: Sequence[bool]) -> None:
        """Do what the first call needs of all ranks. descends: whether a rank keeps its experts in
        descending order. [W]"""


@dataclass(frozen=True)
class _Found:
    """What one rank knows of its layer beyond whether the exchange may be ours.

    Attributes:
        no_nvlink: why `auto` cannot take symmetric memory, or None.
        experts: why the experts cannot be ours, or None.
        fusion: why exchange and experts that are ours have to run phase by phase, or None.
        separate: why our experts cannot stand alone in phases, or None.
        descends: whether it keeps its experts in descending order.
    """

    no_nvlink: str | None
    experts: str | None
    fusion: str | None
    separate: str | None
    descends: bool


class _Parts(NamedTuple):
    """Why the experts of a layer with our exchange are Megatron's, or None where they are ours; and
    why the layer runs phase by phase, or None where it is fused."""

    experts: str | None
    fusion: str | None


class MoEDecisions[Path: MoEPath](OverlapDecisions[Path]):
    """The negotiation of MoE layers, over their expert-parallel group: whose is the exchange, and
    whose are the experts.

    Args:
        whole: what serves a layer whose exchange and experts are ours, by backend.
        phases: makes what serves a layer with our exchange phase by phase, of the layer, the
            settings, the backend, and whether the experts are ours.
        experts: makes what serves a layer whose experts alone are ours.
        serve_phases: does to a layer whose exchange may be ours what has to be done before its
            first call.
    """

    feature, patch, setting = "overlapped MoE layer", "moe-layer", "moe_backend"
    compared = (
        *(*OverlapDecisions.compared, "num_moe_experts", "moe_ffn_hidden_size"),
        *("moe_router_topk", "gated_linear_unit"),
    )

    def __init__(
        self,
        whole: Mapping[str, Callable[[MoELayer, FluidConfig], Path]],
        phases: Callable[[MoELayer, FluidConfig, str, bool], Path],
        experts: Callable[[MoELayer, FluidConfig], Path],
        serve_phases: Callable[[MoELayer], None],
    ) -> None:
        super().__init__()
        self._serve_phases = serve_phases
        self._whole, self._phases, self._experts = whole, phases, experts
        # Of layers that the ranks have agreed on.
        self._parts: weakref.WeakKeyDictionary[Any, _Parts] = weakref.WeakKeyDictionary()

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def group(self, layer: MoELayer) -> dist.ProcessGroup:
        return layer.ep_group

    def announce(self, layer: MoELayer, late: bool = False) -> Decision[Path]:
        decision = super().announce(layer, late)
        if decision.reason is None and not decision.settled:
            self._serve_phases(layer)
        if not late:
            follow_microbatches(layer)
        return decision

    def counts(self, decision: Decision[Path]) -> bool:
        return patches.off_reason(self.patch) is None

    def setting_reason(self, config: FluidConfig, layer: MoELayer) -> str | None:
        backend = config.moe_backend
        if backend in ("experts", "megatron"):
            return f"moe_backend={backend!r}"
        if (reason := _unsupported(config, layer.config)) is not None:
            return reason
        if backend == "local" and layer.ep_group.size() > 1:
            return local_unsupported_reason(layer.ep_group)
        impl = layer.config.cuda_graph_impl
        alone = layer.ep_group.size() == 1
        if graphs_hold_layers(layer.config) and backend != "local":
            if alone and impl != "full_iteration" and backend in ("auto", "nvlink"):
                return f"cuda_graph_impl={impl!r}: graphs of layers hold ours by moe_backend=local"
            # Graphs of layers of several ranks are limits.py's to refuse.
            served = backend in ("auto", "nvlink") and bounds_rows(layer.config)
            if not served and not (alone and backend == "auto"):
                return _reads_counts(layer.config, backend)
        return None

    def backend_of(self, config: FluidConfig, layer: MoELayer) -> str:
        if config.moe_backend != "auto":
            return config.moe_backend
        if layer.ep_group.size() == 1:
            return "local"
        if cpu_mode_active():
            here = int(os.environ.get("LOCAL_WORLD_SIZE", layer.ep_group.size()))
            one_host = layer.ep_group.size() <= here
            return "rounds" if one_host else "hierarchical where ranks are on several hosts"
        return "nvlink where all GPUs of the group reach each other's memory"

    def describe(self, backend: str, layer: MoELayer) -> str:
        return _described(backend, layer, _parts_by_settings(layer, backend.split()[0]))

    def describe_kept(self, layer: MoELayer, reason: str) -> str:
        ours = self._without_exchange(self._config_of(layer), layer) is None
        return f"{reason}; the experts are ours" if ours else reason

    def rest(self, decision: Decision[Path], layer: MoELayer) -> Path | None:
        reason = self._without_exchange(decision.config, layer)
        self._parts[layer] = _Parts(reason, None)
        return self._experts(layer, decision.config) if reason is None else None

    def _without_exchange(self, config: FluidConfig, layer: MoELayer) -> str | None:
        """Why the experts of a layer whose exchange is Megatron's are not ours; or None. It
        concerns this rank alone."""
        if config.moe_backend == "megatron":
            return "moe_backend='megatron'"
        if (left_out := self._left_out(layer)) is not None:
            return left_out
        reason = experts_unsupported_reason(layer.config, layer)
        return reason or separate_experts_reason(layer)

    def _config_of(self, layer: MoELayer) -> FluidConfig:
        decision = self.get(layer)
        return current_config() if decision is None else decision.config

    def separate_experts(self, layer: MoELayer, path: Path | None) -> SeparateExperts | None:
        """Our experts for this call of a layer that runs phase by phase; None for Megatron's.

        Raises:
            ConfigError: they were changed after the first forward.
        """
        found = path if isinstance(path, SeparateExperts) else getattr(path, "experts", None)
        if not isinstance(found, SeparateExperts):
            return None
        if found.inference_active() or found.hooks.logged():
            return None
        if (changed := found.changed(layer)) is not None:
            self.refuse_change(layer, changed)
        return found

    def find(self, config: FluidConfig, layer: MoELayer) -> Finding:
        if (reason := _unsupported(config, layer.config, layer)) is not None:
            return Finding(reason)
        experts = experts_unsupported_reason(layer.config, layer)
        automatic = config.moe_backend == "auto" and self.group(layer).size() > 1
        automatic = automatic and not cpu_mode_active()
        no_nvlink = nvlink_unsupported_reason(layer.config) if automatic else None
        fusion = fusion_unsupported_reason(layer.config, layer)
        separate, descends = separate_experts_reason(layer), False
        if experts is None:
            from megatron_fluid.patches.moe.expert_parameters import ExpertParameters

            descends = ExpertParameters(layer.experts).arrange()
        return Finding(None, _Found(no_nvlink, experts, fusion, separate, descends))

    def choose(
        self, decision: Decision[Path], layer: MoELayer, found: Sequence[Finding]
    ) -> tuple[Path | None, str | None]:
        ranks: list[_Found] = [finding.details for finding in found]
        no_nvlink = first_of_ranks([rank.no_nvlink for rank in ranks])
        experts, fusion, separate = (
            _one_reason([getattr(rank, part) for rank in ranks])
            for part in ("experts", "fusion", "separate")
        )
        group, config = layer.ep_group, decision.config
        backend, reason = choose_backend(group, config, no_nvlink, experts or fusion)
        if backend is None:
            return None, reason
        if backend not in ("nvlink", "local") and graphs_hold_layers(layer.config):
            return None, _reads_counts(layer.config, backend)
        experts = experts or backend_experts_reason(layer.config, backend)
        fusion = fusion or backend_fusion_reason(layer.config, backend)
        if backend == "hierarchical" and (experts or fusion):
            if config.moe_backend == "hierarchical":
                return None, f"{experts or fusion}; and layers between two levels are fused"
            # Of layers that are fused nowhere, choose_backend has said so.
            backend, fusion = "rounds", backend_fusion_reason(layer.config, "rounds")
            experts = backend_experts_reason(layer.config, backend)
        if experts is None and fusion is not None:
            experts = separate
        parts = _Parts(experts, fusion)
        fused = experts is None and fusion is None
        if not fused and (reason := graphed_reason(layer.config)) is not None:
            return None, f"{experts or fusion}; and {reason}"
        if fused:
            path = self._whole[backend](layer, config)
        else:
            path = self._phases(layer, config, backend, experts is None)
        path.start([rank.descends for rank in ranks])
        text = _described(backend, layer, parts)
        if text != _described(backend, layer, _parts_by_settings(layer, backend)):
            # What the start-up table does not say.
            self.report.note(layer, True, text)
            ranks_of = dist.get_process_group_ranks(group)
            self.report.say(True, text, " from this call on", ranks_of)
        decision.backend, self._parts[layer] = backend, parts
        return path, None

    def exchange_of(self, layer: MoELayer) -> tuple[str, str | None]:
        """Whose exchange a layer has: its backend and None, or ("megatron", why); before its first
        forward, what it is about to have."""
        decision = self.get(layer)
        if decision is None:
            config = current_config()
            reason = self.setting_reason(config, layer)
            reason = reason or exchange_unsupported_reason(layer.config, layer)
            decision = Decision(config, self.backend_of(config, layer), reason)
        if decision.reason:
            return "megatron", decision.reason
        return str(decision.backend), None

    def experts_reason_of(self, layer: MoELayer) -> str | None:
        """Why a layer has Megatron's experts; None where they are ours. Before its first forward,
        as far as this rank knows."""
        decision = self.get(layer)
        if decision is not None and decision.settled:
            found = self._parts.get(layer)
            return decision.reason if found is None else found.experts
        if self.exchange_of(layer)[1] is not None:
            return self._without_exchange(self._config_of(layer), layer)
        return experts_unsupported_reason(layer.config, layer)

    def fusion_reason_of(self, layer: MoELayer) -> str | None:
        """Why a layer whose exchange and experts are ours runs phase by phase, once the ranks have
        agreed; or None."""
        found = self._parts.get(layer)
        return None if found is None or found.experts is not None else found.fusion

    def allowed(self, config: FluidConfig, layer: MoELayer, reason: str) -> str | None:
        if not names_exchange(config):
            return None
        # What rules out symmetric memory alone (settings, alike on all ranks) leaves the rounds.
        nvlink = config.moe_backend == "nvlink"
        rounds = nvlink and reason == nvlink_unsupported_reason(layer.config)
        return f"{'auto, rounds or megatron' if rounds else 'auto or megatron'}, because {reason}"


def _parts_by_settings(layer: MoELayer, backend: str) -> _Parts:
    """What settings, alike on all ranks, say of the parts of a layer behind our exchange."""
    experts = experts_unsupported_reason(layer.config)
    experts = experts or backend_experts_reason(layer.config, backend)
    fusion = fusion_unsupported_reason(layer.config)
    fusion = fusion or backend_fusion_reason(layer.config, backend)
    if experts is None and fusion is not None:
        experts = separate_experts_reason(layer)
    return _Parts(experts, fusion)


def _reads_counts(model: TransformerConfig, backend: str) -> str:
    return (
        f"cuda_graph_impl={model.cuda_graph_impl!r}: backend {backend} reads row counts on the host"
    )


def _one_reason(reasons: Sequence[str | None]) -> str | None:
    """The reason of all ranks, or the first of them with its rank; None where no rank has one."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return first_of_ranks(reasons)


def _described(backend: str, layer: MoELayer, parts: _Parts) -> str:
    """The start-up table's words for a layer whose exchange is ours."""
    ranks = layer.ep_group.size()
    text = f"{backend}, {ranks} expert-parallel rank{'s' if ranks > 1 else ''}"
    if parts.experts is not None:
        return f"{text}; Megatron's experts: {parts.experts}"
    return text if parts.fusion is None else f"{text}; phase by phase: {parts.fusion}"


def choose_backend(
    group: dist.ProcessGroup, config: FluidConfig, no_nvlink: str | None, phases: str | None = None
) -> tuple[str | None, str | None]:
    """The backend of a layer of `group` whose exchange may be ours; or None, and why Megatron's
    own is kept. Collective over the group.

    `auto` takes the local path on one rank, symmetric memory where the group's GPUs reach each
    other's, two levels between hosts (NVLink domains), else on CPUs round-robin P2P exchanges.
    Inside one domain NCCL's kernels and the GEMMs want the same SMs, and P2P exchanges are slower
    than one all-to-all.

    Args:
        no_nvlink: why `auto` cannot take symmetric memory for the layers of some rank, or None.
        phases: why the layer runs phase by phase, so that its experts take all rows at once; None
            for a fused one.

    Raises:
        ConfigError: nvlink was asked for by name, and the GPUs cannot reach each other's memory;
            hierarchical, and the group is on one host.
    """
    backend = config.moe_backend
    if backend in ("rounds", "local"):
        return backend, None
    if backend == "auto" and group.size() == 1:
        return "local", None

    def several_hosts() -> bool:
        return len(set(detect_domains(group, wait_timeout_s(group, config.timeout_s)))) > 1

    if backend == "hierarchical":
        if not several_hosts():
            allowed = "auto, rounds or megatron, because the group is on one host"
            raise ConfigError.of("moe_backend", backend, allowed)
        return backend, None
    if backend == "auto" and cpu_mode_active():
        return "hierarchical" if phases is None and several_hosts() else "rounds", None
    from megatron_fluid.comm.symmetric import symmetric_unsupported_reason

    no_nvlink = no_nvlink or symmetric_unsupported_reason(group)
    if no_nvlink is None:
        return "nvlink", None
    if backend == "nvlink":
        allowed = f"auto, rounds or megatron, because {no_nvlink}"
        raise ConfigError.of("moe_backend", backend, allowed)
    if several_hosts():
        if phases is None:
            return "hierarchical", None
        return None, f"{phases}; and nothing overlaps phase by phase between hosts"
    return (
        None,
        f"no symmetric memory ({no_nvlink}), and rounds do not pay inside one NVLink domain",
    )


def _unsupported(
    config: FluidConfig, model: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why the exchange that is asked for cannot serve a model, or a layer of it."""
    reason = exchange_unsupported_reason(model, layer)
    if reason is None and (phases := _phases_reason(model, layer)) is not None:
        graphed = graphed_reason(model)
        reason = graphed and f"{phases}; and {graphed}"
    if reason is None and config.moe_backend == "nvlink":
        return nvlink_unsupported_reason(model)
    return reason


def _phases_reason(model: TransformerConfig, layer: MoELayer | None) -> str | None:
    """Why a layer cannot be fused on any backend."""
    reason = experts_unsupported_reason(model, layer)
    return reason or fusion_unsupported_reason(model, layer)
