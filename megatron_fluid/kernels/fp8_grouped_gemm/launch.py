"""Products of every expert's fp8 rows with its fp8 matrix, with the scales of both, in one launch.

On Hopper GPUs alone (kernel.cu): a layer asks `fp8_unsupported_reason` first. The casts:
kernels/fp8_casts. Reference: scaled_grouped_product of tests/support/fp8_reference.py.

Shapes: N expert rows, El local experts, K depth, J width, P pitch of scales, at least N. K and J
are multiples of 128.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.cuda.tensor_maps import in_boxes, token_boxes
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm.launch import Owners
from megatron_fluid.kernels.operands import refuse
from megatron_fluid.kernels.sm90.launch import HopperKernels, Source, hopper_kernels

__all__ = [
    "FP8_GROUPED",
    "CompandedRows",
    "Fp8Matrices",
    "Fp8Rows",
    "fp8_device_reason",
    "fp8_kernels",
    "fp8_grouped_matmul",
    "fp8_sent_matmul",
    "fp8_unsupported_reason",
]

_KERNEL = "fp8_grouped"
FP8_GROUPED = Source(
    files("megatron_fluid.kernels.fp8_grouped_gemm") / "kernel.cu",
    {_KERNEL: "FORWARD"},
    threads=512,
    numbers=12,
)
_MOST_EXPERTS = 1024
_OPERANDS = (
    "torch.float8_e4m3fn rows [N, K] at multiples of 16 bytes, scales [K / 128, N or more], "
    "torch.float8_e4m3fn weights [El, J, K], scales [El, J / 128, K / 128], torch.int32 offsets "
    f"[El], contiguous; K and J multiples of 128, El at most {_MOST_EXPERTS}"
)


class Fp8Rows(NamedTuple):
    """Expert rows in e4m3: row n is values[n] * scales[:, n], block by block.

    Attributes:
        values: e4m3 [N, K], dense rows that may lie apart
        scales: fp32 [K / 128, P], dense
    """

    values: Tensor
    scales: Tensor


class CompandedRows(NamedTuple):
    """fc1's output as it is kept for the backward: with q = values[n], row n is q * |q| *
    scales[:, n], block by block.

    Attributes:
        values: int8 [N, K], dense
        scales: fp32 [K / 128, P], dense
    """

    values: Tensor
    scales: Tensor


class Fp8Matrices(NamedTuple):
    """El matrices in e4m3, laid out as the product reads them, K contiguous.

    Attributes:
        values: e4m3 [El, J, K], dense
        scales: fp32 [El, J / 128, K / 128], dense
    """

    values: Tensor
    scales: Tensor


def fp8_device_reason(device: torch.device) -> str | None:
    """Return why fp8 products cannot run on `device`, or None if they can."""
    if device.type != "cuda":
        return f"fp8 experts are for Hopper GPUs, and tensors are on the {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    if is_hopper(index):
        return None
    return f"fp8 experts are for Hopper GPUs, and {torch.cuda.get_device_name(index)} is none"


def fp8_unsupported_reason(
    hidden: int, ffn: int, activation: str, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why experts of these widths, with parameters of `dtype`, cannot be computed in fp8, or
    None if they can. activation: its name, where it is built in."""
    if dtype != torch.bfloat16:
        return f"fp8 experts are cast from bf16 parameters, and these are {dtype}"
    if activation != "swiglu":
        return f"fp8 experts have the activation swiglu, and this is {activation}"
    if hidden % 128 or ffn % 128:
        return f"a scale is for 128 columns, and the widths are {hidden} and {ffn}"
    return fp8_device_reason(device)


def fp8_grouped_matmul(x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor) -> Tensor:
    """Return x[rows of e] @ weights[e].T in bf16 [N, J], summed in fp32.

    offsets: int32 [El] on the device; the rows of expert e end at offsets[e], and rows from
    offsets[-1] on are not written.

    Raises:
        ConfigError: widths, dtypes or numbers of experts or scales that do not match, another
            device.
    """
    _check(x, weights, offsets)
    rows, width = x.values.shape[0], weights.values.shape[1]
    out = x.values.new_empty((rows, width), dtype=torch.bfloat16)
    if rows:
        _launch(x, weights, offsets, out, None)
    return out


def fp8_sent_matmul(x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor, owners: Owners) -> None:
    """fp8_grouped_matmul with each row stored where `owners` says, as sent_matmul of
    kernels/grouped_gemm.

    Raises:
        ConfigError: as fp8_grouped_matmul, or origins that are not int32 or too few.
    """
    _check(x, weights, offsets)
    rows, origins = x.values.shape[0], owners.origins
    if origins.dtype != torch.int32 or origins.shape[0] < rows:
        refuse("a sent fp8 product", f"torch.int32 [{rows}] or longer", origins=origins)
    if rows:
        _launch(x, weights, offsets, None, owners)


def _check(x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor) -> None:
    (rows, depth), (apart, step) = x.values.shape, x.values.stride()
    (experts, width, weights_depth), (blocks, pitch) = weights.values.shape, x.scales.shape
    fits = (
        x.values.dtype == weights.values.dtype == torch.float8_e4m3fn
        and depth == weights_depth == 128 * blocks > 0
        and not width & 127
        and pitch >= rows
        and weights.scales.shape == (experts, width // 128, blocks)
        and step == 1
        and not (apart | x.values.data_ptr()) & 15  # what a tensor map takes
        and all(t.is_contiguous() for t in (x.scales, *weights))
        and offsets.dtype == torch.int32
        and offsets.shape[0] == experts <= _MOST_EXPERTS
    )
    if not fits:
        operands = {"rows": x.values, "scales": x.scales, "weights": weights.values}
        operands |= {"weights' scales": weights.scales, "offsets": offsets}
        refuse("an fp8 product", _OPERANDS, **operands)


def _launch(
    x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor, out: Tensor | None, owners: Owners | None
) -> None:
    """Start the kernel on the current stream: into `out`, or to where `owners` says."""
    experts, width, depth = weights.values.shape
    to, result, buffers, origins, shift = 0, None, 0, 0, 0
    if out is not None:
        to, result = out.data_ptr(), in_boxes(out, 64)
    if owners is not None:
        buffers, shift = owners.buffers.data_ptr(), owners.shift
        origins = owners.origins.data_ptr()
    maps = (in_boxes(weights.values, 128, 128), token_boxes(x.values), (result,))
    pointers = (to, buffers, offsets.data_ptr(), origins)
    scales = (x.scales.data_ptr(), weights.scales.data_ptr(), x.scales.shape[1])
    sizes = (experts, x.values.shape[0], width, depth, shift)
    kernels = fp8_kernels(FP8_GROUPED, x.values.device)
    kernels.launch(_KERNEL, maps, (*pointers, *scales, *sizes))


@functools.cache
def fp8_kernels(source: Source, device: torch.device) -> HopperKernels:
    """Return the kernels of a source for e4m3 on `device`.

    Raises:
        ConfigError: it is no Hopper GPU.
    """
    if (reason := fp8_device_reason(device)) is not None:
        raise ConfigError.of("device of an fp8 product", str(device), reason)
    return hopper_kernels(source, torch.float8_e4m3fn, device.index)
