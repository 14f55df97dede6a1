"""Tensor-parallel linears whose communication hides behind their GEMM.

`all_gather_matmul` and `matmul_reduce_scatter` (ops) check and differentiate; choice picks copy_engine or collective; gemm is the product.
"""

from megatron_fluid.tensor_parallel.choice import BACKENDS, close_backends
from megatron_fluid.tensor_parallel.ops import all_gather_matmul, matmul_reduce_scatter

__all__ = ["BACKENDS", "all_gather_matmul", "close_backends", "matmul_reduce_scatter"]
