"""Gradient accumulation fusion of Megatron's own linears without Apex.

Megatron's linears add dW to `main_grad` in a GEMM of Apex's extension
`fused_weight_gradient_mlp_cuda`, and refuse `gradient_accumulation_fusion` where it is not
installed. The refusal holds for the whole model: Transformer Engine's linears, which need no Apex
for it, get the same setting, and without it every dW is written in the model's dtype and added to
fp32 by another kernel. This module has the extension's two functions and stands for it in Megatron,
where it is missing; Apex's own are used where they can be imported. Nobody else can import the
stand-in.

The product is summed in fp32 and added to main_grad without being rounded to the model's dtype
before, as Apex's kernels do: more exact than Megatron without the fusion.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad

__all__ = [
    "availability",
    "drain_embedding_gradients",
    "stand_in",
    "wgrad_gemm_accum_fp16",
    "wgrad_gemm_accum_fp32",
]

_EXTENSION = "fused_weight_gradient_mlp_cuda"
_LAYERS = "megatron.core.tensor_parallel.layers"


@torch.no_grad()  # deferred gradients are computed outside of autograd, of inputs that require grad
def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad_output^T total_input, over all rows.

    Args:
        total_input: fp32, bf16 or fp16. [..., K]
        grad_output: of the same dtype and rows. [..., N]
        main_grad: fp32, contiguous or not. [N, K]
    """
    add_product_to_main_grad(main_grad, grad_output.flatten(0, -2), total_input.flatten(0, -2))


def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """wgrad_gemm_accum_fp32 for a main_grad in bf16 or fp16, the dtype of the others."""
    wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)


def stand_in(original: None) -> ModuleType:
    """What Megatron's linears call in the place of Apex's extension: this module."""
    return sys.modules[__name__]


class _Availability:
    """Megatron's flag that the extension is there: true as long as something is, so that the flag's
    patch alone lets no model be built that has nothing to call."""

    def __bool__(self) -> bool:
        return hasattr(sys.modules[_LAYERS], _EXTENSION)


def availability(original: bool) -> _Availability:
    """Replace `_grad_accum_fusion_available`, which the linears ask when they are built."""
    return _Availability()


def drain_embedding_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `drain_embedding_wgrad_compute` (--defer-embedding-wgrad-compute), which imports the
    extension in its body: it finds the stand-in, during the call alone."""

    @functools.wraps(original)
    def drain(*args: Any, **kwargs: Any) -> None:
        added = sys.modules.setdefault(_EXTENSION, sys.modules[__name__])
        try:
            original(*args, **kwargs)
        finally:
            if added is sys.modules[__name__]:
                del sys.modules[_EXTENSION]

    return drain
