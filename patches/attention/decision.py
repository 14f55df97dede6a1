"""What the overlapped forwards of self-attention and of latent attention have in common: which
module takes one (the negotiation over its context-parallel group), and which call.

Legend: s a rank's part of the sequence, b batch, H hidden.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.config import FluidConfig
from megatron_fluid.patches import versions
from megatron_fluid.patches.attention.core import REPORT as CORE_REPORT
from megatron_fluid.patches.attention.core import exchanges_of
from megatron_fluid.patches.attention.limits import method_reason
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.limits import Limit, first_reason
from megatron_fluid.patches.linears import quantises
from megatron_fluid.patches.overlap_decision import (
    Decision,
    Finding,
    OverlapDecisions,
    Reason,
    refuse_change,
)
from megatron_fluid.topology import real_group

__all__ = ["AttentionDecisions", "ForwardResult", "OverlappedModule"]

ForwardResult = tuple[Tensor, Tensor | None]

_MASKED = (
    "attention_mask is given: without it (--no-create-attention-mask-in-dataloader) causal "
    "attention needs none"
)


class OverlappedModule:
    """What the overlapped forward of one module needs from call to call. It holds no state of any
    call, and not the module.

    Args:
        attention: the module.
        modules: those whose calls the forward stands for, by name.
        config: the settings in force when it was built.
        backend: "nvlink" or "rounds".
    """

    def __init__(
        self, attention: Any, modules: dict[str, Any], config: FluidConfig, backend: str
    ) -> None:
        exchanges = exchanges_of(attention.core_attention)
        assert exchanges is not None
        self.config, self.backend = config, backend
        self.exchanges, self.group, self.heads = exchanges, exchanges.group, exchanges.heads
        self.core = attention.core_attention
        self.masks_matter = not self.core.ignores_masks
        self.causal = attention.attn_mask_type.name == "causal"
        self.modules, self.hooks = modules, ModuleHooks(**modules)
        self._linears = [n for n in modules.items() if hasattr(n[1], "_forward_impl")]
        self._inference_active = versions.inference_mode()

    def prepare(
        self, x: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> tuple[Any, ...] | Reason:
        """The further arguments of ``forward`` for a call, or why it keeps Megatron's own
        projections; alike on all ranks.

        Args:
            x: [s, b, H].
            mask: attention_mask.
            given: the other arguments of Megatron's forward that are not None, by name.
        """
        raise NotImplementedError

    def forward(self, attention: Any, x: Tensor, *prepared: Any) -> ForwardResult:
        """[s, b, H] and what ``prepare`` returned -> ([s, b, H], the output projection's bias or
        None)."""
        raise NotImplementedError

    def changed(self, attention: Any) -> str | None:
        """What calling this rank's modules would do besides since the ranks chose this path
        together, or None."""
        held = attention._modules
        replaced = (name for name, module in self.modules.items() if held.get(name) is not module)
        found = next((f"{name} was replaced" for name in replaced), None)
        found = found or self.hooks.replaced() or self.hooks.foreign()
        return found or method_reason(attention, self._linears)

    def call_reason(self, x: Tensor, mask: Tensor | None, rows: int, *linears: Any) -> str | None:
        """Why a call of s = ``rows`` keeps Megatron's own projections, on all ranks alike; or None.
        ``linears``: the projections that are bypassed."""
        if mask is not None and self.masks_matter:
            return _MASKED
        if x.dim() != 3 or any(x.dtype != linear.weight.dtype for linear in linears):
            dtypes = " and ".join(str(linear.weight.dtype) for linear in linears)
            return f"its input is {x.dtype}, its weights are {dtypes}"
        if rows % 2:
            return "an odd number of rows"  # which the core attention refuses by name
        if self._inference_active() or torch.is_autocast_enabled(x.device.type) or quantises():
            return "autocast or inference is on"
        return self.hooks.logged()


class AttentionDecisions[Path: OverlappedModule](OverlapDecisions[Path]):
    """The negotiation of attention modules, over their context-parallel group.

    Attributes:
        limits: the settings of a TransformerConfig under which projections stay Megatron's.
        path: the class of the overlapped forward.
        overlap_texts: the start-up report's words for a module that is overlapped, over NVLink and
            otherwise.
    """

    setting = "cp_backend"
    limits: tuple[Limit[Any], ...]
    path: Callable[[Any, FluidConfig, str], Path]
    overlap_texts: tuple[str, str]

    def module_reason(self, layer: Any) -> str | None:
        """Why a module's submodules and groups keep Megatron's projections; or None."""
        raise NotImplementedError

    def slower_reason(self, config: FluidConfig, layer: Any) -> str | None:
        """Why Megatron's projections around the exchange are faster for a layer on GPUs, alike on
        all ranks; or None."""
        raise NotImplementedError

    def concerns(self, layer: Any) -> bool:
        return self.is_layer(layer) and layer.pg_collection.cp.size() > 1

    def group(self, layer: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = real_group(layer.pg_collection.cp)
        return group

    def reason(self, config: FluidConfig, layer: Any) -> str | None:
        if config.cp_backend in ("collective", "megatron"):
            return f"cp_backend={config.cp_backend} was asked for"
        reason = first_reason(self.limits, layer.config, config)
        reason = reason or versions.unknown_setting(layer.config, others="moe_")
        # The core attention may be another one by the first forward, on one rank alone.
        core = layer.core_attention
        if reason is None and exchanges_of(core) is None:
            reason = f"its {type(core).__name__} keeps its own exchange"
        reason = reason or self._backend(config, layer)[1]
        # CPUs, which are for trying things out, overlap whatever they can.
        if reason is None and config.cp_backend == "auto" and not cpu_mode_active():
            reason = self.slower_reason(config, layer)
        return reason or self.module_reason(layer)

    def _backend(self, config: FluidConfig, layer: Any) -> tuple[str, str | None]:
        """The transport of heads and rows, or why none is available."""
        no_nvlink = exchanges_of(layer.core_attention).nvlink_unsupported_reason  # type: ignore[union-attr]
        if config.cp_backend in ("auto", "nvlink") and no_nvlink is None:
            return "nvlink", None
        if config.cp_backend == "rounds" or cpu_mode_active():
            return "rounds", None
        asked = "peer rounds are taken where they are asked for (--fluid-cp-backend rounds)"
        return "", f"{no_nvlink}; {asked}"

    def backend_of(self, config: FluidConfig, layer: Any) -> str:
        return self._backend(config, layer)[0]

    def describe(self, layer: Any) -> str:
        decision = self.get(layer)
        assert decision is not None
        return decision.reason or self.overlap_texts[decision.backend != "nvlink"]

    def announce(self, layer: Any, late: bool = False) -> Decision[Path]:
        decision = super().announce(layer, late)
        if decision.backend is not None:  # the module exchanges heads, not its core attention
            CORE_REPORT.withdraw(layer.core_attention)
        return decision

    def decide(self, config: FluidConfig, layer: Any, found: Sequence[Finding]) -> Path:
        return self.path(layer, config, self.backend_of(config, layer))

    def forward(self, original: Callable[..., ForwardResult]) -> Callable[..., ForwardResult]:
        """Wrap Megatron's forward of these modules: the overlapped one, or Megatron's own where
        that is to be kept. It raises ConfigError where a module was changed after its first
        forward."""
        names = tuple(inspect.signature(original).parameters)[3:]  # after attention_mask

        @tells_peers
        @functools.wraps(original)
        def fluid_forward(
            attention: Any, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> ForwardResult:
            decision = self.get(attention)
            if decision is None or not decision.settled or self.regrouped(decision, attention):
                decision = self.settle(attention)
            path = decision.path
            if path is not None:
                arguments = dict(zip(names, args, strict=False)) | kwargs
                given = {name: value for name, value in arguments.items() if value is not None}
                prepared = path.prepare(hidden_states, attention_mask, given)
                if not isinstance(prepared, Reason):
                    if (changed := path.changed(attention)) is not None:
                        refuse_change(self.feature, attention, self.group(attention), changed)
                    return path.forward(attention, hidden_states, *prepared)  # type: ignore[no-any-return]
                self.report.note_late("in some calls", prepared)
            return original(attention, hidden_states, attention_mask, *args, **kwargs)

        return fluid_forward
