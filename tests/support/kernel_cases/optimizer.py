"""The optimizer's step: wide accesses to addresses that come out of a table."""

from __future__ import annotations

import triton.language as tl

from megatron_fluid.kernels.adam import adam_kernel
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

_NUMBERS = ("i32",) * 9
_SHAPE = {"DECOUPLED": True, "BLOCK": 2048, "PLAIN": False}

CASES = [
    KernelCase(
        f"adam into {name}",
        adam_kernel,
        ("*i64:16", "*i32:16", "*fp32:16", *_NUMBERS),
        {"KIND": kind, **_SHAPE},
        num_warps=8,
        wanted=("ld.global.v4.b32", "st.global.v4.b32", "fma.rn.ftz.f32", "rcp.approx.ftz"),
        unwanted=("div.full", "div.rn"),
    )
    for name, kind in (("bf16", tl.bfloat16), ("fp16", tl.float16), ("fp32", None))
]
