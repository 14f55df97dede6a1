"""Products of every expert's fp8 rows with its fp8 matrix, with the scales of both, in one launch.

On Hopper GPUs fp8_grouped_gemm_sm90.cu; on a CPU its reference in plain torch, for tests: a layer
asks `fp8_unsupported_reason` first. The casts: kernels/fp8_casts.py.

Shapes: N expert rows, El local experts, K depth, J width, P pitch of scales, at least N. K and J
are multiples of 128.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.cuda import kernel_build
from megatron_fluid.cuda.hopper_kernels import (
    FP8_GROUPED,
    HopperKernels,
    is_hopper,
    kernel_unit,
    multiprocessors,
)
from megatron_fluid.cuda.tensor_maps import BOXES, TensorMaps
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_reference import scaled_grouped_product
from megatron_fluid.kernels.grouped_gemm import Owners, host_ends

__all__ = [
    "CompandedRows",
    "Fp8Matrices",
    "Fp8Rows",
    "compile_fp8_ahead",
    "fp8_device_reason",
    "fp8_grouped_matmul",
    "fp8_sent_matmul",
    "fp8_unsupported_reason",
]

_KERNEL = "fp8_grouped"
_MOST_EXPERTS = 1024
_NUMBERS = struct.Struct("=13Q").pack_into


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


def fp8_grouped_matmul(
    x: Fp8Rows,
    weights: Fp8Matrices,
    offsets: Tensor,
    ends: Sequence[int] | None = None,
    programs: int | None = None,
) -> Tensor:
    """Return x[rows of e] @ weights[e].T in bf16 [N, J], summed in fp32.

    offsets: int32 [El] on the device; the rows of expert e end at offsets[e], and rows from
    offsets[-1] on are not written. ends: the offsets on the host, for tensors on a CPU. programs:
    upper bound on the SMs; None means all.

    Raises:
        ConfigError: widths, dtypes or numbers of experts or scales that do not match, another GPU.
    """
    _check(x, weights, offsets)
    rows, width = x.values.shape[0], weights.values.shape[1]
    if not x.values.is_cuda:
        ends = host_ends(offsets, ends)
        return scaled_grouped_product(*x, *weights, ends).to(torch.bfloat16)
    out = x.values.new_empty((rows, width), dtype=torch.bfloat16)
    if rows:
        _module(x.values.device.index).launch(x, weights, offsets, out, None, programs)
    return out


def fp8_sent_matmul(
    x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor, owners: Owners, programs: int | None = None
) -> None:
    """fp8_grouped_matmul with each row stored where `owners` says, as sent_matmul of
    kernels/grouped_gemm.py. On Hopper GPUs alone.

    Raises:
        ConfigError: as fp8_grouped_matmul, or origins that are not int32 or too few.
    """
    _check(x, weights, offsets)
    rows, origins = x.values.shape[0], owners.origins
    if origins.dtype != torch.int32 or origins.shape[0] < rows:
        found = f"{origins.dtype} {list(origins.shape)}"
        raise ConfigError.of("origins", found, f"torch.int32 [{rows}] or longer")
    if rows:
        _module(x.values.device.index).launch(x, weights, offsets, None, owners, programs)


def compile_fp8_ahead(device: torch.device) -> None:
    """Begin to compile the kernel for `device` in the background, if it runs it."""
    if device.type == "cuda" and fp8_device_reason(device) is None:
        kernel_build.start([kernel_unit(FP8_GROUPED, _KERNEL, torch.float8_e4m3fn)])


def _check(x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor) -> None:
    experts, width, depth = weights.values.shape
    if not x.values.dtype == weights.values.dtype == torch.float8_e4m3fn:
        found = f"{x.values.dtype} and {weights.values.dtype}"
        raise ConfigError.of("operands of an fp8 product", found, "torch.float8_e4m3fn")
    rows, found_depth = x.values.shape
    if found_depth != depth or depth & 127 or width & 127 or not depth:
        found = f"[{rows}, {found_depth}] and {list(weights.values.shape)}"
        raise ConfigError.of("widths of an fp8 product", found, "alike, multiples of 128")
    blocks, pitch = x.scales.shape
    wanted = (experts, width // 128, depth // 128)
    if blocks != depth // 128 or pitch < rows or weights.scales.shape != wanted:
        found = f"{list(x.scales.shape)} and {list(weights.scales.shape)}"
        allowed = f"[{depth // 128}, {rows} or more] and {list(wanted)}"
        raise ConfigError.of("scales of an fp8 product", found, allowed)
    if not all(t.is_contiguous() for t in (x.scales, *weights)):
        raise ConfigError.of("operands of an fp8 product", "strided tensors", "dense ones")
    apart, step = x.values.stride()
    if step != 1 or (apart | x.values.data_ptr()) & 15:  # what a tensor map takes
        found = f"strides {apart}, {step}, at {x.values.data_ptr():#x}"
        raise ConfigError.of("rows of an fp8 product", found, "dense, at multiples of 16 bytes")
    if offsets.dtype != torch.int32 or offsets.shape[0] != experts or experts > _MOST_EXPERTS:
        found = f"{offsets.dtype} {list(offsets.shape)}"
        allowed = f"torch.int32 [{experts}], of at most {_MOST_EXPERTS} experts"
        raise ConfigError.of("offsets", found, allowed)


class _Fp8Module(HopperKernels):
    """The kernel of fp8_grouped_gemm_sm90.cu on the current device."""

    threads = 512

    def __init__(self) -> None:
        super().__init__(FP8_GROUPED, torch.float8_e4m3fn)
        self._own, self._both, self._result = TensorMaps(1), TensorMaps(len(BOXES)), TensorMaps(1)
        self._numbers = (ctypes.c_uint64 * 13)()
        base = ctypes.addressof(self._numbers)
        maps = (self._own.address, self._both.address, self._result.address)
        whole = (*maps, *(base + 8 * i for i in range(13)))
        self._parameters = (ctypes.c_void_p * len(whole))(*whole)

    def launch(
        self, x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor, out: Tensor | None,
        owners: Owners | None, programs: int | None,
    ) -> None:  # fmt: skip
        """Start the kernel on the current stream: into `out`, or to where `owners` says."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.launch(x, weights, offsets, out, owners, programs)
            return
        experts, width, depth = weights.values.shape
        to, buffers, origins, shift = 0, 0, 0, 0
        if owners is not None:
            buffers, shift = owners.buffers.data_ptr(), owners.shift
            origins = owners.origins.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:
            self._own.fill(0, weights.values, 128, 128)
            self._both.fill_boxes(0, x.values)
            if out is not None:
                self._result.fill(0, out, 64)
                to = out.data_ptr()
            pointers = (to, buffers, offsets.data_ptr(), origins)
            scales = (x.scales.data_ptr(), weights.scales.data_ptr(), x.scales.shape[1])
            sizes = (experts, x.values.shape[0], width, depth, shift)
            _NUMBERS(self._numbers, 0, *pointers, *scales, *sizes, self._counter(stream))
            sms = multiprocessors(self._device) if programs is None else programs
            self._start(_KERNEL, sms, stream, self._parameters)


@functools.cache
def _module(device: int) -> _Fp8Module:
    if (reason := fp8_device_reason(torch.device("cuda", device))) is not None:
        raise ConfigError.of("device of an fp8 product", f"cuda:{device}", reason)
    with torch.cuda.device(device):
        return _Fp8Module()
