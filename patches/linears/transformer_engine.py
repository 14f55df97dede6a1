"""Transformer Engine's linears under tensor and sequence parallelism: the same overlap as of
Megatron's own (megatron.py).

TELinear (column- and row-parallel) and TELayerNormColumnParallelLinear in bf16 or fp16; the norm
before the latter is torch's, of the same weights. Quantised compute, userbuffers
(`--tp-comm-overlap`: the user chose that overlap), delayed weight gradients, experts, offloading
and classes from elsewhere keep Transformer Engine's path.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fluid.config import current_config
from megatron_fluid.patches.linears.overlap import LinearCall, note
from megatron_fluid.topology import real_group

__all__ = ["layer_norm_column_forward", "linear_forward", "norm_of_rows", "quantises"]

Forward = Callable[[Any, Tensor], tuple[Tensor, Tensor | None]]


def linear_forward(original: Forward) -> Forward:
    """Wrap `TELinear.forward`, which its column- and row-parallel subclasses share."""

    @functools.wraps(original)
    def fluid_forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mode = getattr(self, "parallel_mode", None)
        if mode not in ("column", "row") or not _fits(self, x):
            return original(self, x)
        served = _served(self, x, mode)
        return original(self, x) if served is None else served

    return fluid_forward


def layer_norm_column_forward(original: Forward) -> Forward:
    """Wrap `TELayerNormColumnParallelLinear.forward`: the norm of the own rows, then gather and
    GEMM in one."""

    @functools.wraps(original)
    def fluid_forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        served = _served(self, x, "column", norm_of_rows) if _fits(self, x) else None
        return original(self, x) if served is None else served

    return fluid_forward


def _served(
    linear: Any, x: Tensor, mode: str, prepare: Callable[[Any, Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """(output, the bias that is left to the caller), or None."""
    bias = linear.bias if linear.use_bias else None
    added, returned = (None, bias) if linear.te_return_bias else (bias, None)
    group, fused = real_group(linear._tp_group), linear.fuse_wgrad_accumulation
    call = LinearCall(linear, linear.weight, group, added, fused)
    output = call.gather(x, prepare) if mode == "column" else call.scatter(x)
    if output is None:
        return None
    linear.is_first_microbatch = False
    return output, returned


def norm_of_rows(linear: Any, x: Tensor) -> Tensor:
    """The RMSNorm or LayerNorm of a TELayerNormColumnParallelLinear over [S, batch, H]."""
    weight, bias, rows = linear.layer_norm_weight, getattr(linear, "layer_norm_bias", None), x
    if linear.zero_centered_gamma:
        if x.dtype.itemsize == 2:
            # In 16 bits 1 + weight would lose the weight's digits: the norm is taken in 32.
            rows, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        weight = weight + 1
    if linear.normalization == "RMSNorm":
        return F.rms_norm(rows, x.shape[-1:], weight, linear.eps).to(x.dtype)
    return F.layer_norm(rows, x.shape[-1:], weight, bias, linear.eps).to(x.dtype)


def quantises() -> bool:
    """Whether a context of Transformer Engine's for FP8 is open."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    state = getattr(base, "FP8GlobalStateManager", None)
    return state is not None and bool(state.is_fp8_enabled())


def _fits(linear: Any, x: Tensor) -> bool:
    """Whether the overlapped form computes what this linear would; records the reason where it is
    one that the user can change."""
    off = current_config().tp_overlap == "off"
    if off or not linear.sequence_parallel or linear._tp_group.size() == 1:
        return False
    reason = _unsupported_reason(linear, x)
    if reason is not None:
        note(linear, False, reason)
    return reason is None


def _foreign(linear: Any) -> str | None:
    """The module of the first of its classes that is from elsewhere (a quantiser, say): what it
    adds may lie inside Transformer Engine's forward, which the overlapped form does not run."""
    known = ("megatron.core.", "transformer_engine.", "torch.", "abc.", "builtins.")
    modules = (kind.__module__ for kind in type(linear).__mro__)
    return next((name for name in modules if not f"{name}.".startswith(known)), None)


def _unsupported_reason(linear: Any, x: Tensor) -> str | None:
    config, weight = linear.config, getattr(linear, "weight", None)
    if (foreign := _foreign(linear)) is not None:
        return f"its class comes from {foreign}, which may compute something else"
    if config.tp_comm_overlap:
        return "Transformer Engine's own overlap was asked for (--tp-comm-overlap)"
    if config.batch_invariant_mode:
        return "its GEMM must be Megatron's own (--batch-invariant-mode)"
    if config.fp8 or config.fp4 or linear.te_quant_params is not None or quantises():
        return "it computes in quantised precision"
    if type(weight) is not torch.nn.Parameter or not weight.requires_grad:
        return "its weight is frozen, quantised or in several parameters"
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its input is {x.dtype}, its weight {weight.dtype}"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast decides its dtypes"
    if config.delay_wgrad_compute:
        return "Megatron computes its weight gradient later (--delay-wgrad-compute)"
    if config._cpu_offloading_context is not None or hasattr(weight, "__fsdp_param__"):
        return "its tensors are offloaded or sharded"
    if getattr(linear, "return_layernorm_output", False):
        return "the output of its norm was asked for, too"
    inside = getattr(weight, "gtp_remat_size", None)
    if getattr(linear, "symmetric_ar_type", None) or inside is not None:
        return "it communicates in another way"
    return None
