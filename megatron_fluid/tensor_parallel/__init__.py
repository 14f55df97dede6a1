"""Tensor-parallel linears whose communication is overlapped with their GEMM.

`ops` has `all_gather_matmul` and `matmul_reduce_scatter`: checks and gradients. `choice` picks a
backend: copy_engine, fused or collective. `gemm` is the product.
"""

from megatron_fluid.tensor_parallel.choice import BACKENDS
from megatron_fluid.tensor_parallel.ops import all_gather_matmul, matmul_reduce_scatter

__all__ = ["BACKENDS", "all_gather_matmul", "matmul_reduce_scatter"]
