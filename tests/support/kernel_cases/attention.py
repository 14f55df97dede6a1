"""The kernels of the attention exchange, at the shape of Mixtral-8x7B on 4 ranks."""

from __future__ import annotations

import triton.language as tl

from megatron_fluid.kernels.head_exchange.launch import (
    arrive_heads_kernel,
    arrive_rows_kernel,
    pack_heads_kernel,
    push_heads_kernel,
    push_rows_kernel,
)
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

_WIDE_ACCESS = ("ld.global.v4.b32", "st.global.v4.b32")
_SHAPE = {"W": 4, "SLOTS": 12, "D": 128, "DP": 128, "ROWS": 32}
_STRIDES = ("i32",) * 9
_NARROW = ("st.global.b16", "ld.global.b16", "st.global.b32", "st.global.v2.b32")


def _arrive(name: str, half: int, norm: bool) -> KernelCase:
    weight = ("*bf16:16",) * 2
    return KernelCase(
        name,
        arrive_heads_kernel,
        ("*bf16:16",) * 3 + ("*i32:16",) * 2 + weight + ("*fp32:16",) * 2 + ("i32", "i32"),
        {
            "EPS": 1e-6,
            "W": 4,
            "SLOTS": 12,
            "HEADS": 4,
            "D": 128,
            "HALF": half,
            "HALF_P": max(half, 1),
            "REST_P": 1 if half else 128,
            "ROWS": 32,
            "NORM": norm,
            "RAW": norm,
            "INTERLEAVED": False,
            "WIDE": tl.float32,
        },
        wanted=_WIDE_ACCESS,
        unwanted=("st.global.b16", "st.global.b32", "st.global.v2.b32"),
    )


CASES = [
    KernelCase(
        "push_heads",
        push_heads_kernel,
        ("*bf16:16",) * 3 + ("*i64:16", "*i32:16", "*i32:16", "i32", "i32", "i32") + _STRIDES,
        _SHAPE | {"VEC": 8},
        wanted=_WIDE_ACCESS,
        unwanted=_NARROW,
    ),
    _arrive("arrive_heads", 0, False),
    _arrive("arrive_heads_rotary", 64, False),
    _arrive("arrive_heads_rotary_norm", 64, True),
    *(
        KernelCase(
            "pack_heads_norm" if norm else "pack_heads",
            pack_heads_kernel,
            ("*bf16:16",) * 5
            + ("*fp32:16", "*i32:16", "*bf16:16", "*bf16:16", "*fp32:16", "*fp32:16")
            + ("i32", "i32", "i32", *_STRIDES),
            {
                "EPS": 1e-6,
                "SLOTS": 12,
                "D": 128,
                "HALF": 64,
                "HALF_P": 64,
                "REST_P": 1,
                "VEC": 8,
                "ROWS": 32,
                "NORM": norm,
                "INTERLEAVED": False,
                "WIDE": tl.float32,
            },
            wanted=_WIDE_ACCESS,
            unwanted=("st.global.b16", "st.global.v2.b32"),
        )
        for norm in (False, True)
    ),
    KernelCase(
        "push_rows",
        push_rows_kernel,
        ("*bf16:16", "*i64:16", "*i32:16", "i32", "i32", "i32"),
        _SHAPE,
        wanted=_WIDE_ACCESS,
        unwanted=_NARROW,
    ),
    *(
        KernelCase(
            f"arrive_rows_{sources}",
            arrive_rows_kernel,
            ("*bf16:16",) * 3 + ("*i32:16",) * 3 + ("i32",) * 4,
            {"SLOTS": 12, "K": sources, "D": 128, "DP": 128, "ROWS": 32, "WIDE": tl.float32},
            wanted=_WIDE_ACCESS,
            unwanted=_NARROW,
        )
        for sources in (1, 2)
    ),
]
