"""One GEMM of a tensor-parallel linear: plain, transposed weight, bias, fp8 with scales.

Shapes: A ``[M, K]``, B ``[K, N]`` or, with ``transpose_b``, ``[N, K]`` (the layout of
``nn.Linear.weight``), C ``[M, N]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = ["FP8_DTYPES", "Gemm", "Product"]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Product(Protocol):
    """What the backends ask of a multiplication: `Gemm` here, products with the experts' weights in
    expert_gemm.py."""

    @property
    def n(self) -> int:
        """Columns of C."""

    @property
    def bias(self) -> Tensor | None: ...

    def dtype_for(self, a: Tensor) -> torch.dtype:
        """dtype of C for this A."""

    def out_rows(self, rows: int) -> int:
        """Rows of C that so many rows of A give."""

    def without_bias(self) -> Product: ...

    def into(self, a: Tensor) -> Callable[[Tensor, Tensor, int], None]:
        """A function of (a block of rows of A, its C, the number of its first row) that fills C."""

    def __call__(self, a: Tensor) -> Tensor:
        """C of the whole A."""


@dataclass(frozen=True)
class Gemm:
    """How C is made from A and B; checked once, then applied to any block of rows of A.

    Args:
        b: ``[K, N]``, or ``[N, K]`` with ``transpose_b``.
        transpose_b: B is stored as ``nn.Linear`` stores its weight.
        bias: ``[N]`` in the dtype of C, or where A is not fp8 in A's own; added once to C.
        scale_a: fp32, fp8 operands only: one element, or one a row ``[M, 1]``.
        scale_b: fp32, fp8 operands only: one element, or one a column ``[1, N]`` (both operands
            scaled alike).
        out_dtype: dtype of C; A's own unless A is fp8, then bf16.
    """

    b: Tensor
    transpose_b: bool = False
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    out_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.b.dim() != 2:
            raise ConfigError(
                f"b: found {self.b.dim()} dimensions, allowed: 2, [K, N] or with transpose_b [N, K]"
            )
        fp8 = self.b.dtype in FP8_DTYPES
        if fp8 != (self.scale_a is not None) or fp8 != (self.scale_b is not None):
            raise ConfigError(
                f"scale_a, scale_b: found {self.scale_a is not None}, {self.scale_b is not None} "
                f"for operands of {self.b.dtype}; "
                "allowed: both for fp8 operands, neither for others"
            )
        scales = [s.numel() for s in (self.scale_a, self.scale_b) if s is not None]
        if fp8 and (scales[0] == 1) != (scales[1] == 1):
            raise ConfigError(
                f"scale_a, scale_b: found {scales[0]} and {scales[1]} elements; "
                "allowed: one element each, or one a row of A and one a column of B"
            )
        if (
            self.scale_b is not None
            and self.scale_b.numel() != 1
            and self.scale_b.shape != (1, self.n)
        ):
            raise ConfigError(
                f"scale_b: found shape {tuple(self.scale_b.shape)}, allowed: one element, or (1, "
                f"{self.n})"
            )
        if self.bias is not None and self.bias.shape != (self.n,):
            raise ConfigError(f"bias: found shape {tuple(self.bias.shape)}, allowed: ({self.n},)")
        if self.bias is not None:
            object.__setattr__(
                self, "bias", self.bias.contiguous()
            )  # kernels read it by its address alone

    @property
    def k(self) -> int:
        return self.b.shape[1 if self.transpose_b else 0]

    @property
    def n(self) -> int:
        return self.b.shape[0 if self.transpose_b else 1]

    @property
    def b_kn(self) -> Tensor:
        """B as ``[K, N]``, a view."""
        return self.b.t() if self.transpose_b else self.b

    @property
    def row_scaled(self) -> bool:
        """A has one scale a row, so a block of rows needs its own block of scales."""
        return self.scale_a is not None and self.scale_a.numel() != 1

    def dtype_for(self, a: Tensor) -> torch.dtype:
        """dtype of C for this A. Raises ConfigError where A does not fit B, or the bias fits
        neither A nor C."""
        if a.dim() != 2 or a.shape[1] != self.k:
            raise ConfigError(
                f"a: found shape {tuple(a.shape)}, allowed: two dimensions, the second {self.k} (K "
                "of b)"
            )
        if (a.dtype in FP8_DTYPES) != (self.b.dtype in FP8_DTYPES) or (
            a.dtype not in FP8_DTYPES and a.dtype != self.b.dtype
        ):
            raise ConfigError(
                f"a, b: found {a.dtype} and {self.b.dtype}, allowed: the same dtype, or both fp8"
            )
        dtype = self.out_dtype or (torch.bfloat16 if a.dtype in FP8_DTYPES else a.dtype)
        if self.bias is not None and self.bias.dtype != dtype:
            if a.dtype in FP8_DTYPES:
                raise ConfigError(f"bias: found {self.bias.dtype}, allowed: {dtype}, as C")
            if self.bias.dtype != a.dtype:
                raise ConfigError(
                    f"bias: found {self.bias.dtype}, allowed: {a.dtype} as A, or {dtype} as C"
                )
        return dtype

    def out_rows(self, rows: int) -> int:
        """Rows of C that so many rows of A give: as many."""
        return rows

    def without_bias(self) -> Gemm:
        """The same product without its bias (a reduction adds the bias once, at the end)."""
        return replace(self, bias=None)

    def into(self, a: Tensor) -> Callable[[Tensor, Tensor, int], None]:
        """A function of (a block of rows of A, its C, the number of its first row) that fills C;
        checked once, quick to call.

        Args:
            a: any tensor of A's dtype and width.
        """
        dtype, b = self.dtype_for(a), self.b_kn
        if a.dtype in FP8_DTYPES or dtype != a.dtype:
            return lambda block, out, first: self._fill(block, out, first)
        if self.bias is None:
            return lambda block, out, first: _mm(block, b, out)
        bias = self.bias
        return lambda block, out, first: _addmm(bias, block, b, out)

    def _fill(self, block: Tensor, out: Tensor, first: int) -> None:
        self(block, slice(first, first + block.shape[0]), out=out)

    def __call__(self, a: Tensor, rows: slice | None = None, out: Tensor | None = None) -> Tensor:
        """C for a block of rows.

        Args:
            a: ``[m, K]``, the rows themselves.
            rows: which rows of the whole A these are; needed to pick their scales where A is scaled
                by row.
            out: ``[m, N]`` contiguous, receives C.
        """
        dtype = self.dtype_for(a)
        if a.dtype in FP8_DTYPES:
            assert self.scale_a is not None and self.scale_b is not None
            scale_a = self.scale_a[rows] if self.row_scaled and rows is not None else self.scale_a
            c = _scaled(a, self.b_kn, scale_a, self.scale_b, self.bias, dtype, out)
            return c
        if dtype != a.dtype:
            c = torch.mm(a, self.b_kn).to(dtype)
        elif self.bias is not None and out is None:
            return torch.addmm(self.bias, a, self.b_kn)
        elif self.bias is not None:
            return torch.addmm(self.bias, a, self.b_kn, out=out)
        else:
            return torch.mm(a, self.b_kn) if out is None else torch.mm(a, self.b_kn, out=out)
        if self.bias is not None:
            c = (c + self.bias).to(dtype)
        return c if out is None else out.copy_(c)


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.addmm(bias, a, b, out=out)


def _scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    if a.device.type != "cuda":
        c = (a.float() * scale_a) @ (b.float() * scale_b)
        c = (c if bias is None else c + bias.float()).to(dtype)
        return c if out is None else out.copy_(c)
    # cuBLASLt's fp8 GEMM reads B with K contiguous.
    if b.stride(0) != 1:
        b = b.t().contiguous().t()
    if out is None:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype)
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype, out=out
    )
