"""Kernels of a layer are compiled in the background while Megatron builds the rest of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fluid.kernels.grouped_gemm.launch import compile_ahead
from megatron_fluid.moe.local.transport import compile_local_ahead

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["compile_layer_ahead"]


def compile_layer_ahead(layer: MoELayer, weight: Tensor, backend: str) -> None:
    """Begin to compile what a built layer whose experts are ours will launch, as far as its backend
    is known. weight: one of its experts'."""
    from megatron_fluid.patches.moe.expert_parameters import resolve  # imports Megatron

    c = layer.config
    compile_ahead(weight.device, weight.dtype, c.hidden_size, "swiglu", sends=backend != "local")
    if backend == "local":
        shape = c.hidden_size, c.moe_ffn_hidden_size, c.num_moe_experts, c.moe_router_topk
        activation = resolve(c, hasattr(layer.experts, "linear_fc1"))
        # The router's own choices and probabilities; others are compiled when they come.
        kinds = {"fp32": torch.float32, "fp64": torch.float64}
        probs = kinds.get(c.moe_router_dtype, weight.dtype)
        given = weight.device, weight.dtype, torch.int64, shape, activation
        # A layer does not know its number yet: the first and last ones may stay in bf16.
        for fp8 in {bool(c.fp8), bool(c.fp8) and not c.first_last_layers_bf16}:
            compile_local_ahead(*given, probs, bool(c.add_bias_linear), fp8)
