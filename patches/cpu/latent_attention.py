"""The core of multi-latent attention without Transformer Engine. Megatron's local core attention
cannot have heads of queries and keys that are wider than those of values.

This module imports Megatron, so it is imported only when a model is built.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

__all__ = ["LatentDotProductAttention"]


class LatentDotProductAttention(DotProductAttention):
    """Megatron's local attention for heads of two sizes.

    Args:
        k_channels: width of a head of queries and keys.
        v_channels: width of a head of values, and of the output.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        if k_channels is not None and v_channels is not None:
            self.channels = k_channels, v_channels  # read by the context-parallel patch
        super().__init__(*args, **kwargs)
        if k_channels is not None and v_channels is not None:
            self.take_channels(k_channels, v_channels)  # Megatron drops the one without them

    def take_channels(self, k_channels: int, v_channels: int) -> None:
        """Set the widths of heads."""
        self.hidden_size_per_attention_head = k_channels
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the base class does, of tensors that need not be contiguous.

        Args:
            query, key: [S, B, heads, k_channels].
            value: [S, B, heads, v_channels].

        Returns:
            [S, B, heads * v_channels].
        """
        return super().forward(query, key.contiguous(), value.contiguous(), *args, **kwargs)
