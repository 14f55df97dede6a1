"""CPU mode's reading of Megatron's command line: one line serves machines with and without a GPU.

Settings that only say how a GPU computes something are given the value that computes the same on a
CPU, and that is said once. Settings that ask for something that a CPU cannot give are refused by
name.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from megatron_fluid.errors import ConfigError

__all__ = ["CPU_SETTINGS", "GPU_ONLY", "adapt_arguments", "validate_args", "validate_yaml"]

_LOG = logging.getLogger("megatron_fluid")

# Argument, the values that need a GPU, and what computes the same without one.
CPU_SETTINGS: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("distributed_backend", ("nccl",), "gloo"),
    ("transformer_impl", ("transformer_engine",), "local"),
    (
        "moe_token_dispatcher_type",
        ("flex",),
        "alltoall",
    ),  # DeepEP and HybridEP are kernels for the same exchange
    (
        "moe_grouped_gemm",
        (True,),
        False,
    ),  # the local layers compute one expert after another anyhow
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
)

_CP_KINDS = {
    "p2p",
    "all_gather",
    "allgather",
    "a2a+p2p",
}  # other ways than a2a to exchange the same


def adapt_arguments(args: Any) -> list[str]:
    """Change the settings that need a GPU on a parsed namespace; returns what was changed, as
    "name: old -> new".

    Raises:
        ConfigError: a setting that no CPU can serve.
    """
    for name, allowed in GPU_ONLY:
        if (found := getattr(args, name, allowed[0])) not in allowed:
            raise ConfigError.of(name, found, f"{allowed[0]} on a machine without a GPU")
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
    return changed


def validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt the arguments before Megatron checks them."""

    @functools.wraps(original)
    def cpu_validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006 (Megatron's signature)
        changed = adapt_arguments(args)
        if changed and os.environ.get("RANK", "0") == "0":
            _LOG.warning("CPU mode, no GPU found: %s", ", ".join(changed))
        return original(args, defaults)

    return cpu_validate_args


def validate_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a YAML file: Megatron reads it past the command line, so that nothing above would be
    applied to it."""

    @functools.wraps(original)
    def cpu_validate_yaml(args: Any, defaults: Any = {}) -> Any:  # noqa: B006 (Megatron's signature)
        raise ConfigError.of(
            "yaml_cfg", args.yaml_cfg, "the command line's flags on a machine without a GPU"
        )

    return cpu_validate_yaml
