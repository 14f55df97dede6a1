"""Decode-time MoE all-to-all: dispatch and combine, each split into send and receive."""

from megatron_fluid.low_latency.all_to_all import TRANSPORTS, AllToAll, estimate_bytes

__all__ = ["TRANSPORTS", "AllToAll", "estimate_bytes"]
