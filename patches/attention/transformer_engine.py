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
from typing import TYPE_CHECKING, Any

from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.attention.core import (
    REPORT,
    Exchanges,
    attention_of_one_rank,
    local_kernel,
    softmax_offset,
    with_offset,
)
from megatron_fluid.patches.attention.limits import TERequest, te_reason
from megatron_fluid.patches.attention.packed_sequences import (
    Reorder,
    pack_order,
    unserved_pack_reason,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
    from megatron_fluid.attention.layouts import HeadPart

__all__ = ["core_kernel", "te_dot_product_attention"]


def core_kernel(core: Any, groups: int, packed: Any = None) -> CoreKernel:
    """The attention kernel of a core attention that megatron_fluid has taken over, causal or none
    as it was built, for this rank's heads in so many head groups.

    Args:
        packed: Megatron's PackedSeqParams of rows that are the ranks', rank after rank; of
            Transformer Engine's attention alone.
    """
    from megatron_fluid.attention.attention_kernels import CoreKernel

    if packed is not None:
        run = _te_kernel_of_packs(core, groups, packed)
        return CoreKernel(type(core).__name__, lambda case: None, run)
    make = _te_kernel if "alone" in core.__dict__ else local_kernel
    return CoreKernel(type(core).__name__, lambda case: None, make(core, groups))


def te_dot_product_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TEDotProductAttention.__init__`: with context parallelism by a2a the object becomes the
    class below.

    It stays what Megatron built, and holds beside it, out of the module tree (so that no checkpoint
    sees it), the same attention for one context-parallel rank and this rank's heads (of a head
    group).
    """

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

        alone = attention_of_one_rank(base, original, config, exchanges, *args, **kwargs)
        alone(1)  # what it does not take is said now
        # Past nn.Module's __setattr__: no part of the model.
        self.__dict__["exchanges"], self.__dict__["alone"] = exchanges, alone
        self.__dict__["mask_type"] = given.arguments["attn_mask_type"]
        self.__class__ = _te_class(base)
        REPORT.note(self, True, exchanges.describe())

    return fluid_init


def _exchanges(core: Any, config: Any, given: dict[str, Any]) -> Exchanges | None:
    """The exchanges in place of Transformer Engine's own; None, and a note, where it keeps them.

    Raises:
        ConfigError: a backend was asked for by name and cannot be had.
    """
    asked = current_config().cp_backend
    channels = given["k_channels"], given["v_channels"]
    mask, kind, comm = (given[n] for n in ("attn_mask_type", "attention_type", "cp_comm_type"))
    reason = te_reason(TERequest(config, mask, kind, comm), current_config())
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


def _te_kernel(core: Any, groups: int) -> Callable[..., Tensor]:
    inner, exchanges, mask_type = core.alone(groups), core.exchanges, core.mask_type
    heads = exchanges.heads.num_heads // exchanges.heads.world // groups
    key_value_heads = exchanges.key_value_heads // groups

    def run(
        q: Tensor, k: Tensor, v: Tensor, case: CoreCase, offset: Tensor | None = None
    ) -> Tensor:
        if inner.training != core.training:
            inner.train(core.training)
        # Transformer Engine chooses its kernel by layout too: it is given that of its own path,
        # each tensor for itself. Over symmetric memory they arrive so (SymmetricExchange, apart),
        # and nothing is copied here.
        length, dim = q.shape[0], q.shape[3]
        queries = q.reshape(length, -1, heads, dim).contiguous()
        keys, values = (
            t.reshape(length, -1, key_value_heads, t.shape[3]).contiguous() for t in (k, v)
        )
        with with_offset(inner, offset):
            attended: Tensor = inner(queries, keys, values, None, mask_type)
        return attended

    return run


def _te_kernel_of_packs(core: Any, groups: int, packed: Any) -> Callable[..., Tensor]:
    inner, exchanges = core.alone(groups), core.exchanges
    heads = exchanges.heads.num_heads // exchanges.heads.world // groups
    key_value_heads = exchanges.key_value_heads // groups
    order: list[tuple[Tensor, Tensor]] = []  # of this call, for all head groups and recomputation

    def run(
        q: Tensor, k: Tensor, v: Tensor, case: CoreCase, offset: Tensor | None = None
    ) -> Tensor:
        if inner.training != core.training:
            inner.train(core.training)
        length, ranks = q.shape[0], exchanges.heads.world
        if not order:
            order.append(pack_order(packed, length // ranks, ranks))
        there, back = order[0]
        queries, keys, values = (
            Reorder.apply(t.reshape(length, count, t.shape[3]), back, there)
            for t, count in ((q, heads), (k, key_value_heads), (v, key_value_heads))
        )
        with with_offset(inner, offset):
            attended: Tensor = inner(
                queries, keys, values, None, core.mask_type, packed_seq_params=packed
            )
        ordered: Tensor = Reorder.apply(attended.view(length, 1, -1), there, back)
        return ordered

    return run


@functools.cache
def _te_class(base: type) -> type:
    class AllToAllTEDotProductAttention(base):  # type: ignore[misc, valid-type]
        """Transformer Engine's attention between two exchanges by megatron_fluid."""

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
            from megatron_fluid.attention.exchanged import exchanged_attention

            packed = packed_seq_params is not None
            if packed:  # the pack is one sequence
                query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            exchange = self.exchanges.of(query, "contiguous" if packed else "zigzag")
            inner = self.alone(exchange.heads.groups)
            if inner.training != self.training:
                inner.train(self.training)

            offset, ranks = softmax_offset(self), exchange.heads.world
            order = pack_order(packed_seq_params, query.size(0), ranks) if packed else None

            def attend(part: HeadPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                mine = None if offset is None else offset[part.head_slice]
                if order is not None:
                    there, back = order
                    q, k, v = (Reorder.apply(t.squeeze(1), back, there) for t in (q, k, v))
                how = {"packed_seq_params": packed_seq_params, "num_splits": num_splits}
                with with_offset(inner, mine):
                    attended: Tensor = inner(q, k, v, None, attn_mask_type, **how)
                return attended if order is None else Reorder.apply(attended, *order)

            attended = exchanged_attention(exchange, query, key, value, attend)
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
        return unserved_pack_reason(packed_seq_params, query, value, core.exchanges.heads.dv)
    if query.dim() != 4 or query.size(0) != key.size(0):
        return "queries and keys are not those of one sequence"
    return None
