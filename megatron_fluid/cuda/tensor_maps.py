"""TMA tensor maps (CUtensorMap), encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from megatron_fluid.cuda import driver_api

__all__ = ["BOXES", "TensorMaps"]

BOXES = (32, 64, 128)  # rows of a box of tokens, as sm90.cuh loads them
# CUtensorMapDataType; fp8 moves as bytes.
_DTYPES = {torch.bfloat16: 9, torch.float16: 6, torch.float8_e4m3fn: 0}
# By columns of a box: CU_TENSOR_MAP_SWIZZLE_128B, _64B. 128 columns are those of fp8.
_SWIZZLE = {128: 3, 64: 3, 32: 2}
_PROMOTE_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_NINE = struct.Struct("=9Q").pack_into

# The sides of a box, innermost first, and its swizzle.
_Box = tuple[ctypes.Array[ctypes.c_uint32], int]


def _sides(*sides: int) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(sides))(*sides)


_ONES = _sides(1, 1, 1, 1, 1)
_GATED_BOX: _Box = _sides(64, 8, 2, 8, 1), _SWIZZLE[64]
_BOXES: dict[tuple[int, int], _Box] = {
    (rows, columns): (_sides(columns, rows, 1), _SWIZZLE[columns])
    for rows, columns in (
        *((32, 64), (64, 64), (128, 64), (64, 32), (32, 32)),
        *((32, 128), (64, 128), (128, 128)),
    )
}
_TOKEN_BOXES = {
    size: tuple(_BOXES[rows, 128 // size] for rows in BOXES) for size in (1, 2)
}  # by bytes of an element


class TensorMaps:
    """Memory for `count` tensor maps one behind the other, as a kernel's parameter holds them; each
    may be filled anew.

    A map describes a tensor of 2 or 3 dimensions with dense rows, read or written in boxes of rows
    of 64 columns (swizzled by 128 bytes) or 32 (by 64 bytes) of 16 bits, or 128 of fp8. What lies
    outside the tensor reads as zero and is not written. A map holds an address and does not keep
    the tensor alive.

    Arguments of the driver's function that do not fit a C int are ctypes objects that are made once
    and set: to convert each of the twelve by argtypes takes longer than the call.
    """

    def __init__(self, count: int) -> None:
        self._memory = ctypes.create_string_buffer(128 * count + 64)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % 64
        self._maps = [ctypes.c_void_p(self.address + 128 * i) for i in range(count)]
        # Up to five sizes, innermost first, and up to four pitches, in bytes.
        self._numbers = (ctypes.c_uint64 * 9)()
        base = ctypes.addressof(self._numbers)
        self._sizes, self._pitches = ctypes.c_void_p(base), ctypes.c_void_p(base + 40)
        self._tensor = ctypes.c_void_p()
        self._function = driver_api.entry("cuTensorMapEncodeTiled")

    def fill(self, index: int, tensor: Tensor, rows: int, columns: int = 64) -> None:
        """Map `index` describes `tensor`, in boxes of `rows` rows and `columns` (64 or 32; 128 of
        fp8)."""
        self._describe(tensor)
        self._encode(index, tensor.dtype, 3, _BOXES[rows, columns])

    def fill_boxes(self, index: int, tensor: Tensor) -> None:
        """Maps `index` and following describe the tokens `tensor`, one for each of BOXES."""
        self._describe(tensor)
        for size, box in enumerate(_TOKEN_BOXES[tensor.element_size()]):
            self._encode(index + size, tensor.dtype, 3, box)

    def fill_at(
        self, index: int, address: int, shape: tuple[int, int], dtype: torch.dtype, rows: int
    ) -> None:
        """Map `index` describes the dense matrix at `address`."""
        height, width = shape
        _NINE(self._numbers, 0, width, height, 1, 0, 0, width * 2, height * width * 2, 0, 0)
        self._tensor.value = address
        self._encode(index, dtype, 3, _BOXES[rows, 64])

    def fill_halves(self, weights: Tensor) -> None:
        """The first map describes [El, 2F, K], gate above up, in boxes of 64 columns and 64 rows of
        both in turns of 8.

        The rows are viewed as [F / 8, 2, 8]. The pitches do not grow from dimension to dimension,
        which the driver does not ask of plain tiles.
        """
        experts, rows, depth = weights.shape
        expert, row, _ = weights.stride()
        sizes = (depth, 8, 2, rows // 16, experts)
        pitches = (row * 2, rows // 2 * row * 2, 8 * row * 2, expert * 2)
        _NINE(self._numbers, 0, *sizes, *pitches)
        self._tensor.value = weights.data_ptr()
        self._encode(0, weights.dtype, 5, _GATED_BOX)

    def _describe(self, tensor: Tensor) -> None:
        shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
        numbers = self._numbers
        if len(shape) == 2:
            (height, width), pitch = shape, strides[0] * size
            _NINE(numbers, 0, width, height, 1, 0, 0, pitch, height * pitch, 0, 0)
        else:
            count, height, width = shape
            pitches = strides[1] * size, strides[0] * size
            _NINE(numbers, 0, width, height, count, 0, 0, *pitches, 0, 0)
        self._tensor.value = tensor.data_ptr()

    def _encode(self, index: int, dtype: torch.dtype, dimensions: int, box: _Box) -> None:
        sides, swizzle = box
        arguments = (
            self._maps[index], _DTYPES[dtype], dimensions, self._tensor, self._sizes,
            self._pitches, sides, _ONES, 0, swizzle, _PROMOTE_256B, 0,
        )  # fmt: skip
        status = self._function(*arguments)
        if status:
            sizes, pitches = self._numbers[:dimensions], self._numbers[5 : 4 + dimensions]
            tensor = f"sizes {sizes}, innermost first, pitches of {pitches} bytes"
            what = f"cuTensorMapEncodeTiled of {tensor}, at {self._tensor.value or 0:#x}"
            device = torch.cuda.current_device()
            driver_api.retry_with_context(status, what, device, self._function, *arguments)
