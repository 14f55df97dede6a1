"""One GEMM of a tensor-parallel linear: plain, transposed weight, bias.

Shapes: A ``[M, K]``, B ``[K, N]`` or, with ``transpose_b``, ``[N, K]`` (the layout of
``nn.Linear.weight``), C ``[M, N]`` in A's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError

__all__ = ["Gemm"]


@dataclass(frozen=True)
class Gemm:
    """How C is made from A and B; checked once, then applied to any block of rows of A.

    Args:
        b: ``[K, N]``, or ``[N, K]`` with ``transpose_b``.
        transpose_b: B is stored as ``nn.Linear`` stores its weight.
        bias: ``[N]`` in A's dtype; added once to C.
    """

    b: Tensor
    transpose_b: bool = False
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.b.dim() != 2:
            allowed = "2, [K, N] or with transpose_b [N, K]"
            raise ConfigError(f"b: found {self.b.dim()} dimensions, allowed: {allowed}")
        if (bias := self.bias) is not None:
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

    def check(self, a: Tensor) -> None:
        """Raise ConfigError where A does not fit B or the bias."""
        if a.dim() != 2 or a.shape[1] != self.k:
            allowed = f"two dimensions, the second {self.k} (K of b)"
            raise ConfigError(f"a: found shape {tuple(a.shape)}, allowed: {allowed}")
        if a.device != self.b.device:
            raise ConfigError(f"a, b: found on {a.device} and {self.b.device}, allowed: one device")
        if a.dtype != self.b.dtype or not a.is_floating_point() or a.itemsize < 2:
            allowed = "the same floating dtype of 2 bytes or more"
            raise ConfigError(f"a, b: found {a.dtype} and {self.b.dtype}, allowed: {allowed}")
        if self.bias is not None and self.bias.dtype != a.dtype:
            raise ConfigError(f"bias: found {self.bias.dtype}, allowed: {a.dtype}, as A")

    def without_bias(self) -> Gemm:
        """The same product without its bias (a reduction adds the bias once, at the end)."""
        return self if self.bias is None else Gemm(self.b, self.transpose_b)

    def into(self) -> Callable[[Tensor, Tensor], None]:
        """Return a function of (a block of rows of A, its C) that fills C; quick to call."""
        b, bias = self.b_kn, self.bias
        if bias is None:
            return lambda block, out: torch.mm(block, b, out=out)  # type: ignore[return-value]
        return lambda block, out: torch.addmm(bias, block, b, out=out)  # type: ignore[return-value]

    def __call__(self, a: Tensor) -> Tensor:
        """C ``[m, N]`` for a block of rows ``[m, K]``."""
        return torch.mm(a, self.b_kn) if self.bias is None else torch.addmm(self.bias, a, self.b_kn)
