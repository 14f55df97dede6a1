"""Which path an MoE layer takes: the negotiation over its expert-parallel group, in the layer's
first forward (overlap_decision.py), and the backend that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.local.transport import local_unsupported_reason
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.moe.limits import nvlink_unsupported_reason, unsupported_reason
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

__all__ = ["MoEDecisions", "MoEPath", "choose_backend"]


_FP8_ROUNDS = "fp8: experts over round-robin exchanges run in the parameters' precision"


class MoEPath(Protocol):
    """What serves a layer from call to call."""

    def start(self, descends: Sequence[bool]) -> None:
        """Do what the first call needs of all ranks. descends: whether a rank keeps its experts in
        descending order. [W]"""


class MoEDecisions[Path: MoEPath](OverlapDecisions[Path]):
    """The negotiation of MoE layers, over their expert-parallel group.

    Args:
        paths: what serves a layer, by backend.
    """

    feature, patch, setting = "overlapped MoE layer", "moe-layer", "moe_backend"

    def __init__(self, paths: Mapping[str, Callable[[MoELayer, FluidConfig], Path]]) -> None:
        super().__init__()
        self._paths = paths

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def group(self, layer: MoELayer) -> dist.ProcessGroup:
        return layer.ep_group

    def counts(self, decision: Decision[Path]) -> bool:
        return patches.off_reason(self.patch) is None

    def setting_reason(self, config: FluidConfig, layer: MoELayer) -> str | None:
        backend = config.moe_backend
        if backend == "megatron":
            return "moe_backend='megatron'"
        if (reason := _unsupported(config, layer.config)) is not None:
            return reason
        if backend == "rounds" and layer.config.fp8:
            return _FP8_ROUNDS
        alone = layer.ep_group.size() == 1
        if backend == "local" and not alone:
            return local_unsupported_reason(layer.ep_group)
        local = backend == "local" or (backend == "auto" and alone)
        if local and layer.config.moe_apply_probs_on_input:
            return "moe_apply_probs_on_input: backend local applies probabilities before fc2"
        return None

    def backend_of(self, config: FluidConfig, layer: MoELayer) -> str:
        if config.moe_backend != "auto":
            return config.moe_backend
        if layer.ep_group.size() == 1:
            return "local"
        if cpu_mode_active():
            return "rounds"
        return "nvlink where all GPUs of the group reach each other's memory"

    def describe(self, backend: str, layer: MoELayer) -> str:
        ranks = layer.ep_group.size()
        return f"{backend}, {ranks} expert-parallel rank{'s' if ranks > 1 else ''}"

    def find(self, config: FluidConfig, layer: MoELayer) -> Finding:
        """Its details: why `auto` cannot take symmetric memory, or None; and whether this rank
        keeps its experts in descending order."""
        if (reason := _unsupported(config, layer.config, layer)) is not None:
            return Finding(reason)
        from megatron_fluid.patches.moe.expert_parameters import ExpertParameters

        automatic = config.moe_backend == "auto" and self.group(layer).size() > 1
        automatic = automatic and not cpu_mode_active()
        no_nvlink = nvlink_unsupported_reason(layer.config) if automatic else None
        return Finding(None, (no_nvlink, ExpertParameters(layer.experts).arrange()))

    def choose(
        self, decision: Decision[Path], layer: MoELayer, found: Sequence[Finding]
    ) -> tuple[Path | None, str | None]:
        no_nvlink = first_of_ranks([finding.details[0] for finding in found])
        backend, reason = choose_backend(layer.ep_group, decision.config, no_nvlink)
        if backend == "rounds" and layer.config.fp8:
            backend, reason = None, _FP8_ROUNDS
        if backend is None:
            return None, reason
        path = self._paths[backend](layer, decision.config)
        path.start([finding.details[1] for finding in found])
        decision.backend = backend
        return path, None

    def allowed(self, config: FluidConfig, layer: MoELayer, reason: str) -> str | None:
        if config.moe_backend in ("auto", "megatron"):
            return None
        # What rules out symmetric memory alone (settings, alike on all ranks) leaves the rounds.
        nvlink = config.moe_backend == "nvlink"
        rounds = nvlink and reason == nvlink_unsupported_reason(layer.config)
        return f"{'auto, rounds or megatron' if rounds else 'auto or megatron'}, because {reason}"


def choose_backend(
    group: dist.ProcessGroup, config: FluidConfig, no_nvlink: str | None
) -> tuple[str | None, str | None]:
    """The backend of a supported layer of `group`; or None, and why Megatron's own is kept.
    Collective over the group.

    `auto` takes the local path on one rank, symmetric memory where the group's GPUs reach each
    other's, else round-robin P2P exchanges on CPUs and between NVLink domains. Inside one domain
    NCCL's kernels and the GEMMs want the same SMs, and P2P exchanges are slower than one
    all-to-all.

    Args:
        no_nvlink: why `auto` cannot take symmetric memory for the layers of some rank, or None.

    Raises:
        ConfigError: nvlink was asked for by name, and the GPUs cannot reach each other's memory.
    """
    backend = config.moe_backend
    if backend in ("rounds", "local"):
        return backend, None
    if backend == "auto" and group.size() == 1:
        return "local", None
    if backend == "auto" and cpu_mode_active():
        return "rounds", None
    from megatron_fluid.comm.symmetric import symmetric_unsupported_reason

    no_nvlink = no_nvlink or symmetric_unsupported_reason(group)
    if no_nvlink is None:
        return "nvlink", None
    if backend == "nvlink":
        allowed = f"auto, rounds or megatron, because {no_nvlink}"
        raise ConfigError.of("moe_backend", backend, allowed)
    if len(set(detect_domains(group, wait_timeout_s(group, config.timeout_s)))) > 1:
        return "rounds", None
    return (
        None,
        f"no symmetric memory ({no_nvlink}), and rounds do not pay inside one NVLink domain",
    )


def _unsupported(
    config: FluidConfig, model: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why the path that is asked for cannot serve a model, or a layer of it."""
    reason = unsupported_reason(model, layer)
    if reason is None and config.moe_backend == "nvlink":
        return nvlink_unsupported_reason(model)
    return reason
