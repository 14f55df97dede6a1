"""The router's kernels."""

from __future__ import annotations

from megatron_fluid.kernels.topk_router import topk_softmax_backward_kernel, topk_softmax_kernel
from tests.kernel_cases import KernelCase

__all__ = ["CASES"]

_SHAPE = {"E": 128, "EP": 128, "K": 8, "KP": 8, "BT": 4}

CASES = [
    KernelCase("topk_softmax", topk_softmax_kernel, ("*fp32:16", "*i32:16", "*fp32:16", "i32"), _SHAPE),
    KernelCase(
        "topk_softmax_backward",
        topk_softmax_backward_kernel,
        ("*i32:16", "*fp32:16", "*fp32:16", "*bf16:16", "i32"),
        _SHAPE,
    ),
]
