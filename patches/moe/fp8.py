"""What Megatron's layers tell fp8 experts: which layers are in fp8, and when weights have changed.

Megatron's optimizers write parameters through `.data`, past their version counters. It calls
`set_is_first_microbatch` before the first microbatch of a step instead, on every module that has an
attribute of that name, which is how Transformer Engine's linears know it, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from megatron_fluid.config import current_config
from megatron_fluid.kernels.fp8_weight_grads.launch import compile_fp8_ahead
from megatron_fluid.moe.expert_weights import ExpertWeights

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["compile_fp8_kernels_ahead", "computes_in_fp8", "expire_casts", "follow_microbatches"]


def computes_in_fp8(layer: MoELayer) -> bool:
    """Whether Megatron computes this layer in fp8: not the first and last ones that stay in
    bf16."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    from megatron_fluid.patches.versions import in_prediction

    config = layer.config
    if not config.fp8 or in_prediction(layer):
        return bool(config.fp8)
    return not is_first_last_bf16_layer(config, layer.layer_number - 1)


def follow_microbatches(layer: MoELayer) -> None:
    """If the layer is in fp8, have Megatron mark it before the first microbatch of a step. Only
    before the first step of all: Megatron then keeps a list of the modules that it marks."""
    if layer.config.fp8:
        layer.is_first_microbatch = True  # type: ignore[assignment]


def compile_fp8_kernels_ahead(layer: MoELayer, device: torch.device) -> None:
    """If the layer is in fp8, begin to compile the kernels of its experts on `device`."""
    if layer.config.fp8:
        compile_fp8_ahead(device, current_config().moe_fp8_weight_grads == "fp8")


def expire_casts(layer: MoELayer, projections: Iterable[ExpertWeights]) -> None:
    """Have the weights cast again in the first microbatch of a step; in every call of a layer that
    Megatron does not mark, and in evaluation, where they may arrive by broadcasts, which raise no
    counter."""
    marked = "is_first_microbatch" in vars(layer)
    if marked and not layer.is_first_microbatch and layer.training:
        return
    if marked and layer.training:
        layer.is_first_microbatch = False  # type: ignore[assignment]
    for fc in projections:
        if fc.kept.cast is not None:
            fc.kept.cast.expire()
