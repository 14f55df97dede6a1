"""Tensor-parallel linears whose communication is overlapped with their GEMM.

`ops` has `all_gather_matmul` and `matmul_reduce_scatter`: checks and gradients. `choice` picks a
backend: copy_engine, flagged (signal_wait), fused or collective. `gemm` is the product.
`expert_ops` has the same two operations for experts that are split over the ranks.
"""

from megatron_fluid.tensor_parallel.choice import BACKENDS
from megatron_fluid.tensor_parallel.expert_ops import (
    RoutedRows,
    all_gather_grouped_matmul,
    grouped_matmul_reduce_scatter,
    plan_rows,
)
from megatron_fluid.tensor_parallel.ops import all_gather_matmul, matmul_reduce_scatter

__all__ = [
    "BACKENDS",
    "RoutedRows",
    "all_gather_grouped_matmul",
    "all_gather_matmul",
    "grouped_matmul_reduce_scatter",
    "matmul_reduce_scatter",
    "plan_rows",
]
