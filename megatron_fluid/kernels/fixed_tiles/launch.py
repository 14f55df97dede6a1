"""Products of which a row's bits depend neither on the other rows nor on their number.

cuBLAS, torch's grouped GEMM and a CPU's BLAS choose tiles, and with them the order of sums, by the
number of rows. On a GPU a Triton kernel has tiles of one size (kernel.py); on a CPU elements are
summed column by column of the rows, by additions and multiplications that torch rounds alike
wherever an element lies. The kernels of kernels/grouped_gemm need neither: whatever their tiles, an
element is summed by the same instructions in the same order.

Shapes: N expert rows, El local experts, widths in, out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = [
    "FixedTiles",
    "fixed_tile_linear",
    "fixed_tile_matmul",
    "product_by_kernel",
    "row_by_row",
]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FixedTiles(Sequence[Tensor]):
    """El matrices [in, out] of which grouped_matmul computes products by fixed_tile_matmul."""

    def __init__(self, matrices: Tensor | Sequence[Tensor]) -> None:
        self.matrices = matrices

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, index: Any) -> Any:
        return self.matrices[index]


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a function of each element or row, with bits that do not depend on the number
    of rows. A CPU computes the last elements of a tensor by other instructions than the others: on
    it the function gets the rows one by one. [N, ...]"""
    if x.device.type != "cpu":
        return function(x)
    return torch.cat([function(row) for row in x.split(1)])


def fixed_tile_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    offsets: Tensor,
    ends: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x[rows of e] @ weights[e]: x [N, in], El times [in, out] -> [N, out], summed in fp32
    or better, with the bits of each row the same in any batch. Arguments as for grouped_matmul.

    dtype: of the result, None for that of x.

    Raises:
        ConfigError: on a GPU, a dtype other than bf16, fp16 and fp32.
    """
    out = x.new_empty((x.shape[0], weights[0].shape[1]), dtype=dtype)
    if not out.numel():
        return out
    if x.is_cuda:
        product_by_kernel(x, weights, offsets, out)
        return out
    start, wide = 0, torch.promote_types(x.dtype, torch.float32)
    for expert, end in enumerate(offsets.tolist() if ends is None else ends):
        rows, matrix = x[start:end].to(wide), weights[expert].to(wide)
        total = rows.new_zeros(rows.shape[0], matrix.shape[1])
        for column, line in zip(rows.unbind(1), matrix.unbind(0), strict=True):
            # Not addcmul, whose last elements are rounded in another way than the others.
            total += column[:, None] * line
        out[start:end], start = total, end
    return out


def product_by_kernel(
    x: Tensor, weights: Tensor | Sequence[Tensor], offsets: Tensor, out: Tensor
) -> None:
    """fixed_tile_matmul into out [N, out], by the Triton kernel."""
    if x.dtype not in _DTYPES or weights[0].dtype != x.dtype:
        found = f"{x.dtype} rows, {weights[0].dtype} weights"
        raise ConfigError.of("batch_invariant: operands", found, "both of bf16, fp16 or fp32")
    x, first, experts = x.contiguous(), weights[0], len(weights)
    if isinstance(weights, Tensor):
        apart = torch.arange(experts, device=x.device) * weights.stride(0)
    else:
        places = tuple((m.data_ptr() - first.data_ptr()) // x.itemsize for m in weights)
        apart = _on_device(places, x.device)
    (rows, depth), width = x.shape, out.shape[1]
    tiles = {"BM": 32, "BN": 64, "BK": 64 if x.itemsize == 2 else 32}
    strides = {"STEP_IN": first.stride(0), "STEP_OUT": first.stride(1)}
    constants = {"IN": depth, "OUT": width, **strides}
    constants |= {"E": experts, "EP": 1 << (experts - 1).bit_length(), **tiles}
    programs, columns = -(-rows // tiles["BM"]), -(-width // tiles["BN"])
    _launcher()(programs, (x, first, apart, offsets, out, rows), columns, **constants)


@functools.lru_cache(4096)
def _on_device(places: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [El]. Made once: the copy waits for the device, and a capture allows none."""
    with torch.inference_mode(False):
        return torch.tensor(places, device=device)


@functools.cache
def _launcher() -> Any:
    from megatron_fluid.cuda.triton_launch import Launcher
    from megatron_fluid.kernels.fixed_tiles.kernel import fixed_tile_kernel

    return Launcher(fixed_tile_kernel, 4)


def fixed_tile_linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., in] times weight [out, in], as fixed_tile_matmul: [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    offsets = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    out = fixed_tile_matmul(rows, weight.t()[None], offsets, [rows.shape[0]], dtype)
    return out.view(*x.shape[:-1], weight.shape[0])
