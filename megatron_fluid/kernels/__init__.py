"""GPU kernels and the host functions that start them.

Each Triton kernel names its reference in plain torch in its docstring. On Hopper GPUs the grouped
GEMMs of experts (grouped_gemm) and the fused GEMMs of tensor parallelism (fused_gemm) are CUDA on
top of sm90.cuh; megatron_fluid.kernels.sm90.launch compiles them at first use.
"""
