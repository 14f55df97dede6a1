"""Casts to fp8, as kernels/fp8_casts launches them for deepseek-v3."""

from __future__ import annotations

from megatron_fluid.kernels.fp8_casts.packed_rows import (
    pack_rows_kernel,
    packed_width,
    unpack_scales_kernel,
)
from megatron_fluid.kernels.fp8_casts.quantize import (
    cast_rows_kernel,
    cast_weights_kernel,
    restore_rows_kernel,
    swiglu_backward_cast_kernel,
    swiglu_cast_kernel,
)
from megatron_fluid.kernels.fp8_casts.turns import turn_rows_kernel
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

_ROWS = {"WIDTH": 7168, "ROWS": 8, "BLOCKS": 4}
_PACKED = {"PITCH": 2 * packed_width(7168)}
_EXACT = {"ROUND": False}
_CAST = "cvt.rn.satfinite.e4m3x2.f32"
_X, _SCALES, _FP8, _COUNT = "*bf16:16", "*fp32:16", "*fp8e4nv:16", "*i32:16"
_KEPT = "*i8:16"

CASES = [
    KernelCase(
        "cast rows",
        cast_rows_kernel,
        (_X, _COUNT, _FP8, _SCALES, "i32"),
        _ROWS | _EXACT,
        wanted=(_CAST, "ld.global.v4", "st.global.v4"),
    ),
    KernelCase(
        "restore rows",
        restore_rows_kernel,
        (_FP8, _SCALES, _COUNT, _X, "i32", "i32"),
        _ROWS,
        wanted=("ld.global.v4", "st.global.v4"),
    ),
    KernelCase(
        "pack rows",
        pack_rows_kernel,
        (_X, _FP8, _SCALES, "i32"),
        _ROWS | _PACKED | _EXACT,
        wanted=(_CAST, "ld.global.v4", "st.global.v4"),
    ),
    KernelCase(
        "scales of packed rows",
        unpack_scales_kernel,
        (_SCALES, _SCALES, "i32"),
        {"WIDTH": 7168, "ROWS": 64, "BLOCKS": 16} | _PACKED,
        wanted=("ld.global.v4",),
    ),
    KernelCase(
        "cast weights",
        cast_weights_kernel,
        (_X, _FP8, _FP8, _SCALES, _SCALES, "i32"),
        {"J": 4096, "K": 7168} | _EXACT,
        num_warps=8,
        wanted=(_CAST, "ld.global.v4"),
    ),
    *(
        KernelCase(
            f"swiglu and cast, {keep=}",
            swiglu_cast_kernel,
            (_X, _SCALES, _COUNT, _FP8, _SCALES, _KEPT if keep else _FP8, _SCALES, "i32"),
            {"F": 2048, "ROWS": 8, "BLOCKS": 4, "KEEP": keep} | _EXACT,
            wanted=(_CAST, "ld.global.v4"),
        )
        for keep in (False, True)
    ),
    *(
        KernelCase(
            f"backward of swiglu and cast, {kept=}, {in_fp8=}",
            swiglu_backward_cast_kernel,
            (
                *(_KEPT if kept else _X, _SCALES, _SCALES, _X, _COUNT),
                *(_X, _FP8, _SCALES, _X, _FP8, _SCALES, _SCALES, "i32"),
            ),
            {"F": 2048, "ROWS": 4, "BLOCKS": 4, "KEPT": kept, "IN_FP8": in_fp8} | _EXACT,
            wanted=(_CAST,),
            spills=8 if kept else 0,  # one value of a tile that has six for each element
        )
        for kept in (False, True)
        for in_fp8 in (False, True)
    ),
    *(
        KernelCase(
            f"turn rows of {experts} experts",
            turn_rows_kernel,
            (*(_FP8, _SCALES, _COUNT, _COUNT, _SCALES), *("i32", "i32", "i32")),
            {"WIDTH": 7168, "FEATURES": 64, "EXPERTS": experts, "PADDED": padded, "STEP": 4}
            | {"NEIGHBOURS": 4}
            | _EXACT,
            num_warps=4,
            wanted=(_CAST, "max.NaN.f32", "st.global.v4"),
        )
        for experts, padded in ((32, 32), (1000, 1024))
    ),
]
