"""The kernels of experts with biases, at the shape of gpt-oss-20b on one rank: every case is noted
down from a call, so that its types and constants are those of that call."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.kernels.activation import biases as expert_biases
from megatron_fluid.kernels.activation import kernel as fused_activation
from megatron_fluid.moe.activations import RowBiases, Variant
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

ROWS, EXPERTS, HIDDEN, FFN = 64, 32, 2880, 2880
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
# Rows must move by 16 bytes a lane.
_WIDE = ("ld.global.v4.b32", "st.global.v4.b32")
_NARROW = ("ld.global.b16", "st.global.b16", "ld.global.v2.b16", "st.global.v2.b16")
_SUMS = (
    "add_products_kernel",
    "sum_chunks_kernel",
    "sum_partials_kernel",
)  # which store few values

_found: dict[str, KernelCase] = {}


def _note(launch: Launch, grid: Any, arguments: tuple[Tensor, ...], *_: object) -> None:
    kernel, constants = launch._kernel, launch._constants
    kind = ", plain" * ("scale" in constants) + ", interleaved" * bool(constants.get("INTERLEAVE"))
    name = kernel.__name__ + kind
    types = [_TYPES[x.dtype] + ":16" * (x.data_ptr() % 16 == 0) for x in arguments]
    wanted = _WIDE[:1] if kernel.__name__ in _SUMS else _WIDE
    given = name, kernel, tuple(types), constants, launch._num_warps, wanted, _NARROW
    _found[name] = KernelCase(*given)


def _steps() -> None:
    x = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
    table, scale = x[:EXPERTS], torch.empty(ROWS)
    experts, offsets = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(EXPERTS, dtype=torch.int32)
    for weights in (scale, None):
        expert_biases.add_biases(x, table, experts, offsets[-1:], weights)
        expert_biases.sum_by_expert(x, offsets, weights)
    expert_biases.add_products(scale, x, table, experts, offsets[-1:])
    h, a = x.new_empty(ROWS, 2 * FFN), x.new_empty(ROWS, FFN)
    bias = RowBiases(h[:EXPERTS], experts)
    for variant in (Variant(7.0, 1.0), Variant(7.0, 1.0, 32)):
        given = {"variant": variant, "bias": bias}
        count = offsets[-1:]
        fused_activation.fused_activation_forward("quick_geglu", h, scale, count, **given)
        fused_activation.fused_activation_backward("quick_geglu", h, a, scale, count, **given)


with mock.patch.object(Launch, "_by_triton", _note):
    _steps()

CASES = list(_found.values())
