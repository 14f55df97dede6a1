"""Grouped GEMM of fp8 experts with block scales: forward and dgrad."""
