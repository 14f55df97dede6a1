"""Which path an MoE layer takes: the negotiation over its expert-parallel group, in the layer's
first forward (overlap_decision.py), and the transport that follows from it (moe/choose.py).

Exchange and experts are decided about apart: both ours, fused or phase by phase, our exchange under
Megatron's experts, our experts behind Megatron's exchange, or the whole layer Megatron's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.hosts import detect_domains
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig, current_config, names_exchange
from megatron_fluid.moe.choose import ExchangeCase, choose_transport, local_unsupported_reason
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.moe.fp8 import follow_microbatches
from megatron_fluid.patches.moe.parts import (
    PartReasons,
    forward_reason,
    graphed_phases_reason,
    graphed_reason,
    nvlink_unsupported_reason,
    part_reasons,
    separate_experts_reason,
)
from megatron_fluid.patches.moe.separate_experts import SeparateExperts
from megatron_fluid.patches.overlap_decision import (
    Decision,
    OverlapDecisions,
    Reason,
    first_of_ranks,
)
from megatron_fluid.patches.rank_findings import Finding
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["MoEDecisions", "MoEPath"]


class MoEPath(Protocol):
    """What serves a layer from call to call."""

    def start(self, descends: Sequence[bool]) -> None:
        """Do what the first call needs of all ranks. descends: whether a rank keeps its experts in
        descending order. [W]"""


@dataclass(frozen=True)
class _Found:
    """What one rank knows of its layer beyond whether the exchange may be ours.

    Attributes:
        no_nvlink: why symmetric memory cannot serve it, or None.
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


class MoEDecisions[Path: MoEPath](OverlapDecisions[Path]):
    """The negotiation of MoE layers, over their expert-parallel group: whose is the exchange, and
    whose are the experts.

    Args:
        whole: what serves a layer whose exchange and experts are ours, by transport.
        phases: makes what serves a layer with our exchange phase by phase, of the layer, the
            settings, the transport, and whether the experts are ours.
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
        self._parts: weakref.WeakKeyDictionary[Any, PartReasons] = weakref.WeakKeyDictionary()

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def group(self, layer: MoELayer) -> dist.ProcessGroup:
        return real_group(layer.ep_group)

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
        if (reason := forward_reason(layer)) is not None:
            return reason
        backend = config.moe_backend
        if backend in ("experts", "megatron"):
            return f"moe_backend={backend!r}"
        if (reason := self._exchange_reason(config, layer)) is not None:
            return reason
        if backend == "local" and layer.ep_group.size() > 1:
            return local_unsupported_reason(self.group(layer))
        return graphed_reason(layer.config, config, backend, alone=layer.ep_group.size() == 1)

    def _exchange_reason(
        self, config: FluidConfig, layer: MoELayer, built: MoELayer | None = None
    ) -> str | None:
        """Why the exchange that is asked for cannot serve a layer, by its settings and, where it is
        `built`, by its modules; or None."""
        model, parts = layer.config, part_reasons(layer.config, config, built)
        reason = parts.exchange
        if reason is None and parts.by_phase and (graphed := graphed_phases_reason(model)):
            reason = f"{parts.by_phase}; and {graphed}"
        if reason is None and config.moe_backend == "nvlink":
            return nvlink_unsupported_reason(model)
        return reason

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
        return _described(
            backend, layer, _parts_by_settings(self._config_of(layer), layer, backend)
        )

    def reads(self, config: FluidConfig, layer: MoELayer) -> tuple[str, ...]:
        transport = self.backend_of(config, layer).split()[0]
        return _reads(transport, _parts_by_settings(config, layer, transport))

    def describe_kept(self, layer: MoELayer, reason: str) -> str:
        ours = self._without_exchange(self._config_of(layer), layer) is None
        return f"{reason}; the experts are ours" if ours else reason

    def rest(self, decision: Decision[Path], layer: MoELayer) -> Path | None:
        reason = self._without_exchange(decision.config, layer)
        self._parts[layer] = PartReasons(exchange=decision.reason, experts=reason, fusion=None)
        return self._experts(layer, decision.config) if reason is None else None

    def _without_exchange(self, config: FluidConfig, layer: MoELayer) -> str | None:
        """Why the experts of a layer whose exchange is Megatron's are not ours; or None. It
        concerns this rank alone."""
        if config.moe_backend == "megatron":
            return "moe_backend='megatron'"
        if (alone := self._left_out(layer) or forward_reason(layer)) is not None:
            return alone
        reason = part_reasons(layer.config, config, layer).experts
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
        if isinstance(looked := found.look(layer), str):
            self.refuse_change(layer, looked)
        return found

    def find(self, config: FluidConfig, layer: MoELayer) -> Finding:
        if (reason := self._exchange_reason(config, layer, layer)) is not None:
            return Finding(reason)
        parts, descends = part_reasons(layer.config, config, layer), False
        on_gpus = self.group(layer).size() > 1 and not cpu_mode_active()
        no_nvlink = nvlink_unsupported_reason(layer.config) if on_gpus else None
        if parts.experts is None:
            from megatron_fluid.patches.moe.own_experts import ExpertParameters

            descends = ExpertParameters(layer.experts).arrange()
        separate = separate_experts_reason(layer)
        return Finding(None, _Found(no_nvlink, parts.experts, parts.fusion, separate, descends))

    def decide(
        self, config: FluidConfig, layer: MoELayer, found: Sequence[Finding]
    ) -> Path | Reason:
        ranks: list[_Found] = [finding.details for finding in found]
        group, model = self.group(layer), layer.config

        def parts_over(transport: str) -> PartReasons:
            over = part_reasons(model, config, transport=transport)
            return PartReasons(
                exchange=None,
                experts=_one_reason([rank.experts for rank in ranks]) or over.experts,
                fusion=_one_reason([rank.fusion for rank in ranks]) or over.fusion,
            )

        choice = choose_transport(
            config.moe_backend,
            ExchangeCase(
                group=group,
                domains=lambda: detect_domains(group, wait_timeout_s(group, config.timeout_s)),
                on_gpu=not cpu_mode_active(),
                nvlink_reason=first_of_ranks([rank.no_nvlink for rank in ranks]),
                by_phase=lambda transport: parts_over(transport).by_phase,
                megatron=True,
            ),
        )
        if (transport := choice.transport) is None:
            return Reason(choice.reason)
        if (reason := graphed_reason(model, config, transport)) is not None:
            return Reason(reason)
        separate = _one_reason([rank.separate for rank in ranks])
        parts = _checked(parts_over(transport), lambda: separate)
        if parts.by_phase is None:
            path = self._whole[transport](layer, config)
        elif (reason := graphed_phases_reason(model)) is not None:
            return Reason(f"{parts.by_phase}; and {reason}")
        else:
            path = self._phases(layer, config, transport, parts.experts is None)
        path.start([rank.descends for rank in ranks])
        text = _described(transport, layer, parts)
        by_settings = _parts_by_settings(config, layer, transport)
        if text != _described(
            transport, layer, by_settings
        ):  # what the start-up table does not say
            self.report.note(layer, True, text, reads=_reads(transport, parts))
            ranks_of = dist.get_process_group_ranks(group)
            self.report.say(True, text, " from this call on", ranks_of)
        self._parts[layer] = parts
        return path

    def exchange_of(self, layer: MoELayer) -> tuple[str, str | None]:
        """Whose exchange a layer has: its backend and None, or ("megatron", why); before its first
        forward, what it is about to have."""
        decision = self.get(layer)
        if decision is None:
            config = current_config()
            reason = self.setting_reason(config, layer)
            reason = reason or part_reasons(layer.config, config, layer).exchange
            decision = Decision(config, self.backend_of(config, layer), reason)
        if decision.reason:
            return "megatron", decision.reason
        return str(getattr(decision.path, "backend", decision.backend)), None

    def experts_reason_of(self, layer: MoELayer) -> str | None:
        """Why a layer has Megatron's experts; None where they are ours. Before its first forward,
        as far as this rank knows."""
        decision = self.get(layer)
        if decision is not None and decision.settled:
            found = self._parts.get(layer)
            return decision.reason if found is None else found.experts
        if self.exchange_of(layer)[1] is not None:
            return self._without_exchange(self._config_of(layer), layer)
        return part_reasons(layer.config, self._config_of(layer), layer).experts

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


def _parts_by_settings(config: FluidConfig, layer: MoELayer, backend: str) -> PartReasons:
    """What settings, alike on all ranks, say of the parts of a layer behind our exchange."""
    parts = part_reasons(layer.config, config, transport=backend.split()[0])
    return _checked(parts, lambda: separate_experts_reason(layer))


def _checked(parts: PartReasons, separate: Callable[[], str | None]) -> PartReasons:
    """With Megatron's experts where ours would have to stand alone, and cannot."""
    if parts.experts is None and parts.fusion is not None:
        return replace(parts, experts=separate())
    return parts


def _reads(transport: str, parts: PartReasons) -> tuple[str, ...]:
    """The fields of FluidConfig that some paths alone read."""
    fused = {"rounds": ("dx_chunks",), "nvlink": ("moe_capacity_factor",)}
    return ("defer_weight_grads", *(fused.get(transport, ()) if parts.by_phase is None else ()))


def _one_reason(reasons: Sequence[str | None]) -> str | None:
    """The reason of all ranks, or the first of them with its rank; None where no rank has one."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return first_of_ranks(reasons)


def _described(backend: str, layer: MoELayer, parts: PartReasons) -> str:
    """The start-up table's words for a layer whose exchange is ours."""
    ranks = layer.ep_group.size()
    text = f"{backend}, {ranks} expert-parallel rank{'s' if ranks > 1 else ''}"
    if parts.experts is not None:
        return f"{text}; Megatron's experts: {parts.experts}"
    return text if parts.fusion is None else f"{text}; phase by phase: {parts.fusion}"
