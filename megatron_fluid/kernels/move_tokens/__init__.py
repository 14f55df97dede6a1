"""Dispatch and combine of token rows: Triton kernels."""
