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
decision.py and overlap_decision.py say how the ranks agree on it. Calls with the hooks by which
Megatron saves activations in single iterations, on all ranks, are Megatron's own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_fluid.attention.choice import overlap_slower_reason
from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.core import exchanges_of
from megatron_fluid.patches.attention.decision import AttentionDecisions
from megatron_fluid.patches.attention.limits import OVERLAP_LIMITS, module_reason
from megatron_fluid.patches.attention.overlapped import OverlappedAttention
from megatron_fluid.topology import real_group

__all__ = ["DECISIONS", "forward", "init", "leave", "overlapped"]


class _SelfAttentionDecisions(AttentionDecisions[OverlappedAttention]):
    feature, patch = "overlapped attention", "self-attention"
    limits, path = OVERLAP_LIMITS, OverlappedAttention
    overlap_texts = (
        "heads move over NVLink, beside the projections",
        "heads move in peer rounds, beside the projections",
    )

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.attention import SelfAttention

        return isinstance(module, SelfAttention)

    def group(self, layer: Any) -> dist.ProcessGroup:
        if layer.pg_collection.tp.size() == 1:
            return super().group(layer)
        # Tensor-parallel ranks gather and scatter together, so that they have to agree, too.
        from megatron.core import parallel_state

        return real_group(parallel_state.get_tensor_and_context_parallel_group())

    def module_reason(self, layer: Any) -> str | None:
        return _groups_reason(layer) or module_reason(layer)

    def slower_reason(self, config: FluidConfig, layer: Any) -> str | None:
        hides = config.tp_overlap != "off" and bool(layer.config.sequence_parallel)
        return overlap_slower_reason(layer.pg_collection.tp.size() if hides else 1)

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        if config.cp_backend != "rounds":
            return None
        exchanges = exchanges_of(layer.core_attention)
        # A core attention that keeps its own exchange does so under any of the other two.
        others = ("auto", "megatron") if exchanges is None else exchanges.other_backends()
        return f"{', '.join(others)}: {reason}"


DECISIONS = _SelfAttentionDecisions()
forward = DECISIONS.forward  # wraps Attention.forward, which SelfAttention inherits
init = DECISIONS.announcing  # wraps SelfAttention.__init__


def leave(attention: Any) -> None:
    """Let a built module keep Megatron's projections, around what exchanges its heads: the other
    half of a comparison."""
    DECISIONS.leave(attention)


def overlapped(attention: Any) -> str | None:
    """The backend of a module that is overlapped (before its first forward, is about to be),
    "nvlink" or "rounds"; None of any other."""
    found = DECISIONS.get(attention)
    return None if found is None else found.backend


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
