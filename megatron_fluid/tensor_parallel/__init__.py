"""Tensor-parallel linears whose communication hides behind their GEMM.

`all_gather_matmul` and `matmul_reduce_scatter` (ops) check and differentiate; choice picks
copy_engine, flagged, fused or collective; gemm is the product. expert_ops has the same two for
experts that are split over the ranks.
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
