"""Triton kernels and nothing else, each with its plain torch oracle named in its docstring."""
