"""Which path an MoE layer takes: the negotiation over its expert-parallel group, in the layer's
first forward (overlap_decision.py), and the backend that follows from it (moe/choose.py).

Exchange and experts are decided about apart (parts.py): both this package's, fused or phase by
phase, one of them, or the whole layer Megatron's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_fluid.comm.groups import wait_timeout_s
from megatron_fluid.comm.p2p_rounds import detect_hosts
from megatron_fluid.config import FluidConfig, names_exchange
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.backends import BACKENDS
from megatron_fluid.moe.choose import ExchangeCase, choose_transport, local_unsupported_reason
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.moe.fp8 import follow_microbatches
from megatron_fluid.patches.moe.limits import batch_invariant
from megatron_fluid.patches.moe.own_experts import FEATURE, ExpertParameters
from megatron_fluid.patches.moe.parts import (
    PartReasons,
    forward_reason,
    nvlink_unsupported_reason,
    part_reasons,
)
from megatron_fluid.patches.overlap_decision import (
    Decision,
    Finding,
    OverlapDecisions,
    Reason,
    first_of_ranks,
)
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["MoEDecisions"]


@dataclass(frozen=True)
class _Found:
    """What one rank knows of its layer beyond whether the exchange can be replaced.

    Attributes:
        no_nvlink: why symmetric memory cannot serve it, or None.
        parts: why parts of it stay Megatron's, by backend.
        descends: whether it keeps its experts in descending order.
    """

    no_nvlink: str | None
    parts: Mapping[str, PartReasons]
    descends: bool


class MoEDecisions(OverlapDecisions[Any]):
    """The negotiation of MoE layers, over their expert-parallel group: who runs the exchange, and
    who the experts. Paths have `start(descends)`, which does what the first call needs of all
    ranks; descends: whether a rank keeps its experts in descending order. [W]

    Args:
        whole: makes what serves a fused layer, of the layer, the settings and the backend.
        phases: makes what serves a layer whose exchange is replaced phase by phase, of the layer,
            the settings, the backend, and whether the experts are replaced too.
        experts: makes what serves a layer whose experts alone are replaced.
        serve_phases: does to a layer whose exchange may be replaced what has to be done before its
            first call.
    """

    feature, patch, setting = FEATURE, "moe-layer", "moe_backend"
    compared = (
        *(*OverlapDecisions.compared, "num_moe_experts", "moe_ffn_hidden_size"),
        *("moe_router_topk", "gated_linear_unit"),
    )

    def __init__(
        self,
        whole: Callable[[MoELayer, FluidConfig, str], Any],
        phases: Callable[[MoELayer, FluidConfig, str, bool], Any],
        experts: Callable[[MoELayer, FluidConfig], Any],
        serve_phases: Callable[[MoELayer], None],
    ) -> None:
        super().__init__()
        self._serve_phases = serve_phases
        self._whole, self._phases, self._experts = whole, phases, experts

    def is_layer(self, module: object) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def group(self, layer: MoELayer) -> dist.ProcessGroup:
        return real_group(layer.ep_group)

    def announce(self, layer: MoELayer, late: bool = False) -> Decision[Any]:
        decision = super().announce(layer, late)
        if decision.reason is None and not decision.settled:
            self._serve_phases(layer)
        if not late:
            follow_microbatches(layer)
        return decision

    def reason(self, config: FluidConfig, layer: MoELayer) -> str | None:
        if (reason := forward_reason(layer)) is not None:
            return reason
        backend, model = config.moe_backend, layer.config
        if backend in ("experts", "megatron"):
            return f"moe_backend={backend!r}"
        if backend == "local" and layer.ep_group.size() > 1:
            return local_unsupported_reason(self.group(layer))
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
        whole = found.config.moe_backend == "megatron" or forward_reason(layer) is not None
        if whole or self.left_out(layer) is not None:
            return PartReasons(exchange=found.reason, experts=found.reason)
        backend = None if found.backend is None else found.backend.split()[0]
        return part_reasons(layer.config, found.config, layer, backend, found.reason)

    def rest(self, decision: Decision[Any], layer: MoELayer) -> Any:
        decision.details = self.parts_of(layer)
        if decision.details.experts is not None:
            return None
        return self._experts(layer, decision.config)

    def find(self, config: FluidConfig, layer: MoELayer) -> Finding:
        if (reason := self.reason(config, layer)) is not None:
            return Finding(reason)
        parts = {name: part_reasons(layer.config, config, layer, name) for name in BACKENDS}
        on_gpus = self.group(layer).size() > 1 and not cpu_mode_active()
        no_nvlink = nvlink_unsupported_reason(layer.config) if on_gpus else None
        descends = False
        if any(over.experts is None for over in parts.values()):
            descends = ExpertParameters(layer.experts).arrange()
        return Finding(None, _Found(no_nvlink, parts, descends))

    def decide(
        self, config: FluidConfig, layer: MoELayer, found: Sequence[Finding]
    ) -> Any | Reason:
        ranks: list[_Found] = [finding.details for finding in found]
        group = self.group(layer)

        def parts_over(backend: str) -> PartReasons:
            parts = [rank.parts[backend] for rank in ranks]
            return PartReasons(
                exchange=first_of_ranks([part.exchange for part in parts]),
                experts=first_of_ranks([part.experts for part in parts]),
                fusion=first_of_ranks([part.fusion for part in parts]),
            )

        choice = choose_transport(
            config.moe_backend,
            ExchangeCase(
                group=group,
                domains=lambda: detect_hosts(group, wait_timeout_s(group, config.timeout_s))[0],
                on_gpu=not cpu_mode_active(),
                nvlink_reason=first_of_ranks([rank.no_nvlink for rank in ranks]),
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
        if parts.by_phase is None:
            path = self._whole(layer, config, choice.transport)
        else:
            path = self._phases(layer, config, choice.transport, parts.experts is None)
        path.start([rank.descends for rank in ranks])
        decision = self.get(layer)
        assert decision is not None
        decision.backend, decision.details = choice.transport, parts
        return path

    def _refuse_if_named(self, config: FluidConfig, layer: MoELayer, reason: str) -> None:
        super()._refuse_if_named(config, layer, reason)
        if config.batch_invariant:
            why = f"False, because Megatron's own path is not batch-invariant, and {reason}"
            raise ConfigError.of("batch_invariant", True, why)

    def allowed(self, config: FluidConfig, layer: MoELayer, reason: str) -> str | None:
        return f"auto or megatron, because {reason}" if names_exchange(config) else None
