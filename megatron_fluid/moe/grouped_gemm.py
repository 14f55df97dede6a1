"""Grouped GEMMs of our own kernels (megatron_fluid.kernels.grouped_gemm), as functions on tensors.

They take what torch._grouped_mm takes and more: tails of few rows, sums into fp32 gradients, an activation on the way
out. Which of the two is faster depends on the shape; a Schedule chooses.

Shapes: N expert rows, El local experts, F ffn, widths in, out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_fluid.kernels.activation import ACTIVATIONS
from megatron_fluid.kernels.grouped_gemm import (
    grouped_gated_kernel,
    grouped_matmul_kernel,
    grouped_weight_grad_kernel,
)
from megatron_fluid.kernels.launch import Launch

__all__ = ["TILES", "Tile", "add_weight_grads", "can_multiply", "gated_matmul", "tiled_matmul"]


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of one step of a program, its warps, its pipeline's stages, and programs an SM."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_sm: int


# By name, for benchmarks: one large program an SM, or two of which one stores while the other multiplies.
TILES = {"large": Tile(128, 256, 64, 8, 4, 1), "pair": Tile(128, 128, 64, 4, 3, 2)}
_INTERPRETED = Tile(16, 16, 16, 4, 1, 1)  # small enough for tests without a GPU
_GROUP = 8
_launches: dict[Hashable, Launch] = {}


def _launch(kernel: Any, constants: dict[str, object], tile: Tile, *dtypes: torch.dtype) -> Launch:
    key = (kernel, tile, dtypes, *constants.values())
    found = _launches.get(key)
    if found is None:
        found = _launches[key] = Launch(kernel, tile.warps, constants, num_stages=tile.stages)
    return found


def _tile(name: str, x: Tensor) -> Tile:
    return TILES[name] if x.is_cuda else _INTERPRETED


def can_multiply(x: Tensor, *others: Tensor) -> bool:
    """Whether our kernels take rows x and these: the last dimension dense, the others and the beginning on 16-byte
    boundaries (for TMA), not empty; on a GPU rows of 16-bit floats, for which the tiles are sized.
    """
    if x.is_cuda and x.element_size() != 2:
        return False
    return all(
        t.numel() > 0
        and t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
        for t in (x, *others)
    )


def tiled_matmul(x: Tensor, weights: Tensor, offsets: Tensor, programs: int, tile: str = "large") -> Tensor:
    """x[rows of e] @ weights[e]: [N, in], [El, in, out] with one of the two widths dense -> [N, out].

    offsets int32 [El] on the device; rows at and after offsets[-1] are not written. `programs`: SMs to take.
    """
    shape = _tile(tile, x)
    out_in = weights.stride(1) == 1
    matrices = weights.transpose(1, 2) if out_in else weights
    experts, inner, outer = weights.shape
    out = x.new_empty(x.shape[0], outer)
    block = [1, shape.columns, shape.depth] if out_in else [1, shape.depth, shape.columns]
    constants: dict[str, object] = {"K": inner, "J": outer, "EL": experts, "OUT_IN": out_in, "BM": shape.rows}
    constants |= {"BJ": shape.columns, "BK": shape.depth, "GROUP": _GROUP}
    arguments = (*_rows(x, shape), TensorDescriptor.from_tensor(matrices, block), out, offsets)
    _launch(grouped_matmul_kernel, constants, shape, x.dtype)((programs * shape.per_sm, 1), arguments)
    return out


def _rows(x: Tensor, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor]:
    whole, half = ([rows, tile.depth] for rows in (tile.rows, tile.rows // 2))
    return TensorDescriptor.from_tensor(x, whole), TensorDescriptor.from_tensor(x, half)


def gated_matmul(
    x: Tensor,
    stack: Tensor,
    prob: Tensor,
    offsets: Tensor,
    activation: str,
    out: Tensor,
    keep: bool,
    programs: int,
    tile: str = "large",
) -> Tensor | None:
    """out [N, F] = act(gate) * up * prob with [gate | up] = x[rows of e] @ stack[e].T; returns [gate | up] if `keep`.

    stack [El, 2F, in], gate first; prob fp32 [N]; activation: a gated one of megatron_fluid.kernels.activation.
    """
    shape = _tile(tile, x)
    experts, wide, inner = stack.shape
    columns = shape.columns // 2  # of each of the two
    hidden = x.new_empty(x.shape[0], wide) if keep else None
    constants: dict[str, object] = {"K": inner, "F": wide // 2, "EL": experts, "CODE": ACTIVATIONS[activation][0]}
    constants |= {"KEEP": keep, "BM": shape.rows, "BF": columns, "BK": shape.depth, "GROUP": _GROUP}
    weights = TensorDescriptor.from_tensor(stack, [1, columns, shape.depth])
    arguments = (*_rows(x, shape), weights, out if hidden is None else hidden, prob, out, offsets)
    _launch(grouped_gated_kernel, constants, shape, x.dtype)((programs * shape.per_sm, 1), arguments)
    return hidden


def add_weight_grads(
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    addresses: Tensor,
    outputs: Sequence[Tensor],
    programs: int,
    overwrite: bool = False,
    tile: str = "large",
) -> None:
    """outputs[e] += left[rows of e].T @ right[rows of e], in the outputs' dtype (or = with `overwrite`).

    left [N, A], right [N, B]; outputs: El dense matrices [A, B], whose addresses (int64 [El], on the device) the kernel
    takes.
    """
    shape = _tile(tile, left)
    constants: dict[str, object] = {"A": left.shape[1], "B": right.shape[1], "EL": len(outputs)}
    constants |= {"ACCUMULATE": not overwrite, "BA": shape.rows, "BB": shape.columns, "BN": shape.depth}
    arguments = (
        TensorDescriptor.from_tensor(left, [shape.depth, shape.rows]),
        TensorDescriptor.from_tensor(right, [shape.depth, shape.columns]),
        *(addresses, outputs[0], offsets),
    )
    launch = _launch(grouped_weight_grad_kernel, constants, shape, left.dtype, outputs[0].dtype)
    launch((programs * shape.per_sm, 1), arguments)
