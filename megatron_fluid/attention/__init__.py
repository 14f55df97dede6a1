"""Self-attention over a context-parallel group, its exchanges overlapped with its projections.

layouts (who holds what) -> packed (heads in a buffer), core_attention (the kernel) -> exchange
(transport: rounds; tables, head_domain, symmetric: NVLink) -> overlap, plain -> layer.
core_exchange: the exchange alone, for frameworks that project themselves.
"""

from megatron_fluid.attention.layer import SelfAttention, sum_gradients
from megatron_fluid.attention.packed import Rotary

__all__ = ["Rotary", "SelfAttention", "sum_gradients"]
