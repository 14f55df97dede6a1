"""Settings that were given and that nothing of a job reads, each with why."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from megatron_fluid.config import ENVIRONMENT_PREFIX, FluidConfig, current_config
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.engine.switches import cpu_mode_asked

__all__ = ["unused_in_other_loops", "unused_settings"]

# What reads them; which layers do, they say themselves (overlap_decision.settings_read).
_READERS = {
    "dx_chunks": "fused layers over rounds and overlapped attention read it, and there are none",
    "defer_weight_grads": "nothing that reads it is overlapped",
    "moe_capacity_factor": "fused layers over symmetric memory read it, and there are none",
}


def unused_settings(read: Collection[str] | None = None) -> dict[str, str]:
    """Flags with their values, and why they have no effect; of the job's own arguments as Megatron
    parsed them.

    Args:
        read: the fields that layers of any rank read; None: no layer is known.
    """
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None:
        return {}
    config, default = current_config(), FluidConfig()
    found: dict[str, str] = {}
    for name, reason in _reasons(args, config, read).items():
        value = getattr(config, name)
        if reason and value not in (getattr(default, name), "off", "megatron"):
            flag = f"--fluid-{name.replace('_', '-')} {value}"
            found[flag.removesuffix(" True")] = reason
    if cpu_mode_asked() and not cpu_mode_active():
        found["--fluid-cpu"] = "a GPU is found"
    return found


def unused_in_other_loops() -> dict[str, str]:
    """Settings that only Megatron's own training loop reads, where another one trains."""
    config, default = current_config(), FluidConfig()
    names = ("profile_steps", "profile_dir", "end_on_timeout")
    return {
        f"{ENVIRONMENT_PREFIX}{name.upper()}": "only Megatron's training loop reads it"
        for name in names
        if getattr(config, name) != getattr(default, name)
    }


def _reasons(args: Any, config: FluidConfig, read: Collection[str] | None) -> dict[str, str]:
    """Why each setting has no effect, "" where it may have."""
    from megatron_fluid.patches.moe.limits import bounded_unsupported_reason

    linears = heads = ""
    if config.tp_overlap == "off":
        linears = "--fluid-tp-overlap is off"
    elif args.tensor_model_parallel_size == 1 or not args.sequence_parallel:
        linears = "it needs --tensor-model-parallel-size above 1 and --sequence-parallel"
    kinds = args.cp_comm_type or ["p2p"]
    if args.context_parallel_size == 1:
        heads = "--context-parallel-size is 1"
    elif "a2a" not in kinds:
        heads = f"it needs --cp-comm-type a2a, found {' '.join(kinds)}"
    experts = "" if args.num_experts else "the model has no MoE layer"
    fp8 = experts or ("" if args.fp8 else "it needs --fp8-format e4m3")
    precision = "" if config.moe_fp8 == "ours" else f"--fluid-moe-fp8 is {config.moe_fp8}"
    neither = f"{experts}, and {heads}" if experts and heads else ""
    unread = {name: "" if read is None or name in read else why for name, why in _READERS.items()}
    return {
        **dict.fromkeys(("tp_overlap", "deterministic"), linears),
        "cp_backend": heads,
        **dict.fromkeys(("moe_backend", "moe_recompute"), experts),
        "moe_capacity_factor": experts
        or bounded_unsupported_reason(args)
        or unread["moe_capacity_factor"],
        "moe_fp8": fp8,
        "moe_fp8_weight_grads": fp8 or precision,
        "dx_chunks": neither or unread["dx_chunks"],
        "defer_weight_grads": neither or unread["defer_weight_grads"],
    }
