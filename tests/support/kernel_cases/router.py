"""The router's kernels."""

from __future__ import annotations

from megatron_fluid.kernels.routing_plan.topk_router import (
    chosen_backward_kernel,
    chosen_kernel,
    topk_softmax_backward_kernel,
    topk_softmax_kernel,
)
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

_SHAPE = {
    "E": 256,
    "EP": 256,
    "K": 8,
    "KP": 8,
    "BT": 4,
}  # as moe/fused_router.py launches deepseek-v3's

CASES = [
    KernelCase(
        "topk_softmax", topk_softmax_kernel, ("*fp32:16", "*i32:16", "*fp32:16", "i32"), _SHAPE
    ),
    KernelCase(
        "topk_softmax_backward",
        topk_softmax_backward_kernel,
        ("*i32:16", "*fp32:16", "*fp32:16", "*bf16:16", "i32"),
        _SHAPE,
    ),
    KernelCase(
        "chosen",
        chosen_kernel,
        ("*fp32:16", "*u8:16", "*i64:16", "*i32:16", "*fp32:16", "i32"),
        {"E": 256, "EP": 256, "K": 8, "KP": 8, "HAS_COLUMNS": True, "BT": 4},
    ),
    KernelCase(
        "chosen_backward",
        chosen_backward_kernel,
        ("*fp32:16", "*u8:16", "*i32:16", "*bf16:16", "i32"),
        {"E": 256, "EP": 256, "K": 8, "KP": 8, "HAS_COLUMNS": False, "BT": 4},
    ),
]
