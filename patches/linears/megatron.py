"""Megatron's own linear layers under tensor and sequence parallelism, their collectives hidden
behind their GEMMs.

ColumnParallelLinear gathers the sequence before its GEMM and RowParallelLinear reduce-scatters it
after; with sequence parallelism both are served by megatron_fluid.tensor_parallel. Parameters,
names and gradients stay Megatron's; with gradient accumulation fusion the weight gradient goes
straight into `main_grad`. Everything else (no sequence parallelism, frozen or gathered weights,
deferred embedding gradients, experts' own communication, a GEMM that is not Megatron's own) keeps
Megatron's path.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fluid.config import current_config
from megatron_fluid.patches.engine.module_hooks import is_foreign
from megatron_fluid.patches.linears.overlap import LinearCall, note
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["column_forward_impl", "row_forward"]

_LAYERS = "megatron.core.tensor_parallel.layers"
_OTHER_GEMM = "its GEMM is not Megatron's own (a quantiser's, say)"
_OTHER_IMPL = "its _forward_impl is not Megatron's own"  # the overlapped form would not call it
_OTHER_ARGUMENTS = "its _forward_impl is called with other arguments than Megatron's"
_LATER = "Megatron computes its weight gradient later (--defer-embedding-wgrad-compute)"
_SHARDED_WEIGHT = "its weight is gathered for each use"


def column_forward_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `ColumnParallelLinear._forward_impl`: gather of the sequence and GEMM in one."""

    gemm_is_own = _watch_gemm()

    @functools.wraps(original)
    def fluid_forward_impl(
        self: ColumnParallelLinear, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        # Experts' tokens are gathered by their dispatcher: Megatron gives them
        # sequence_parallel=False, whatever the run has.
        if self.explicit_expert_comm:
            return original(self, input, weight, *args, **kwargs)
        unusual = None
        if not gemm_is_own():
            unusual = _OTHER_GEMM
        elif kwargs.get("grad_output_buffer") is not None:
            unusual = _LATER
        elif kwargs.get("gtp_remat_size", 1) > 1:
            unusual = _SHARDED_WEIGHT
        elif args:
            unusual = _OTHER_ARGUMENTS
        output = None
        if _linear_fits(self, weight, input, bool(kwargs.get("sequence_parallel")), unusual):
            fused = bool(kwargs.get("gradient_accumulation_fusion"))
            bias = kwargs.get("bias")
            output = LinearCall(self, weight, real_group(self.tp_group), bias, fused).gather(input)
        return original(self, input, weight, *args, **kwargs) if output is None else output

    return fluid_forward_impl


def row_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RowParallelLinear.forward`: GEMM and reduce-scatter of the sequence in one."""

    gemm_is_own = _watch_gemm()
    own_impl = importlib.import_module(_LAYERS).RowParallelLinear._forward_impl

    @functools.wraps(original)
    def fluid_forward(self: RowParallelLinear, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.explicit_expert_comm:
            return original(self, input_)
        unusual, weight = None, self.weight
        impl = getattr(type(self), "_forward_impl", None)
        if not gemm_is_own():
            unusual = _OTHER_GEMM
        elif impl is not own_impl or "_forward_impl" in vars(self):
            unusual = _OTHER_IMPL
        elif getattr(self, "gtp_remat_size", 1) > 1:
            unusual = _SHARDED_WEIGHT
        output, skip = None, self.skip_bias_add
        parallel = self.sequence_parallel and self.input_is_parallel
        if _linear_fits(self, weight, input_, parallel, unusual):
            bias, fused = None if skip else self.bias, self.gradient_accumulation_fusion
            group = real_group(self.tp_group)
            output = LinearCall(self, weight, group, bias, fused).scatter(input_)
        if output is None:
            return original(self, input_)
        return output, self.bias if skip else None

    return fluid_forward


def _watch_gemm() -> Callable[[], bool]:
    """Gives a function that says whether Megatron's linears call Megatron's GEMM: quantisers
    replace it while a linear runs, or before this package is imported."""
    layers = importlib.import_module(_LAYERS)
    found = layers.linear_with_grad_accumulation_and_async_allreduce
    own = None if is_foreign(found) else found
    return lambda: layers.linear_with_grad_accumulation_and_async_allreduce is own


def _linear_fits(
    linear: Any, weight: Tensor, x: Tensor, sequence_parallel: bool, unusual: str | None = None
) -> bool:
    """Whether the overlapped form computes what this linear would; records the reason where it does
    not (``unusual``: one that the caller found)."""
    if current_config().tp_overlap == "off" or linear.tp_group.size() == 1:
        return False
    reason = _unsupported_reason(linear, weight, x, sequence_parallel) or unusual
    if reason is not None:
        note(linear, False, reason)
    return reason is None


def _unsupported_reason(
    linear: Any, weight: Tensor, x: Tensor, sequence_parallel: bool
) -> str | None:
    if not sequence_parallel:
        return "there is nothing to gather or to scatter without --sequence-parallel"
    if linear.config.batch_invariant_mode:
        return "its GEMM must be Megatron's own (--batch-invariant-mode)"
    if not weight.requires_grad:
        return "its weight is frozen"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast decides its dtypes"
    if x.dtype != weight.dtype:
        return f"its input is {x.dtype}, its weight {weight.dtype}"
    if linear.config._cpu_offloading_context is not None or hasattr(weight, "__fsdp_param__"):
        return "its tensors are offloaded or sharded"
    return None
