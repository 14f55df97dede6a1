"""Triton kernels of tensor parallelism: the wait for peers and the sum of slots."""

from __future__ import annotations

from megatron_fluid.kernels.flags import wait_for_peers_kernel
from megatron_fluid.kernels.move_tokens.reduce_slots import reduce_slots_kernel
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

CASES = [
    KernelCase(
        "wait_for_peers",
        wait_for_peers_kernel,
        ("*i32:16", "*i64:16", "*i32:16", "i32", "i64", "i32", "i32", "i32", "i64"),
        {"W": 4},
        num_warps=1,
    ),
    KernelCase(
        "reduce_slots",
        reduce_slots_kernel,
        ("*bf16:16", "*bf16:16", "*bf16:16", "i32", "i32"),
        {"W": 4, "HAS_BIAS": False, "ALIGNED": True, "BLOCK": 4096},
        num_warps=8,
        wanted=("ld.global.v4.b32", "st.global.v4.b32"),
    ),
]
