"""TMA tensor maps (CUtensorMap), encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.cuda import driver_api

__all__ = ["BOXES", "GATED", "Box", "TensorMaps", "View", "in_boxes", "token_boxes"]

type Box = tuple[int, int]  # rows and columns that one load or store moves
# A tensor's address, dtype, shape and strides, and the boxes that its maps are for.
type View = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], tuple[Box, ...]]

BOXES = (32, 64, 128)  # rows of a box of tokens, as kernels load them
# 64 columns and 64 rows of both halves of [El, 2F, K], gate above up, in turns of 8.
GATED: Box = 0, 64
_BYTES = 128  # of a map
# CUtensorMapDataType; fp8 moves as bytes.
_DTYPES = {torch.bfloat16: 9, torch.float16: 6, torch.float8_e4m3fn: 0}
# By columns of a box: CU_TENSOR_MAP_SWIZZLE_128B, _64B. 128 columns are those of fp8.
_SWIZZLE = {128: 3, 64: 3, 32: 2}
_PROMOTE_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_NINE = struct.Struct("=9Q").pack_into
_TOKEN_BOXES = {
    size: tuple((rows, 128 // size) for rows in BOXES) for size in (1, 2)
}  # by bytes of an element


def _sides(*sides: int) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(sides))(*sides)


# The sides of a box, innermost first, and the steps of all.
_SIDES = {(rows, columns): _sides(columns, rows, 1) for rows in BOXES for columns in _SWIZZLE}
_SIDES[GATED] = _sides(64, 8, 2, 8, 1)
_ONES = _sides(1, 1, 1, 1, 1)


class TensorMaps:
    """Memory for `count` tensor maps one behind the other, as a kernel's parameter holds them; each
    may be filled again.

    A map describes a tensor of 2 or 3 dimensions with dense rows, read or written in boxes of rows
    of 64 columns (swizzled by 128 bytes) or 32 (by 64 bytes) of 16 bits, or 128 of fp8. What lies
    outside the tensor reads as zero and is not written. A map holds an address and does not keep
    the tensor alive.
    """

    def __init__(self, count: int) -> None:
        memory = ctypes.create_string_buffer(_BYTES * count + 64)
        offset = -ctypes.addressof(memory) % 64
        self.address = ctypes.addressof(memory) + offset
        self._bytes = memoryview(memory).cast("B")[offset:]

    def fill(self, index: int, view: View) -> None:
        """Describe `view` in map `index`, and in those behind it if it has several boxes.

        Raises:
            FluidError: TMA cannot address the tensor.
        """
        encoded = _encoded(view)
        first = _BYTES * index
        self._bytes[first : first + len(encoded)] = encoded


def in_boxes(tensor: Tensor, rows: int, columns: int = 64) -> View:
    """View `tensor` in boxes of `rows` rows and of 64 or 32 columns, 128 of fp8."""
    boxes = ((rows, columns),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), boxes


def token_boxes(tensor: Tensor) -> View:
    """View the rows `tensor` in boxes of all BOXES, a map for each."""
    boxes = _TOKEN_BOXES[tensor.element_size()]
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), boxes


class _Encoder:
    """cuTensorMapEncodeTiled with arguments that are made once, since to convert each of the twelve
    takes longer than the call.

    By ctypes: cuda.bindings encodes into memory of its own, which may lie off the 64-byte boundary
    that the driver requires (NVIDIA/cuda-python#1692).
    """

    def __init__(self) -> None:
        self._function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        self._memory = ctypes.create_string_buffer(_BYTES * len(BOXES) + 64)
        self._offset = -ctypes.addressof(self._memory) % 64
        self._bytes = memoryview(self._memory).cast("B")[self._offset :]
        # Up to five sizes, innermost first, and up to four pitches, in bytes.
        self._numbers, self._tensor = (ctypes.c_uint64 * 9)(), ctypes.c_void_p()
        self._calls: dict[tuple[torch.dtype, tuple[Box, ...]], list[tuple[Any, ...]]] = {}
        self._lock = threading.Lock()

    def encode(self, view: View) -> bytes:
        address, dtype, shape, strides, boxes = view
        with self._lock:
            calls = self._calls.get((dtype, boxes))
            if calls is None:
                calls = self._calls[dtype, boxes] = self._arguments(dtype, boxes)
            if boxes[0] == GATED:
                # The rows are viewed as [F / 8, 2, 8]. The pitches do not grow from dimension to
                # dimension, which the driver does not ask of plain tiles.
                (experts, height, depth), (expert, row, _) = shape, strides
                sizes = (depth, 8, 2, height // 16, experts)
                pitches = (row * 2, height // 2 * row * 2, 8 * row * 2, expert * 2)
                _NINE(self._numbers, 0, *sizes, *pitches)
            else:
                size = dtype.itemsize
                if len(shape) == 2:
                    height, width = shape
                    count, row = 1, strides[0] * size
                    plane = height * row
                else:
                    count, height, width = shape
                    plane, row = strides[0] * size, strides[1] * size
                _NINE(self._numbers, 0, width, height, count, 0, 0, row, plane, 0, 0)
            self._tensor.value = address
            for arguments in calls:
                status = self._function(*arguments)
                if status:
                    self._repeat(status, arguments)
            return self._bytes[: _BYTES * len(calls)].tobytes()

    def _arguments(self, dtype: torch.dtype, boxes: tuple[Box, ...]) -> list[tuple[Any, ...]]:
        """Of the calls for a tensor in these boxes, a map behind the other."""
        first, rank = ctypes.addressof(self._numbers), 5 if boxes[0] == GATED else 3
        sizes, pitches = ctypes.c_void_p(first), ctypes.c_void_p(first + 40)
        start = ctypes.addressof(self._memory) + self._offset
        return [
            (
                ctypes.c_void_p(start + _BYTES * index), _DTYPES[dtype], rank, self._tensor, sizes,
                pitches, _SIDES[box], _ONES, 0, _SWIZZLE[box[1]], _PROMOTE_256B, 0,
            )
            for index, box in enumerate(boxes)
        ]  # fmt: skip

    def _repeat(self, status: int, arguments: tuple[Any, ...]) -> None:
        """Repeat a call that failed in this thread's context, if it has none."""
        if status == driver_api.NO_CONTEXT:
            driver_api.make_context_current(torch.cuda.current_device())
            status = self._function(*arguments)
        if status:
            rank = arguments[2]
            sizes, pitches = self._numbers[:rank], self._numbers[5 : 4 + rank]
            tensor = f"sizes {sizes}, innermost first, pitches of {pitches} bytes"
            what = f"cuTensorMapEncodeTiled of {tensor}, at {self._tensor.value or 0:#x}"
            driver_api.raise_error(what, status)


_encoder = functools.cache(_Encoder)


# An allocator that serves the same sizes in every step gives few different addresses, and to look
# a map up takes less time than to encode it.
@functools.lru_cache(maxsize=8192)
def _encoded(view: View) -> bytes:
    return _encoder().encode(view)
