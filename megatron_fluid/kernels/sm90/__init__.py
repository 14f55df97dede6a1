"""What the CUDA kernels for Hopper GPUs share: sm90.cuh, the wgmma instructions, launches."""
