"""Megatron's command line in CPU mode: the same line works with and without a GPU.

A setting that only says how a GPU computes something gets the value that computes the same on a
CPU, and rank 0 says so once. A setting that no CPU can serve is refused by name.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from megatron_fluid.errors import ConfigError

__all__ = ["CPU_SETTINGS", "GPU_ONLY", "adapt_arguments"]

_LOG = logging.getLogger("megatron_fluid")

# Argument, the values that need a GPU, and what computes the same without one. DeepEP and HybridEP
# (flex) are kernels for the same exchange; local layers compute one expert after another anyhow.
CPU_SETTINGS: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("distributed_backend", ("nccl",), "gloo"),
    ("transformer_impl", ("transformer_engine",), "local"),
    ("moe_token_dispatcher_type", ("flex",), "alltoall"),
    ("moe_grouped_gemm", (True,), False),
    ("moe_permute_fusion", (True,), False),
    ("moe_router_fusion", (True,), False),
    ("gradient_accumulation_fusion", (True,), False),
    ("masked_softmax_fusion", (True,), False),
    ("no_persist_layer_norm", (False,), True),
    ("apply_rope_fusion", (True,), False),
    ("tp_comm_overlap", (True,), False),
    ("cuda_graph_impl", ("local", "transformer_engine", "full_iteration"), "none"),
)

# Argument and the only values that a CPU can serve.
GPU_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("fp8", (None, False)),
    ("fp4", (None, False)),
    ("use_torch_fsdp2", (False,)),
    ("use_megatron_fsdp", (False,)),
    ("nccl_ub", (False,)),
    ("optimizer_cpu_offload", (False,)),
)

# Other ways than a2a to exchange the same.
_CP_KINDS = {"p2p", "all_gather", "allgather", "a2a+p2p"}


def adapt_arguments(args: Any) -> list[str]:
    """Change the settings of a parsed namespace that need a GPU. Rank 0 says what was changed.

    Returns:
        The changes, as "name old -> new".

    Raises:
        ConfigError: a setting that no CPU can serve.
    """
    for name, allowed in GPU_ONLY:
        if (found := getattr(args, name, allowed[0])) not in allowed:
            raise ConfigError.of(name, found, f"{allowed[0]} in CPU mode")
    changed = []

    def change(name: str, new: Any) -> None:
        changed.append(f"{name} {getattr(args, name)} -> {new}")
        setattr(args, name, new)

    for name, unfit, fit in CPU_SETTINGS:
        if hasattr(args, name) and getattr(args, name) in unfit:
            change(name, fit)
    kinds = getattr(args, "cp_comm_type", None)
    if getattr(args, "context_parallel_size", 1) > 1 and kinds and _CP_KINDS & set(kinds):
        change("cp_comm_type", ["a2a" if kind in _CP_KINDS else kind for kind in kinds])
    # Megatron asks for this on GPUs older than Blackwell, with tensor or context parallelism; a CPU
    # does not read it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Gloo alone is no news: the line that says that this is CPU mode names it.
    others = [text for text in changed if not text.startswith("distributed_backend ")]
    if others and os.environ.get("RANK", "0") == "0":
        _LOG.warning("CPU mode: %s", ", ".join(changed))
    return changed
