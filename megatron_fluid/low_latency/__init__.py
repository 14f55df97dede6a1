"""Decode-time MoE all-to-all: dispatch and combine, each split into send and receive; and the
inference layer on it."""

from megatron_fluid.low_latency.all_to_all import AllToAll
from megatron_fluid.low_latency.inference_layer import InferenceMoELayer
from megatron_fluid.low_latency.layout import TRANSPORTS, TWO_LEVEL_TRANSPORTS, AllToAllConfig

__all__ = ["TRANSPORTS", "TWO_LEVEL_TRANSPORTS", "AllToAll", "AllToAllConfig", "InferenceMoELayer"]
