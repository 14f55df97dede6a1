"""Self-attention over a context-parallel group, its exchanges overlapped with its projections.

layouts (who holds what) -> packed (heads in a buffer), core_attention (the kernel) -> exchange (transport) -> overlap, plain -> layer.
"""

from megatron_fluid.attention.layer import SelfAttention, sum_gradients
from megatron_fluid.attention.packed import Rotary

__all__ = ["Rotary", "SelfAttention", "sum_gradients"]
