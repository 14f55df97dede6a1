"""Self-attention over a context-parallel group, its exchanges overlapped with its projections.

From the bottom: layouts (who holds which heads and positions), tables, packed (heads in a buffer),
attention_kernels; exchange (protocol; rounds, collective, symmetric; registry); overlap (the
layer's forward and backward over any exchange), exchanged (the exchange alone, for frameworks that
project themselves); config, layer.
"""

from megatron_fluid.attention.config import AttentionConfig
from megatron_fluid.attention.layer import SelfAttention, sum_gradients
from megatron_fluid.attention.packed import Rotary

__all__ = ["AttentionConfig", "Rotary", "SelfAttention", "sum_gradients"]
