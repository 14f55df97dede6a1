"""GPU kernels and the host functions that start them, a folder for each operation.

A folder holds the launcher (launch.py) with its CUDA source (kernel.cu), or the Triton kernels
(kernel.py). Each Triton kernel names its plain-torch reference in its docstring. `sm90` is what the
CUDA kernels for Hopper GPUs share; `flags` the waits of kernels that read from peers.
"""
