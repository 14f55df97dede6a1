"""Context parallelism in Transformer Engine's attention with `cp_comm_type="a2a"`: its kernel
between two exchanges of heads and sequence by megatron_fluid (core.py).

Transformer Engine's DotProductAttention is built for one context-parallel rank and a share of the
heads. What it cannot serve so, call by call (masks of padding, groups of a pack's own), keeps
Transformer Engine's own exchange.

Legend: S whole sequence, s = S / C a rank's part, b batch, n query heads, g key and value heads, D
head dim.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.attention.core import (
    REPORT,
    Exchanges,
    attend_alone,
    exchanged,
    take_over,
)
from megatron_fluid.patches.attention.limits import TE_LIMITS
from megatron_fluid.patches.attention.packed_sequences import (
    Reorder,
    foreign_pack_reason,
    pack_order,
)
from megatron_fluid.patches.limits import first_reason

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fluid.attention.attention_kernels import CoreCase

__all__ = ["te_dot_product_attention"]


def te_dot_product_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TEDotProductAttention.__init__`: with context parallelism by a2a the object becomes the
    class below."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def fluid_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base: Any = type(self)
        original(self, config, *args, **kwargs)
        if config.context_parallel_size == 1:
            return
        given = signature.bind(self, config, *args, **kwargs)
        given.apply_defaults()
        if config.multi_latent_attention and given.arguments["k_channels"] is None:
            return  # Megatron builds another one for latent attention
        exchanges = _exchanges(self, config, given.arguments)
        if exchanges is None:
            return
        self.__dict__["mask_type"] = given.arguments["attn_mask_type"]
        take_over(self, _te_class(base), original, config, exchanges, *args, **kwargs)
        self.alone(1)  # what it does not take is said now

    return fluid_init


def _exchanges(core: Any, config: Any, given: dict[str, Any]) -> Exchanges | None:
    """The exchanges in place of Transformer Engine's own; None, and a note, where it keeps them.

    Raises:
        ConfigError: a backend was asked for by name and cannot be had.
    """
    asked = current_config().cp_backend
    channels = given["k_channels"], given["v_channels"]
    request = SimpleNamespace(**{**vars(config), **given, "cp_backend": asked})
    reason = first_reason(TE_LIMITS, request, current_config())
    if reason is not None and asked in ("nvlink", "rounds", "collective"):
        raise ConfigError.of("cp_backend", asked, f"auto, megatron: {reason}")
    if reason is None:
        exchanges = Exchanges(
            config, given["pg_collection"], True, None if None in channels else channels
        )
        if exchanges.nvlink or asked != "auto":
            return exchanges
        reason = exchanges.nvlink_unsupported_reason
    REPORT.note(core, False, f"Transformer Engine's own exchange: {reason}")
    return None


def _te_kernel(
    core: Any, groups: int, mask_type: Any, packed: Any, **settings: Any
) -> Callable[..., Tensor]:
    """Transformer Engine's attention of this rank's heads in so many head groups. ``settings``:
    further arguments of its forward."""
    order: list[tuple[Tensor, Tensor]] = []  # of this call, for all head groups and recomputation
    if packed is not None:
        settings["packed_seq_params"] = packed

    def run(
        q: Tensor, k: Tensor, v: Tensor, case: CoreCase | None, offset: Tensor | None = None
    ) -> Tensor:
        if packed is None:
            return attend_alone(core, groups, (q, k, v), offset, None, mask_type, **settings)
        ranks = core.exchanges.heads.world
        if not order:
            order.append(pack_order(packed, len(q) // ranks, ranks))
        there, back = order[0]
        qkv = (Reorder.apply(t, back, there) for t in (q, k, v))  # the pack is one sequence
        attended = attend_alone(core, groups, qkv, offset, None, mask_type, flat=True, **settings)
        ordered: Tensor = Reorder.apply(attended.view(len(q), 1, -1), there, back)
        return ordered

    return run


@functools.cache
def _te_class(base: type) -> type:
    class AllToAllTEDotProductAttention(base):  # type: ignore[misc, valid-type]
        """Transformer Engine's attention between two exchanges by megatron_fluid."""

        ignores_masks = True  # where it is causal or no_mask

        def kernel(self, groups: int, packed: Any = None) -> Callable[..., Tensor]:
            """What attends, causal or none as it was built."""
            return _te_kernel(self, groups, self.mask_type, packed)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
            num_splits: int | None = None,
        ) -> Tensor:
            """Query [s, b, n, D], key [s, b, g, D] and value [s, b, g, Dv] -> [s, b, n * Dv]; of
            packed sequences without b. As Megatron's under other masks."""
            reason = _unserved_reason(
                self, query, key, value, attn_mask_type, attention_bias, packed_seq_params
            )
            if reason is not None:
                REPORT.note_late("in some calls", f"Transformer Engine's own exchange: {reason}")
                rest = attention_mask, attn_mask_type, attention_bias, packed_seq_params, num_splits
                result: Tensor = super().forward(query, key, value, *rest)
                return result
            packed = packed_seq_params is not None
            if packed:  # the pack is one sequence
                query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            exchange = self.exchanges.of(query, "contiguous" if packed else "zigzag")
            kernel = _te_kernel(
                self,
                exchange.heads.groups,
                attn_mask_type,
                packed_seq_params,
                num_splits=num_splits,
            )
            attended = exchanged(self, exchange, (query, key, value), kernel)
            return attended.squeeze(1) if packed else attended

    return AllToAllTEDotProductAttention


def _unserved_reason(
    core: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask_type: Any,
    attention_bias: Tensor | None,
    packed_seq_params: Any,
) -> str | None:
    """Why a call keeps Transformer Engine's own exchange, or None."""
    if attention_bias is not None:
        return "attention_bias is given"
    if attn_mask_type.name not in ("causal", "no_mask"):
        return f"attn_mask_type {attn_mask_type.name} is given"
    if packed_seq_params is not None:
        if (reason := foreign_pack_reason(packed_seq_params)) is not None:
            return reason
        if query.dim() != 3:
            return "packed_seq_params with queries that are not packed"
        if value.size(2) != core.exchanges.heads.dv:
            return "packed_seq_params with values that are padded to the width of queries"
        return None
    if query.dim() != 4 or query.size(0) != key.size(0):
        return "queries and keys are not those of one sequence"
    return None
