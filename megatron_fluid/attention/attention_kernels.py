"""The attention kernels to choose from: torch's SDPA, and Transformer Engine's.

A kernel takes q [S, B, h, D], k and v [S, B, g, D] with g dividing h (any strides with a unit last
one), attends every position under the case's mask and returns [S, B, h, D] of any strides,
differentiable by autograd.

Masks: ``causal`` lets query i see keys j <= i; ``window`` w narrows that to i - w < j (and, without
``causal``, to |i - j| < w).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron_fluid.errors import ConfigError

__all__ = [
    "KERNEL_NAMES",
    "CoreCase",
    "CoreKernel",
    "choose_kernel",
    "run_sdpa",
    "run_te",
    "te_unsupported_reason",
    "window_mask",
]

KERNEL_NAMES = ("auto", "sdpa", "te")

type CoreKernel = Callable[..., Tensor]
"""Attends (q, k, v, case). A kernel that reads more tensors also takes ``part`` and ``core``, as
call.AttentionWeights has them."""


@dataclass(frozen=True)
class CoreCase:
    """What an attention kernel must do; ``scale`` None is 1 / sqrt(head_dim), ``dropout`` applies
    to the probabilities."""

    head_dim: int
    dtype: torch.dtype
    device_type: str
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    dropout: float = 0.0

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale


def window_mask(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """Which keys each query sees, bool [S, S], for a sliding window."""
    row = torch.arange(length, device=device)
    distance = row[:, None] - row[None, :]
    if causal:
        return (distance >= 0) & (distance < window)
    return distance.abs() < window


@functools.cache
def _sdpa_order(device_index: int) -> list[int] | None:
    """SDPA's backends in the order in which to try them; None for torch's own."""
    if torch.cuda.get_device_capability(device_index) < (9, 0):
        return None
    first: int = SDPBackend.CUDNN_ATTENTION.value  # the faster one on Hopper and later
    return [first, *(backend for backend in torch._C._get_sdp_priority_order() if backend != first)]


def run_sdpa(q: Tensor, k: Tensor, v: Tensor, case: CoreCase) -> Tensor:
    queries, keys, values = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    mask = None
    if case.window is not None:
        mask = window_mask(q.shape[0], case.window, case.causal, q.device)
        # Kernels that take a mask do not share key/value heads: repeat them.
        repeat = q.shape[2] // k.shape[2]
        if repeat > 1:
            keys, values = (t.repeat_interleave(repeat, 1) for t in (keys, values))

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=case.dropout,
            is_causal=case.causal and mask is None,
            scale=case.softmax_scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    order = _sdpa_order(q.device.index) if q.is_cuda else None
    if order is None:
        return attend().permute(2, 0, 1, 3)
    # What torch.nn.attention.sdpa_kernel does, at less cost on the host; backends that the user
    # disabled stay so.
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(order)
    try:
        return attend().permute(2, 0, 1, 3)
    finally:
        torch._C._set_sdp_priority_order(before)


@functools.cache
def _te_import_problem() -> str | None:
    """Return why Transformer Engine cannot be imported, or None. An installed one may clash with
    other packages."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        return f"Transformer Engine cannot be imported: {error}"
    return None


def te_unsupported_reason(case: CoreCase) -> str | None:
    """Return why Transformer Engine's kernel cannot serve a case, or None if it can."""
    if case.device_type != "cuda":
        return f"Transformer Engine runs on CUDA devices, not on {case.device_type}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"Transformer Engine takes bfloat16 and float16, not {case.dtype}"
    return _te_import_problem()


@functools.lru_cache(maxsize=64)
def _te_module(heads: int, groups: int, case: CoreCase) -> torch.nn.Module:
    from transformer_engine.pytorch import DotProductAttention

    before = None if case.window is None else case.window - 1
    module: torch.nn.Module = DotProductAttention(
        heads,
        case.head_dim,
        num_gqa_groups=groups,
        attention_dropout=case.dropout,
        qkv_format="sbhd",
        attn_mask_type="causal" if case.causal else "no_mask",
        # Keys seen before and after a query.
        window_size=None if before is None else (before, 0 if case.causal else before),
        softmax_scale=case.softmax_scale,
    )
    return module


def run_te(q: Tensor, k: Tensor, v: Tensor, case: CoreCase) -> Tensor:
    out: Tensor = _te_module(q.shape[2], k.shape[2], case)(q, k, v)
    return out.view(q.shape)


def choose_kernel(name: str, case: CoreCase) -> CoreKernel:
    """Return the kernel called ``name``, or for ``auto`` the faster one that serves the case.

    ``auto`` takes SDPA, except for sliding windows: SDPA takes those as a full mask, Transformer
    Engine skips what lies outside.

    Raises:
        ConfigError: an unknown name, or a kernel asked for by name that cannot serve the case.
    """
    if name not in KERNEL_NAMES:
        raise ConfigError.of("attention_kernel", name, ", ".join(KERNEL_NAMES))
    if name == "sdpa" or (name == "auto" and case.window is None):
        return run_sdpa
    reason = te_unsupported_reason(case)
    if name == "te" and reason is not None:
        found = f"found {name!r}, which cannot serve this case: {reason}"
        raise ConfigError(f"attention_kernel: {found}; allowed: auto, sdpa")
    return run_te if reason is None else run_sdpa
