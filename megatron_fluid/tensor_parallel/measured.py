"""The fastest backend by shape, as measured; written by ``python -m benchmarks.tp_table``, not by hand.

An entry is (GPU, ranks, operation, M, N, K, backend): M, N, K of the GEMM that one rank runs, operation "gather" or "scatter". Where there
is no entry near a shape, a rule decides (megatron_fluid.tensor_parallel.choice).
"""

from __future__ import annotations

__all__ = ["MEASURED"]

MEASURED: tuple[tuple[str, int, str, int, int, int, str], ...] = ()
