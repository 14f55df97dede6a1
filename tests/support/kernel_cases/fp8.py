"""Casts to fp8, as kernels/fp8_casts launches them for deepseek-v3."""

from dataclasses import replace

import torch

from megatron_fluid.kernels.fp8_casts import launch as casts
from megatron_fluid.kernels.fp8_casts.packed_rows import pack_rows, unpack_rows
from megatron_fluid.kernels.fp8_casts.turns import turn_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Matrices
from tests.support.kernel_cases import KernelCase, cases_of

HIDDEN, FFN, ROWS = 7168, 2048, 64
_CAST, _LOADS, _STORES = "cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4", "st.global.v4"
_WANTED = {
    "cast_rows_kernel": (_CAST, _LOADS, _STORES), "restore_rows_kernel": (_LOADS, _STORES),
    "pack_rows_kernel": (_CAST, _LOADS, _STORES), "unpack_scales_kernel": (_LOADS,),
    "cast_weights_kernel": (_CAST, _LOADS), "swiglu_cast_kernel": (_CAST, _LOADS),
    "swiglu_backward_cast_kernel": (_CAST,), "turn_rows_kernel": (_CAST, "max.NaN.f32", _STORES),
}  # fmt: skip


def _matrices(rows: int, columns: int) -> Fp8Matrices:
    values = torch.empty(1, rows, columns, dtype=torch.float8_e4m3fn)
    return Fp8Matrices(values, torch.empty(1, rows // 128, columns // 128))


def _calls() -> None:
    bf16 = torch.bfloat16
    x, h, da = (torch.empty(ROWS, width, dtype=bf16) for width in (HIDDEN, 2 * FFN, FFN))
    probs = torch.empty(ROWS)
    cast = casts.cast_rows(x)
    casts.restore_rows(cast)
    unpack_rows(pack_rows(x), HIDDEN)
    weights = torch.empty(1, 2 * FFN, HIDDEN, dtype=bf16)
    casts.cast_weights(weights, (_matrices(2 * FFN, HIDDEN), _matrices(HIDDEN, 2 * FFN)))
    for keep in (False, True):
        _, kept = casts.swiglu_cast(h, probs, keep)
        given = h if kept is None else kept
        casts.swiglu_backward_cast(given, da, probs)
        casts.swiglu_backward_cast(given, da, probs, in_fp8=True)
    for experts in (32, 1000):
        turn_rows(cast, torch.zeros(experts, dtype=torch.int32))


def _judged(case: KernelCase) -> KernelCase:
    # One value of a tile that has six for each element.
    spills = 8 if case.constants.get("KEPT") else 0
    return replace(case, wanted=_WANTED[case.kernel_name], spills=spills)


CASES = [_judged(case) for case in cases_of({"deepseek-v3": _calls})]
