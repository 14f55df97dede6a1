"""The variants of the suite moe_layer: every way of running one MoE layer that is installed."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.moe import MoECase
from benchmarks.cases.moe_layers import MegatronMoE, fluid_layer, set_routing_weight
from benchmarks.cases.moe_rivals import EXPERT_PARALLEL, RIVALS, RoutedMoE, missing
from benchmarks.cases.slow_wire_rank import BlockingRounds
from benchmarks.harness.left_out import everywhere
from megatron_fluid import MoEBaseline, MoELayer, close_group
from megatron_fluid.kernels.fp8_grouped_gemm.launch import fp8_device_reason
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from megatron_fluid.moe.sharding import local_part

__all__ = [
    "ENVIRONMENT",
    "MEGATRON",
    "SCHEDULES",
    "VARIANTS",
    "build_layers",
    "close_layers",
    "rival_gaps",
    "settings_of",
    "with_cutlass",
]

MEGATRON = {
    "fluid_megatron": ("alltoall", False, "auto"),
    "fluid_megatron_te": ("alltoall", False, "auto"),
    "fluid_megatron_te_cutlass": ("alltoall", False, "auto"),
    "fluid_megatron_te_fp8": ("alltoall", False, "auto"),
    "fluid_experts_alltoall": ("alltoall", False, "experts"),
    "fluid_experts_allgather": ("allgather", False, "experts"),
    "megatron_te_alltoall": ("alltoall", False, "megatron"),
    "megatron_te_allgather": ("allgather", False, "megatron"),
    "megatron_te_overlap_wgrad": ("alltoall", True, "megatron"),
    "megatron_te_grouped_weight": ("alltoall", False, "megatron"),
    "megatron_te_allgather_grouped_weight": ("allgather", False, "megatron"),
    "megatron_te_cutlass": ("alltoall", False, "megatron"),
    "megatron_te_allgather_cutlass": ("allgather", False, "megatron"),
    "megatron_te_deepep": ("flex", False, "megatron"),
    "megatron_te_deepep_grouped_weight": ("flex", False, "megatron"),
    "megatron_te_nccl_ep": ("flex", False, "megatron"),
    "fluid_megatron_fp8": ("alltoall", False, "auto"),
    "megatron_te_fp8": ("alltoall", False, "megatron"),
}
# Of Megatron's variants whose names have it.
SETTINGS: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "grouped_weight": {"moe_single_grouped_weight": True, "use_transformer_engine_op_fuser": True},
    "deepep": {"moe_flex_dispatcher_backend": "deepep"},
    # Rows beyond the factor end the run; cases of this suite stay below it.
    "nccl_ep": {"moe_flex_dispatcher_backend": "ncclep", "moe_expert_rank_capacity_factor": 2.0},
}
# Read by layers with grouped_weight alone, when they are built and at their first call. Without the
# first Transformer Engine warns, and keeps a parameter for each expert.
ENVIRONMENT = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
# Read at every GEMM.
CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
OVER_SEVERAL = (
    "fluid_no_overlap",
    "fluid_rounds",
    "all_to_all",
    "megatron_te_overlap_wgrad",
    "megatron_te_deepep",
    "megatron_te_deepep_grouped_weight",
    "megatron_te_nccl_ep",
)
"""Variants that differ from another on several GPUs alone."""
_ONE_HOST = (
    "liger_cute",
    "megatron_te_deepep",
    "megatron_te_deepep_grouped_weight",
    "megatron_te_nccl_ep",
)
_ALLOWED = 0.08  # norm of the difference of two layers in bf16, relative
_DX_CHUNKS = 4
VARIANTS = (
    "floor",
    "floor_fluid",
    "fluid",
    "fluid_batch_invariant",
    "fluid_fp8",
    "fluid_graph",
    "fluid_no_overlap",
    "fluid_rounds",
    "all_to_all",
    *MEGATRON,
    *RIVALS,
)
# What --schedules measures, by name.
SCHEDULES = {
    "whole": NO_OVERLAP,
    "stream": Schedule(stream=True),
    "sent": Schedule(sent_rows=True),
    "stream_sent": Schedule(stream=True, sent_rows=True),
}


def with_cutlass(call: Callable[[], object]) -> Callable[[], object]:
    """`call` with one launch for the GEMMs of all experts in Transformer Engine."""

    def alone() -> None:
        with mock.patch.dict(os.environ, {CUTLASS: "1"}):
            call()

    return alone


def settings_of(variant: str) -> dict[str, Any]:
    """Of one of Megatron's variants, what its TransformerConfig has beside that of all."""
    return {k: v for part in SETTINGS if part in variant for k, v in SETTINGS[part].items()}


def build_layers(
    case: MoECase, options: argparse.Namespace, device: torch.device, absent: str | None, ranks: int
) -> tuple[dict[str, nn.Module], dict[str, Schedule]]:
    """Return every layer that was asked for and can be built, by variant, and the schedules that
    are fixed."""
    wanted = tuple(options.variants) or ("",)
    names = SCHEDULES if "all" in options.schedules else options.schedules
    idle = OVER_SEVERAL if ranks == 1 else set(RIVALS) - set(EXPERT_PARALLEL)
    if options.hosts > 1:
        idle = {*idle, *_ONE_HOST}
    fixed = {"fluid_no_overlap": NO_OVERLAP}
    waits = options.hosts > 1 and "fluid_no_overlap".startswith(wanted)
    if waits or "fluid_no_overlap" in idle or not "fluid_no_overlap".startswith(wanted):
        fixed = {}
    fixed |= {f"schedule_{name}": SCHEDULES[name] for name in names}
    fluid = fluid_layer(case, device)
    layers: dict[str, nn.Module] = {"fluid": fluid}
    for name in fixed:
        layers[name] = fluid_layer(case, device, fluid, dist.new_group())
    if waits:  # between hosts there is no schedule
        waiting = fluid_layer(case, device, fluid)
        waiting.rounds = BlockingRounds(dist.group.WORLD)
        layers["fluid_no_overlap"] = waiting
    if "fluid_fp8".startswith(wanted) and fp8_device_reason(device) is None:
        layers["fluid_fp8"] = fluid_layer(case, device, fluid, fp8_recipe="blockwise")
    settings: dict[str, dict[str, Any]] = {
        "fluid_batch_invariant": {"batch_invariant": True},
        "fluid_rounds": {"backend": "rounds", "dx_chunks": _DX_CHUNKS},
        "all_to_all": {"of": MoEBaseline},
    }
    for name, more in settings.items():
        if name not in idle and name.startswith(wanted):
            layers[name] = fluid_layer(case, device, fluid, **more)
    # Of all of Megatron's the first whose parameters have the same names, and its parameters.
    first: dict[bool, dict[str, nn.Module]] = {False: {}, True: {}}
    builders: dict[str, Callable[..., nn.Module]] = {
        variant: functools.partial(
            MegatronMoE,
            case,
            device,
            *megatron,
            keep_experts=variant.startswith("fluid_megatron_te"),
            **settings_of(variant),
        )
        for variant, megatron in MEGATRON.items()
        if absent is None
    }
    builders |= {v: functools.partial(build, case, device) for v, build in RIVALS.items()}
    os.environ.update(ENVIRONMENT)
    for variant, build in builders.items():
        if variant.startswith(wanted) and variant not in idle:
            if (reason := missing(variant)) is not None:
                print(f"{variant} left out: {reason}", file=sys.stderr, flush=True)
                continue
            shared = first[variant.endswith("grouped_weight")] if variant in MEGATRON else {}
            layer = everywhere(variant, functools.partial(build, **shared))
            if layer is None:
                continue
            layers[variant] = layer
            if variant in MEGATRON:
                shared["like"] = layer
            if isinstance(layer, RoutedMoE):
                set_routing_weight(layer.router.weight)
                layer.take(local_part(fluid.weight1), local_part(fluid.weight2))
    return layers, fixed


def rival_gaps(layers: dict[str, nn.Module], x: Tensor) -> dict[str, dict[str, float]]:
    """Run the layers of other libraries once, and drop those that fail, or disagree with `fluid`,
    on any rank: variant -> its distances from `fluid`, for the rows' config. Collective.

    Compared are the output and the gradients of the tokens and of the second projection's weights.
    """
    upstream = torch.randn_like(x)  # its own on each rank

    def passes(layer: nn.Module) -> dict[str, Tensor]:
        own = x.detach().clone().requires_grad_()
        y = layer(own)
        y.backward(upstream)
        found = {"output": y.detach(), "input gradient": own.grad}
        if hasattr(layer, "weight2"):
            found["weight gradient"] = local_part(layer.weight2.grad)  # type: ignore[arg-type]
        layer.zero_grad(set_to_none=True)
        return found

    def run(layer: nn.Module) -> dict[str, float]:
        found = passes(layer)
        if not isinstance(layer, RoutedMoE):
            return {}
        gaps = {}
        for what, value in found.items():
            gap = float((value - right[what]).float().norm() / right[what].float().norm())
            if not gap <= _ALLOWED:
                raise ValueError(f"its {what} is {gap:.1%} from fluid's")
            gaps[f"{what} off by".replace(" ", "_")] = gap
        return gaps

    right = passes(layers["fluid"])
    gaps: dict[str, dict[str, float]] = {}
    for variant in [name for name in layers if name in RIVALS or name in MEGATRON]:
        found = everywhere(variant, lambda name=variant: run(layers[name]))  # type: ignore[misc]
        if found is None:
            del layers[variant]
        else:
            gaps[variant] = found
    return gaps


def close_layers(layers: Mapping[str, nn.Module], fixed: Iterable[str]) -> None:
    """Free the buffers and the process groups of layers with a fixed schedule. Collective."""
    for name in fixed:
        layer = layers[name]
        assert isinstance(layer, MoELayer)
        group = layer.rounds.group
        close_group(group)
        dist.destroy_process_group(group)
