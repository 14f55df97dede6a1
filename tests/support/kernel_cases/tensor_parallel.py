"""Kernels of tensor parallelism: the GEMM that waits or signals, in both layouts of the weight, and
the sum of slots."""

from __future__ import annotations

from typing import Any

from megatron_fluid.kernels.flagged_gemm import flagged_gemm_kernel
from megatron_fluid.kernels.flags import wait_for_peers_kernel
from megatron_fluid.kernels.reduce_slots import reduce_slots_kernel
from megatron_fluid.tensor_parallel.signal_wait import TILES
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

_WGMMA = "wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16"
# 16 bytes at a time, past the L1, which knows nothing of a peer's writes
_CP_ASYNC = "cp.async.cg.shared.global"


def _gemm(
    name: str, gather: bool, stored_kn: bool, tile: int, wanted: tuple[str, ...]
) -> KernelCase:
    # A stride of one is a constant to Triton.
    constants: dict[str, Any] = {
        "W": 4,
        "GATHER": gather,
        "HAS_BIAS": False,
        "K": 8192,
        **TILES[tile].constants,
    }
    constants["stride_bn" if stored_kn else "stride_bk"] = 1
    pointers = ("*bf16:16",) * 6 + ("*i32:16",) * 2 + ("*i64:16", "*i32:16")
    return KernelCase(
        name,
        flagged_gemm_kernel,
        (*pointers, "i32", "i32:16", "i32:16", "i32:16", "i32", "i32", "i64"),
        constants,
        num_warps=TILES[tile].warps,
        wanted=(_WGMMA.format(TILES[tile].constants["BN"]), _CP_ASYNC, *wanted),
    )


CASES = [
    _gemm("gather_nk", True, False, 0, ("ld.global.sys.acquire.b32",)),
    _gemm("gather_kn", True, True, 0, ("ld.global.sys.acquire.b32",)),
    _gemm("gather_nk_small", True, False, 1, ("ld.global.sys.acquire.b32",)),
    _gemm("scatter_nk", False, False, 0, ("atom.global.sys.release.add",)),
    _gemm("scatter_kn", False, True, 0, ("atom.global.sys.release.add",)),
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
