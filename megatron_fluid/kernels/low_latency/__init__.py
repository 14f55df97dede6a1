"""The decode-time MoE all-to-all: Triton kernels."""
