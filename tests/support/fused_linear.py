"""Megatron's tensor-parallel linears with gradient accumulation fusion."""

from __future__ import annotations

from typing import Any

import torch


def fused_linear(mode: str, dtype: torch.dtype, inputs: int, outputs: int) -> Any:
    """A linear without a bias, of one dense layer. mode: "row", or else column."""
    from megatron.core.tensor_parallel import layers

    from tests.support import tiny_gpt

    config = tiny_gpt.config_of(
        num_moe_experts=None,
        moe_ffn_hidden_size=None,
        expert_model_parallel_size=1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=True,
    )
    named: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": False,
        "skip_bias_add": False,
    }
    if mode == "row":
        return layers.RowParallelLinear(inputs, outputs, input_is_parallel=True, **named)
    return layers.ColumnParallelLinear(inputs, outputs, **named)
