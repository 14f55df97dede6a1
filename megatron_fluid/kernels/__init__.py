"""Kernels and how they are started, nothing else.

Triton's name their plain torch oracle in their docstrings. On Hopper GPUs the experts' grouped
GEMMs (grouped_gemm) and the GEMMs of tensor parallelism with their communication (fused_gemm) are
CUDA, made of the parts in sm90.cuh, which hopper compiles at first use with NVRTC and keeps under
the user's cache folder.
"""
