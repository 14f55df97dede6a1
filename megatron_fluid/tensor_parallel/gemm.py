"""One GEMM of a tensor-parallel linear: plain, transposed weight, bias, fp8 with scales.

Shapes: A ``[M, K]``, B ``[K, N]`` or, with ``transpose_b``, ``[N, K]`` (the layout of
``nn.Linear.weight``), C ``[M, N]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = ["FP8_DTYPES", "Gemm"]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


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
        scale_a, scale_b, bias = self.scale_a, self.scale_b, self.bias
        if self.b.dim() != 2:
            allowed = "2, [K, N] or with transpose_b [N, K]"
            raise ConfigError(f"b: found {self.b.dim()} dimensions, allowed: {allowed}")
        fp8 = self.b.dtype in FP8_DTYPES
        scaled = scale_a is not None, scale_b is not None
        if scaled != (fp8, fp8):
            found = f"{scaled[0]}, {scaled[1]} for operands of {self.b.dtype}"
            allowed = "both for fp8 operands, neither for others"
            raise ConfigError(f"scale_a, scale_b: found {found}; allowed: {allowed}")
        if scale_a is not None and scale_b is not None:
            a, b = scale_a.numel(), scale_b.numel()
            if (a == 1) != (b == 1):
                allowed = "one element each, or one a row of A and one a column of B"
                raise ConfigError(
                    f"scale_a, scale_b: found {a} and {b} elements; allowed: {allowed}"
                )
            if b != 1 and scale_b.shape != (1, self.n):
                allowed = f"one element, or (1, {self.n})"
                raise ConfigError(
                    f"scale_b: found shape {tuple(scale_b.shape)}, allowed: {allowed}"
                )
        if bias is not None:
            if bias.shape != (self.n,):
                raise ConfigError(f"bias: found shape {tuple(bias.shape)}, allowed: ({self.n},)")
            # Kernels read it by its address alone.
            object.__setattr__(self, "bias", bias.contiguous())

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
            allowed = f"two dimensions, the second {self.k} (K of b)"
            raise ConfigError(f"a: found shape {tuple(a.shape)}, allowed: {allowed}")
        fp8 = a.dtype in FP8_DTYPES
        if self.b.dtype not in FP8_DTYPES if fp8 else a.dtype != self.b.dtype:
            allowed = "the same dtype, or both fp8"
            raise ConfigError(f"a, b: found {a.dtype} and {self.b.dtype}, allowed: {allowed}")
        dtype = self.out_dtype or (torch.bfloat16 if fp8 else a.dtype)
        if self.bias is not None and self.bias.dtype not in ((dtype,) if fp8 else (dtype, a.dtype)):
            allowed = f"{dtype}, as C" if fp8 else f"{a.dtype} as A, or {dtype} as C"
            raise ConfigError(f"bias: found {self.bias.dtype}, allowed: {allowed}")
        return dtype

    def without_bias(self) -> Gemm:
        """The same product without its bias (a reduction adds the bias once, at the end)."""
        return replace(self, bias=None)

    def into(self, a: Tensor) -> Callable[[Tensor, Tensor, int], None]:
        """A function of (a block of rows of A, its C, the number of its first row) that fills C;
        checked once, quick to call.

        Args:
            a: any tensor of A's dtype and width.
        """
        dtype, b, bias = self.dtype_for(a), self.b_kn, self.bias
        if a.dtype in FP8_DTYPES or dtype != a.dtype:

            def fill(block: Tensor, out: Tensor, first: int) -> None:
                self(block, slice(first, first + block.shape[0]), out=out)
        elif bias is None:

            def fill(block: Tensor, out: Tensor, first: int) -> None:
                torch.mm(block, b, out=out)
        else:

            def fill(block: Tensor, out: Tensor, first: int) -> None:
                torch.addmm(bias, block, b, out=out)

        return fill

    def __call__(self, a: Tensor, rows: slice | None = None, out: Tensor | None = None) -> Tensor:
        """C for a block of rows.

        Args:
            a: ``[m, K]``, the rows themselves.
            rows: which rows of the whole A these are; needed to pick their scales where A is scaled
                by row.
            out: ``[m, N]`` contiguous, receives C.
        """
        dtype, b = self.dtype_for(a), self.b_kn
        if a.dtype in FP8_DTYPES:
            scale_a = self.scale_a
            if self.row_scaled and rows is not None:
                scale_a = scale_a[rows]  # type: ignore[index]
            return self._scaled(a, scale_a, dtype, out)  # type: ignore[arg-type]
        if dtype == a.dtype and self.bias is None:
            return torch.mm(a, b, out=out)
        if dtype == a.dtype and self.bias is not None:
            return torch.addmm(self.bias, a, b, out=out)
        c = torch.mm(a, b).to(dtype)
        if self.bias is not None:
            c = (c + self.bias).to(dtype)
        return c if out is None else out.copy_(c)

    def _scaled(self, a: Tensor, scale_a: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        b, scale_b, bias = self.b_kn, self.scale_b, self.bias
        assert scale_b is not None
        if a.device.type != "cuda":
            c = (a.float() * scale_a) @ (b.float() * scale_b)
            c = (c if bias is None else c + bias.float()).to(dtype)
            return c if out is None else out.copy_(c)
        # cuBLASLt's fp8 GEMM reads B with K contiguous.
        if b.stride(0) != 1:
            b = b.t().contiguous().t()
        scales: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias}
        if out is not None:
            scales["out"] = out
        return torch._scaled_mm(a, b, **scales, out_dtype=dtype)
