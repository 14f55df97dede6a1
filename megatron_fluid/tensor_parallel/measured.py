"""The fastest backend by shape, as measured; written by ``python -m benchmarks.tp_table``, not by hand.

An entry is (GPU, ranks, operation, M, N, K, backend): M, N, K of the GEMM that one rank runs, operation "gather" or "scatter". Where there
is no entry near a shape, a rule decides (megatron_fluid.tensor_parallel.choice).
"""

from __future__ import annotations

__all__ = ["MEASURED"]

MEASURED: tuple[tuple[str, int, str, int, int, int, str], ...] = (
    ("NVIDIA H200", 2, "gather", 1024, 6144, 49152, "copy_engine"),
    ("NVIDIA H200", 2, "gather", 2048, 6144, 49152, "fused"),
    ("NVIDIA H200", 2, "gather", 4096, 6144, 49152, "fused"),
    ("NVIDIA H200", 2, "gather", 8192, 6144, 49152, "fused"),
    ("NVIDIA H200", 2, "gather", 8192, 14336, 8192, "fused"),
    ("NVIDIA H200", 2, "scatter", 1024, 49152, 6144, "copy_engine"),
    ("NVIDIA H200", 2, "scatter", 2048, 49152, 6144, "copy_engine"),
    ("NVIDIA H200", 2, "scatter", 4096, 49152, 6144, "copy_engine"),
    ("NVIDIA H200", 2, "scatter", 8192, 8192, 14336, "copy_engine"),
    ("NVIDIA H200", 2, "scatter", 8192, 49152, 6144, "fused"),
    ("NVIDIA H200", 4, "gather", 1024, 3072, 49152, "fused"),
    ("NVIDIA H200", 4, "gather", 2048, 1280, 2048, "collective"),
    ("NVIDIA H200", 4, "gather", 2048, 1536, 4096, "collective"),
    ("NVIDIA H200", 4, "gather", 2048, 2560, 8192, "collective"),
    ("NVIDIA H200", 4, "gather", 2048, 3072, 49152, "fused"),
    ("NVIDIA H200", 4, "gather", 2048, 7168, 4096, "fused"),
    ("NVIDIA H200", 4, "gather", 2048, 9216, 12288, "copy_engine"),
    ("NVIDIA H200", 4, "gather", 2048, 12288, 12288, "fused"),
    ("NVIDIA H200", 4, "gather", 2048, 14336, 8192, "fused"),
    ("NVIDIA H200", 4, "gather", 4096, 3072, 49152, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 1280, 2048, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 1536, 4096, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 2560, 8192, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 3072, 49152, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 7168, 4096, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 7168, 8192, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 9216, 12288, "fused"),
    ("NVIDIA H200", 4, "gather", 8192, 12288, 12288, "copy_engine"),
    ("NVIDIA H200", 4, "gather", 8192, 14336, 8192, "fused"),
    ("NVIDIA H200", 4, "scatter", 1024, 49152, 3072, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 2048, 2048, 1024, "collective"),
    ("NVIDIA H200", 4, "scatter", 2048, 4096, 1024, "collective"),
    ("NVIDIA H200", 4, "scatter", 2048, 4096, 3584, "collective"),
    ("NVIDIA H200", 4, "scatter", 2048, 8192, 2048, "collective"),
    ("NVIDIA H200", 4, "scatter", 2048, 8192, 7168, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 2048, 12288, 3072, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 2048, 12288, 12288, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 2048, 49152, 3072, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 4096, 49152, 3072, "fused"),
    ("NVIDIA H200", 4, "scatter", 8192, 2048, 1024, "collective"),
    ("NVIDIA H200", 4, "scatter", 8192, 4096, 1024, "collective"),
    ("NVIDIA H200", 4, "scatter", 8192, 4096, 3584, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 8192, 8192, 2048, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 8192, 8192, 7168, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 8192, 12288, 3072, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 8192, 12288, 12288, "copy_engine"),
    ("NVIDIA H200", 4, "scatter", 8192, 49152, 3072, "copy_engine"),
)
