"""Context parallelism for Megatron's local attention: `DotProductAttention` with `cp_comm_type="a2a"`, on any device.

Megatron's own class refuses more than one context-parallel rank. Here each rank exchanges its part of the sequence with all
heads for the whole sequence with a part of the heads (Ulysses, DeepSpeed 2023), attends with torch's scaled dot-product
attention, and exchanges back: one all-to-all before (query, key and value packed together), one after.

Megatron's context-parallel layout is a zig-zag: the sequence is cut into 2C chunks, and rank r of C holds chunks r and
2C - 1 - r, so that all have equal work under a causal mask.

Legend: S whole sequence, s = S / C a rank's part, b batch, n query heads, g key and value heads, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_fluid.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dot_product_attention", "key_value_repeats", "sequence_order", "zigzag_order"]

_KIND = "a2a"


def sequence_order(chunks: Tensor) -> Tensor:
    """[C, s, ...], one entry a rank, to [S, ...] in the order of the sequence."""
    ranks, part = chunks.shape[:2]
    halves = chunks.reshape(ranks, 2, part // 2, *chunks.shape[2:])
    import torch

    return torch.cat([halves[:, 0], halves[:, 1].flip(0)]).flatten(0, 1)


def zigzag_order(sequence: Tensor, ranks: int) -> Tensor:
    """[S, ...] in the order of the sequence to [C, s, ...], one entry a rank: the inverse of `sequence_order`."""
    import torch

    chunks = sequence.unflatten(0, (2 * ranks, -1))
    return torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], dim=1).flatten(1, 2)


def key_value_repeats(query_heads: int, key_value_heads: int, ranks: int) -> int:
    """How often each key and value head must be repeated so that every rank gets as many, beside the queries they serve.

    Raises:
        ConfigError: the query heads do not divide among the ranks.
    """
    if query_heads % ranks:
        raise ConfigError.of(
            "num_attention_heads",
            f"{query_heads} per tensor-parallel rank",
            f"a multiple of context_parallel_size ({ranks}), which splits the heads with cp_comm_type={_KIND}",
        )
    repeats = ranks // math.gcd(key_value_heads, ranks)
    per_group = query_heads // key_value_heads
    return repeats if per_group % repeats == 0 else per_group


def dot_product_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DotProductAttention.__init__`: with several context-parallel ranks the object becomes the class below."""

    @functools.wraps(original)
    def fluid_init(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        rest = (
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout,
            softmax_scale,
            cp_comm_type,
            pg_collection,
        )
        if config.context_parallel_size == 1:
            original(self, config, *rest)
            return
        _check(config, attn_mask_type, layer_number, cp_comm_type)
        import copy

        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *rest)
        self.config = config
        self.cp_group = _context_parallel_group(pg_collection)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        self.key_value_repeats = key_value_repeats(heads, groups, self.cp_group.size())
        self.__class__ = _all_to_all_class()

    return fluid_init


def _check(config: Any, attn_mask_type: Any, layer_number: int, cp_comm_type: str | None) -> None:
    """Refuse what this attention does not compute, by name."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import is_layer_window_attention

    where = "context parallelism without Transformer Engine"
    if cp_comm_type != _KIND:
        raise ConfigError.of("cp_comm_type", cp_comm_type, f"{_KIND} for {where}")
    if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.arbitrary):
        raise ConfigError.of("attn_mask_type", attn_mask_type.name, f"causal, no_mask or arbitrary for {where}")
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        raise ConfigError.of("window_size", config.window_size, f"None for {where}")
    if config.softmax_type != "vanilla":
        raise ConfigError.of("softmax_type", config.softmax_type, f"vanilla for {where}")


def _context_parallel_group(pg_collection: Any) -> Any:
    group = getattr(pg_collection, "cp", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


@functools.cache
def _all_to_all_class() -> type:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class AllToAllDotProductAttention(DotProductAttention):
        """Scaled dot-product attention over a sequence that context-parallel ranks hold in parts."""

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            """Query [s, b, n, D], key and value [s, b, g, D], mask [b or 1, 1, s, S] with True where not to look.

            Without a mask it is causal or none, as `attn_mask_type` was at construction (Megatron ignores the one here).
            Returns [s, b, n * D].
            """
            if packed_seq_params is not None:
                raise ConfigError.of("packed_seq_params", "packed sequences", f"none with cp_comm_type={_KIND}")
            if attention_bias is not None:
                raise ConfigError.of("attention_bias", "a bias", f"none with cp_comm_type={_KIND}")
            return _attend(self, query, key, value, attention_mask)

    return AllToAllDotProductAttention


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.transformer.enums import AttnMaskType

    group, ranks = self.cp_group, self.cp_group.size()
    if query.size(0) % 2:
        raise ConfigError.of(
            "seq_length", query.size(0) * ranks, f"a multiple of 2 * context_parallel_size ({2 * ranks})"
        )
    if self.key_value_repeats > 1:
        key = key.repeat_interleave(self.key_value_repeats, dim=2)
        value = value.repeat_interleave(self.key_value_repeats, dim=2)
    q, k, v = _to_heads(group, query, key, value)  # [b, heads / C, S, D]
    mask = None
    if attention_mask is not None:
        hidden = _whole_mask(group, attention_mask)
        # A position that may look nowhere looks everywhere alike, as under Megatron's finite mask value: its scores are 0.
        nowhere = hidden.all(dim=-1, keepdim=True)
        q = q.masked_fill(nowhere, 0.0)
        mask = ~hidden | nowhere
    dropout = self.attention_dropout.p if self.training else 0.0
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and self.attn_mask_type == AttnMaskType.causal,
        dropout_p=dropout,
        # Megatron divides the scale by the layer's number here and multiplies by it inside softmax.
        scale=self.softmax_scale * (self.layer_number if self.config.apply_query_key_layer_scaling else 1),
        enable_gqa=q.size(1) != k.size(1),
    )
    if dropout and not self.config.sequence_parallel:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            context = attend()
    else:
        context = attend()
    return _to_sequence(group, context)


def _to_heads(group: Any, *parts: Tensor) -> list[Tensor]:
    """Each [s, b, heads, D] to [b, heads / C, S, D] in the order of the sequence, all in one all-to-all."""
    import torch
    from megatron.core.tensor_parallel.mappings import all_to_all

    ranks = group.size()
    # [C, s, b, heads / C * D]: first who gets it, then everything of theirs side by side.
    by_rank = [part.unflatten(2, (ranks, -1)).flatten(3).movedim(2, 0) for part in parts]
    received = all_to_all(group, torch.cat(by_rank, dim=-1))  # [C, s, b, ...]: now by who sent it
    whole = sequence_order(received).split([part.size(-1) for part in by_rank], dim=-1)
    return [x.unflatten(2, (-1, part.size(3))).permute(1, 2, 0, 3) for x, part in zip(whole, parts, strict=True)]


def _to_sequence(group: Any, context: Tensor) -> Tensor:
    """[b, heads / C, S, D] to [s, b, heads * D]."""
    from megatron.core.tensor_parallel.mappings import all_to_all

    by_rank = zigzag_order(context.permute(2, 0, 1, 3).flatten(2), group.size())  # [C, s, b, heads / C * D]
    received = all_to_all(group, by_rank)
    return received.movedim(0, 2).flatten(2).contiguous()


def _whole_mask(group: Any, mask: Tensor) -> Tensor:
    """Every rank's rows [b or 1, 1, s, S] gathered and put in order: [b or 1, 1, S, S] bool."""
    import torch

    rows = mask.to(torch.uint8).movedim(2, 0).contiguous()  # gloo and NCCL know no bool
    gathered = rows.new_empty((group.size(), *rows.shape))
    torch.distributed.all_gather_into_tensor(gathered.flatten(0, 1), rows, group=group)
    return sequence_order(gathered).movedim(0, 2).bool()
