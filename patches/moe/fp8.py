"""What Megatron's layers tell fp8 experts: which layers are in fp8, and when weights have changed.

Megatron's optimizers write parameters through `.data`, past their version counters. It calls
`set_is_first_microbatch` before the first microbatch of a step instead, on every module that has an
attribute of that name, which is how Transformer Engine's linears know it, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_fluid.moe.expert_weights import ExpertWeights

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["computes_in_fp8", "expire_casts", "subscribe"]


def computes_in_fp8(layer: MoELayer) -> bool:
    """Whether Megatron computes this layer in fp8: not the first and last ones that stay in
    bf16."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = layer.config
    if not config.fp8 or layer.is_mtp_layer:
        return bool(config.fp8)
    return not is_first_last_bf16_layer(config, layer.layer_number - 1)


def subscribe(layer: MoELayer) -> None:
    """Have Megatron mark the layer before the first microbatch of a step."""
    layer.is_first_microbatch = True  # type: ignore[assignment]


def expire_casts(layer: MoELayer, projections: Iterable[ExpertWeights]) -> None:
    """Have the weights cast again in the first microbatch of a step."""
    if layer.is_first_microbatch:
        layer.is_first_microbatch = False  # type: ignore[assignment]
        for fc in projections:
            if fc.cast is not None:
                fc.cast.expire()
