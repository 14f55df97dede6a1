"""Megatron's SelfAttention under context parallelism by a2a, its projections overlapped with the
exchanges of heads and sequence: the replacement of `Attention.forward`.

Where core.py or transformer_engine.py has taken over the core attention, and the settings allow it,
the whole module runs as megatron_fluid.attention.overlap does (overlapped.py): QKV is projected
rank by rank while heads move, attention runs by head groups while its output returns, and weight
gradients are computed during the exchanges of backward. The exchange is over symmetric memory
inside an NVLink domain (`--fluid-cp-backend nvlink` or `auto`), else in P2P rounds (`rounds`;
`auto` on a CPU). Parameters, checkpoints and random numbers stay Megatron's, and so do the
attention kernel and the rotations.

Everything else (limits.py, and what a call brings: masks, foreign packs, inference) keeps
Megatron's projections around the exchanged core attention, and is reported once by name.
overlap_decision.py says how the ranks agree on it. Calls with the hooks by which Megatron saves
activations in single iterations, on all ranks, are Megatron's own.

Legend: s a rank's part of the sequence, b batch, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.core import REPORT as CORE_REPORT
from megatron_fluid.patches.attention.core import exchanges_of
from megatron_fluid.patches.attention.limits import bypassed, module_reason, setting_reason
from megatron_fluid.patches.attention.overlapped import ForwardResult, OverlappedAttention
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.overlap_decision import Decision, OverlapDecisions
from megatron_fluid.patches.rank_findings import Finding
from megatron_fluid.plan.machine import agreed_machine

__all__ = ["DECISIONS", "attention_forward", "forward", "init", "leave", "overlapped"]


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `SelfAttention.__init__`: decide whether the built module is overlapped."""
    return DECISIONS.announcing(original)


def forward(original: Callable[..., ForwardResult]) -> Callable[..., ForwardResult]:
    """Wrap `Attention.forward`, which SelfAttention inherits."""

    @functools.wraps(original)
    def fluid_forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> ForwardResult:
        return attention_forward(self, original, hidden_states, attention_mask, *args, **kwargs)

    return fluid_forward


# The arguments of Megatron's Attention.forward after attention_mask.
_ARGUMENTS = (
    "key_value_states", "inference_context", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin",
    "rotary_pos_cos_sin", "attention_bias", "packed_seq_params", "sequence_len_offset",
)  # fmt: skip


def attention_forward(
    attention: Any,
    original: Callable[..., ForwardResult],
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> ForwardResult:
    """The overlapped forward of a module, or Megatron's own where that is to be kept.

    Args:
        original: Megatron's `Attention.forward`, whose arguments and results these are.
        hidden_states: [s, b, H].

    Raises:
        ConfigError: its modules were changed after the first forward.
    """
    decision = DECISIONS.get(attention)
    if decision is None or not decision.settled:
        decision = DECISIONS.settle(attention)
    path = decision.path
    if path is not None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        rotations, packed = given.pop("rotary_pos_emb", None), given.pop("packed_seq_params", None)
        # None of the others is anything in training.
        reason = next((f"{name} is given" for name in given if given[name] is not None), None)
        reason = reason or path.unsupported_reason(hidden_states, attention_mask, packed)
        table = None
        if reason is None:
            table, reason = path.rotations(hidden_states, rotations, packed)
        if reason is None:
            if (changed := path.changed(attention)) is not None:
                DECISIONS.refuse_change(attention, changed)
            return path.forward(hidden_states, table, packed)
        DECISIONS.report.note_late("in some calls", reason)
    return original(attention, hidden_states, attention_mask, *args, **kwargs)


def leave(attention: Any) -> None:
    """Let a built module keep Megatron's projections, around what exchanges its heads: the other
    half of a comparison."""
    DECISIONS.leave(attention)


def overlapped(attention: Any) -> str | None:
    """The backend of a module that is overlapped (before its first forward, is about to be),
    "nvlink" or "rounds"; None of any other."""
    decision = DECISIONS.get(attention)
    return None if decision is None else decision.backend


class _AttentionDecisions(OverlapDecisions[OverlappedAttention]):
    """The negotiation of self-attention modules, over their context-parallel group."""

    feature, patch, setting = "overlapped attention", "self-attention", "cp_backend"

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.attention import SelfAttention

        return isinstance(module, SelfAttention)

    def concerns(self, layer: Any) -> bool:
        return self.is_layer(layer) and layer.pg_collection.cp.size() > 1

    def group(self, layer: Any) -> dist.ProcessGroup:
        if layer.pg_collection.tp.size() == 1:
            return layer.pg_collection.cp
        # Tensor-parallel ranks gather and scatter together, so that they have to agree, too.
        from megatron.core import parallel_state

        return parallel_state.get_tensor_and_context_parallel_group()

    def setting_reason(self, config: FluidConfig, layer: Any) -> str | None:
        if config.cp_backend in ("collective", "megatron"):
            return f"cp_backend={config.cp_backend} was asked for"
        reason = setting_reason(layer.config, config) or _own_exchange_reason(layer)
        if reason is None:
            reason = self._backend(config, layer)[1]
        return reason or _groups_reason(layer)

    def _backend(self, config: FluidConfig, layer: Any) -> tuple[str, str | None]:
        """Who moves heads and rows, or why nobody can."""
        no_nvlink = exchanges_of(layer.core_attention).nvlink_unsupported_reason  # type: ignore[union-attr]
        if config.cp_backend in ("auto", "nvlink") and no_nvlink is None:
            return "nvlink", None
        if config.cp_backend == "rounds" or cpu_mode_active():
            return "rounds", None
        asked = "peer rounds are taken where they are asked for (--fluid-cp-backend rounds)"
        return "", f"{no_nvlink}; {asked}"

    def backend_of(self, config: FluidConfig, layer: Any) -> str:
        return self._backend(config, layer)[0]

    def describe(self, backend: str, layer: Any) -> str:
        how = "heads move over NVLink" if backend == "nvlink" else "heads move in peer rounds"
        return f"{how}, beside the projections"

    def reads(self, config: FluidConfig, layer: Any) -> tuple[str, ...]:
        # Its backward computes in such pieces, whoever exchanges them.
        return ("defer_weight_grads", "dx_chunks")

    def announce(self, layer: Any, late: bool = False) -> Decision[OverlappedAttention]:
        decision = super().announce(layer, late)
        if decision.backend is not None:  # the module exchanges heads, not its core attention
            CORE_REPORT.withdraw(layer.core_attention)
        return decision

    def built_reason(self, layer: Any) -> str | None:
        return module_reason(layer)

    def find(self, config: FluidConfig, layer: Any) -> Finding:
        reason = _own_exchange_reason(layer) or module_reason(layer)
        return Finding(reason or ModuleHooks(**bypassed(layer)).foreign())

    def decide(
        self, config: FluidConfig, layer: Any, found: Sequence[Finding]
    ) -> OverlappedAttention:
        backend = self.backend_of(config, layer)
        machine = None
        if config.cp_backend == "auto":
            device = "cuda" if backend == "nvlink" else "cpu"
            machine = agreed_machine(self.group(layer), device, config.machine)
        return OverlappedAttention(layer, config, backend, machine)

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        if config.cp_backend != "rounds":
            return None
        exchanges = exchanges_of(layer.core_attention)
        # A core attention that keeps its own exchange does so under any of the other two.
        others = ("auto", "megatron") if exchanges is None else exchanges.other_backends()
        return f"{', '.join(others)}: {reason}"


DECISIONS = _AttentionDecisions()


def _groups_reason(attention: Any) -> str | None:
    """Why the ranks of a tensor-parallel module cannot agree, or None."""
    from megatron.core import parallel_state

    tensor, context = attention.pg_collection.tp, attention.pg_collection.cp
    if tensor.size() == 1:
        return None
    both = parallel_state.get_tensor_and_context_parallel_group(check_initialized=False)
    if both is not None and both.size() == tensor.size() * context.size():
        return None
    return "its process groups are not those of parallel_state"


def _own_exchange_reason(attention: Any) -> str | None:
    """Why its core attention cannot be bypassed, or None; it may be another one by the first
    forward, on one rank alone."""
    core = attention.core_attention
    if exchanges_of(core) is not None:
        return None
    return f"its {type(core).__name__} keeps its own exchange"
