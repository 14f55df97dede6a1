"""Weight gradients of every expert from fp8 operands, with the scales of both, in one launch.

On Hopper GPUs alone (kernel.cu), where they can be added to fp32 ones in place. Reference:
turned_weight_grads of tests/support/fp8_reference.py.

The sum of a weight gradient runs along an expert's rows, so a scale is for 128 of these, and both
operands are turned: their rows are features, and what is contiguous are the tokens.

Shapes: N expert rows, El local experts, A and B features of the two operands, P places. An expert's
rows take the next places from a multiple of 128 on, in their order; the places behind its last row,
up to the next multiple, hold zeros. `blocks_of` counts the blocks of 128 places. A, B and P are
multiples of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.cuda.tensor_maps import in_boxes, token_boxes
from megatron_fluid.kernels.fp8_grouped_gemm.launch import (
    FP8_GROUPED,
    fp8_device_reason,
    fp8_kernels,
)
from megatron_fluid.kernels.operands import refuse
from megatron_fluid.kernels.sm90.launch import Source

__all__ = [
    "FP8_WEIGHT_GRADS",
    "TurnedRows",
    "add_fp8_weight_grads",
    "blocks_of",
    "compile_fp8_ahead",
    "fp8_weight_grads",
]

_WEIGHTS, _SUMS = "fp8_weights", "fp8_weight_sums"
FP8_WEIGHT_GRADS = Source(
    files("megatron_fluid.kernels.fp8_weight_grads") / "kernel.cu",
    {_WEIGHTS: "false", _SUMS: "true"},
    threads=512,
    numbers=9,
)
_MOST_EXPERTS = 1024
_OPERANDS = (
    "torch.float8_e4m3fn left [A, P] and right [B, P], torch.float32 scales [P / 128, A] and "
    "[P / 128, B], torch.int32 offsets [El], contiguous and 16-byte aligned; A, B and P multiples "
    f"of 128, El 1 to {_MOST_EXPERTS}"
)
_ADDED = torch.float32, torch.int64  # dtypes of what is added to, and of addresses


class TurnedRows(NamedTuple):
    """Expert rows in e4m3, turned: feature f of the row at place p is values[f, p] * scales[p //
    128, f].

    Attributes:
        values: e4m3 [W, P], dense
        scales: fp32 [P / 128, W], dense
    """

    values: Tensor
    scales: Tensor


def blocks_of(rows: int, experts: int) -> int:
    """The most blocks of 128 places that so many rows of so many experts take."""
    return (rows + 127 * min(rows, experts)) // 128


def fp8_weight_grads(left: TurnedRows, right: TurnedRows, offsets: Tensor) -> Tensor:
    """Return left[:, rows of e] @ right[:, rows of e].T in bf16 [El, A, B], summed in fp32, zero
    for an expert without rows.

    left: of A features, right: of B. offsets: int32 [El] on the device; the rows of expert e end at
    offsets[e].

    Raises:
        ConfigError: widths, dtypes or numbers of places, scales or experts that do not match,
            another device.
    """
    _check(left, right, offsets)
    shape = (offsets.shape[0], left.values.shape[0], right.values.shape[0])
    if not left.values.shape[1]:
        return left.values.new_zeros(shape, dtype=torch.bfloat16)
    out = left.values.new_empty(shape, dtype=torch.bfloat16)
    _launch(left, right, offsets, out, None)
    return out


def add_fp8_weight_grads(
    left: TurnedRows,
    right: TurnedRows,
    offsets: Tensor,
    addresses: Tensor,
    outputs: Tensor | Sequence[Tensor],
    overwrite: bool = False,
) -> None:
    """outputs[e] += left[:, rows of e] @ right[:, rows of e].T, summed in fp32: El fp32 matrices
    [A, B].

    addresses: int64 [El] on the device, where the outputs begin. The kernel reads, adds and writes:
    streams must order calls for the same outputs. Outputs of experts without rows are not touched.
    overwrite: outputs[e] = instead of +=, zero for an expert without
    rows; what was there is not read. `takes_main_grads` of kernels/grouped_gemm says whether the
    outputs fit. The other arguments are those of fp8_weight_grads.

    Raises:
        ConfigError: as fp8_weight_grads, or outputs or addresses of another number, shape or dtype.
    """
    _check(left, right, offsets)
    experts, shape = offsets.shape[0], (left.values.shape[0], right.values.shape[0])
    first, numbers = outputs[0], (len(outputs), addresses.shape[0])
    dtypes = first.dtype, addresses.dtype
    if numbers != (experts, experts) or first.shape != shape or dtypes != _ADDED:
        allowed = f"{experts} of torch.float32 {list(shape)}, as many torch.int64 addresses"
        what = f"fp8 weight gradients with {numbers[0]} outputs"
        refuse(what, allowed, output=first, addresses=addresses)
    if left.values.shape[1]:
        _launch(left, right, offsets, None, addresses, overwrite)
    elif overwrite:
        for output in outputs:
            output.zero_()


def compile_fp8_ahead(device: torch.device, weight_grads: bool) -> None:
    """Begin to compile the kernels of fp8 experts for `device` in the background, if it runs them;
    with `weight_grads` these, too. Returns at once; the first use waits for the rest."""
    if fp8_device_reason(device) is None:
        for source in (FP8_GROUPED, FP8_WEIGHT_GRADS) if weight_grads else (FP8_GROUPED,):
            source.compile_ahead(source.kernels, torch.float8_e4m3fn)


def _check(left: TurnedRows, right: TurnedRows, offsets: Tensor) -> None:
    (high, places), (wide, others) = left.values.shape, right.values.shape
    fits = (
        left.values.dtype == right.values.dtype == torch.float8_e4m3fn
        and left.scales.dtype == right.scales.dtype == torch.float32
        and places == others
        and not (high | wide | places) & 127
        and high > 0 < wide
        and left.scales.shape == (places // 128, high)
        and right.scales.shape == (places // 128, wide)
        and all(t.is_contiguous() and not t.data_ptr() & 15 for t in (*left, *right))
        and offsets.dtype == torch.int32
        and 0 < offsets.shape[0] <= _MOST_EXPERTS
    )
    if not fits:
        operands = {"left": left.values, "left's scales": left.scales, "right": right.values}
        operands |= {"right's scales": right.scales, "offsets": offsets}
        refuse("fp8 weight gradients", _OPERANDS, **operands)


def _launch(
    left: TurnedRows, right: TurnedRows, offsets: Tensor, out: Tensor | None,
    addresses: Tensor | None, overwrite: bool = False,
) -> None:  # fmt: skip
    """Start a kernel on the current stream: into `out`, or onto the matrices at `addresses`, or
    with `overwrite` into these."""
    (high, places), wide = left.values.shape, right.values.shape[0]
    sums = 0 if addresses is None else addresses.data_ptr()
    result = None if out is None else in_boxes(out, 64)
    maps = (in_boxes(right.values, 128, 128), token_boxes(left.values), (result,))
    pointers = (offsets.data_ptr(), sums, left.scales.data_ptr(), right.scales.data_ptr())
    sizes = (offsets.shape[0], high, wide, places)
    kernels = fp8_kernels(FP8_WEIGHT_GRADS, left.values.device)
    name = _WEIGHTS if addresses is None else _SUMS
    kernels.launch(name, maps, (*pointers, *sizes, overwrite))
