"""Kernels and how they are started, nothing else.

Triton's name their plain torch oracle in their docstrings. The experts' grouped GEMMs (grouped_gemm) are CUDA on Hopper GPUs:
grouped_gemm_sm90.cu, which hopper compiles at first use with NVRTC and keeps under the user's cache folder.
"""
