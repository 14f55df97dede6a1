"""Casts to fp8 by the kernels of kernels/fp8_casts, which says what the numbers are.

Shapes: N rows, H a width, F ffn, El experts; widths are multiples of 128. `count`: int32 [1] on the
device, how many of the rows there are; None for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launcher
from megatron_fluid.kernels.flags import INTERPRETED
from megatron_fluid.kernels.fp8_casts.quantize import (
    cast_rows_kernel,
    cast_weights_kernel,
    restore_rows_kernel,
    swiglu_backward_cast_kernel,
    swiglu_cast_kernel,
)
from megatron_fluid.kernels.fp8_grouped_gemm.launch import CompandedRows, Fp8Matrices, Fp8Rows
from megatron_fluid.kernels.operands import refuse

__all__ = ["cast_rows", "cast_weights", "restore_rows", "swiglu_backward_cast", "swiglu_cast"]

_E4M3 = torch.float8_e4m3fn
_ROWS, _BLOCKS = 8, 4  # of a program: what 128 threads hold in registers
_BACKWARD_ROWS = 4  # a tile of it has six values an element
_cast = Launcher(cast_rows_kernel, 4)
_restore = Launcher(restore_rows_kernel, 4)
_cast_weights = Launcher(cast_weights_kernel, 8)
_swiglu = Launcher(swiglu_cast_kernel, 4)
_swiglu_backward = Launcher(swiglu_backward_cast_kernel, 4)


def _check(x: Tensor, multiple: int = 128) -> None:
    if x.dim() != 2 or x.shape[1] % multiple or not x.is_contiguous():
        refuse("an fp8 cast", f"dense [N, a multiple of {multiple}]", rows=x)


def _count(x: Tensor, count: Tensor | None) -> Tensor:
    if count is not None:
        return count
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


def _empty(like: Tensor, width: int) -> Fp8Rows:
    rows = like.shape[0]
    values = like.new_empty((rows, width), dtype=_E4M3)
    return Fp8Rows(values, like.new_empty((width // 128, rows), dtype=torch.float32))


def _grid(rows: int, blocks: int, of_rows: int) -> tuple[int, int]:
    return -(-rows // of_rows), -(-blocks // _BLOCKS)


def cast_rows(x: Tensor, count: Tensor | None = None) -> Fp8Rows:
    """x [N, H], a scale for each 1 x 128."""
    _check(x)
    rows, width = x.shape
    out = _empty(x, width)
    programs, columns = _grid(rows, width // 128, _ROWS)
    constants = {"WIDTH": width, "ROWS": _ROWS, "BLOCKS": _BLOCKS, "ROUND": INTERPRETED}
    _cast(programs, (x, _count(x, count), *out, rows), columns, **constants)
    return out


def restore_rows(x: Fp8Rows, count: Tensor | None = None) -> Tensor:
    """bf16 [N, H], exactly what x stands for.

    Raises:
        ConfigError: rows of values that do not begin a multiple of 128 bytes apart.
    """
    rows, width = x.values.shape
    apart, step = x.values.stride()
    if step != 1 or apart % 128:
        refuse("restore_rows", "rows a multiple of 128 bytes apart", values=x.values)
    out = x.values.new_empty((rows, width), dtype=torch.bfloat16)
    programs, columns = _grid(rows, width // 128, _ROWS)
    constants = {"WIDTH": width, "ROWS": _ROWS, "BLOCKS": _BLOCKS}
    given = (*x, _count(x.values, count), out, x.scales.shape[1], apart // 128)
    _restore(programs, given, columns, **constants)
    return out


def cast_weights(w: Tensor, out: tuple[Fp8Matrices, Fp8Matrices]) -> None:
    """w bf16 [El, J, K], dense matrices, into out[0] [El, J, K] and, each transposed, out[1]
    [El, K, J], a scale for each 128 x 128."""
    experts, j, k = w.shape
    # Of fp32 weights Triton 3.6 makes wrong transposes.
    fits = w.dtype == torch.bfloat16 and w.stride()[1:] == (k, 1) and w.stride(0) % 8 == 0
    if j % 128 or k % 128 or not fits:
        refuse("an fp8 cast", "dense bf16 matrices, sides multiples of 128", weights=w)
    first, turned = out
    given = (w, first.values, turned.values, first.scales, turned.scales, w.stride(0) // 8)
    _cast_weights(experts * (j // 128), given, k // 128, J=j, K=k, ROUND=INTERPRETED)


def swiglu_cast(
    h: Tensor, probs: Tensor, keep: bool, count: Tensor | None = None
) -> tuple[Fp8Rows, CompandedRows | None]:
    """silu(h[:, :F]) * h[:, F:] * probs in fp8 [N, F], and with `keep` h [N, 2F] companded to int8.

    h [N, 2F], probs fp32 [N] or longer.
    """
    _check(h, 256)
    rows, width = h.shape[0], h.shape[1] // 2
    out = _empty(h, width)
    kept = None
    if keep:
        values = torch.empty_like(h, dtype=torch.int8)
        kept = CompandedRows(values, h.new_empty((2 * width // 128, rows), dtype=torch.float32))
    programs, columns = _grid(rows, width // 128, _ROWS)
    constants = {"F": width, "ROWS": _ROWS, "BLOCKS": _BLOCKS, "KEEP": keep}
    given = (h, probs, _count(h, count), *out, *(out if kept is None else kept), rows)
    _swiglu(programs, given, columns, **constants, ROUND=INTERPRETED)
    return out, kept


def swiglu_backward_cast(
    h: Tensor | CompandedRows,
    da: Tensor,
    probs: Tensor,
    count: Tensor | None = None,
    in_fp8: bool = False,
) -> tuple[Fp8Rows, Tensor | None, Tensor | Fp8Rows, Tensor]:
    """(dh in fp8 [N, 2F], dh in bf16, a [N, F], dprobs fp32 [N]): a in bf16, in da's memory. With
    `in_fp8` there is no dh in bf16, and a is in fp8.

    h [N, 2F], da [N, F] the gradient of a, probs fp32 [N] or longer.
    """
    _check(da)
    rows, width = da.shape
    kept = isinstance(h, CompandedRows)
    values, scales = h if isinstance(h, CompandedRows) else (h, probs)
    dh_cast = _empty(da, 2 * width)
    dh = None if in_fp8 else da.new_empty((rows, 2 * width))
    a = _empty(da, width) if in_fp8 else da
    dprobs = torch.empty(rows, dtype=torch.float32, device=da.device)
    # What a kernel does not write in its precision stands for what it does not have.
    a_cast = a if isinstance(a, Fp8Rows) else dh_cast
    outputs = (da if dh is None else dh, *dh_cast, da, *a_cast, dprobs)
    given = (values, scales, probs, da, _count(da, count), *outputs, rows)
    constants = {"F": width, "ROWS": _BACKWARD_ROWS, "BLOCKS": _BLOCKS, "KEPT": kept}
    constants |= {"IN_FP8": in_fp8, "ROUND": INTERPRETED}
    _swiglu_backward(-(-rows // _BACKWARD_ROWS), given, **constants)
    return dh_cast, dh, a, dprobs
