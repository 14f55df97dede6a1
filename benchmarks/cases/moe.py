"""Shapes and routings that the MoE benchmarks share.

Shapes: T tokens of a rank, K top-k, E experts, H hidden, F ffn of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.cli.models import MODELS
from megatron_fluid.kernels.grouped_gemm.launch import grouped_matmul, grouped_weight_grad

__all__ = [
    "CASES",
    "ONE_GPU_CASES",
    "MoECase",
    "router_logits",
    "torch_grouped_matmul",
    "torch_grouped_weight_grad",
]


@dataclass(frozen=True)
class MoECase:
    """Widths of one MoE layer, SwiGLU, no bias, dropless. tokens: of a rank, 0 leaves them to the
    suite."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int = 0


_NAMES = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "olmoe")
CASES = {
    name: MoECase(model.hidden, model.expert_ffn, model.experts, model.top_k)
    for name in _NAMES
    if (model := MODELS[name])
}
# The experts that one of four GPUs has; and the shape that SonicMoE publishes (8.446 ms forward and
# backward on an H100).
ONE_GPU_CASES = {
    "deepseek-v3-share": MoECase(7168, 2048, 64, 8),
    "sonicmoe": MoECase(2560, 1280, 64, 4, tokens=16384),
}


def router_logits(
    case: MoECase, tokens: int, zipf: float, seed: int, device: torch.device
) -> Tensor:
    """fp32 [T, E] logits whose top-k is a draw without replacement; zipf 0: all experts alike, else
    p(e) ~ 1 / (e + 1) ** zipf.

    Popular experts are spread over the ranks by a permutation that is the same on every rank; draws
    differ by `seed`.
    """
    noise = torch.Generator(device=device).manual_seed(seed)
    uniform = torch.rand(tokens, case.experts, generator=noise, device=device).clamp_(
        1e-9, 1 - 1e-7
    )
    gumbel = -torch.log(-torch.log(uniform))
    shared = torch.Generator().manual_seed(1)
    order = torch.randperm(case.experts, generator=shared).to(device)
    return gumbel - zipf * torch.log1p(order.float())


def torch_grouped_matmul(
    x: Tensor, weights: Tensor, offsets: Tensor, ends: list[int] | None = None
) -> Tensor:
    """Torch's grouped GEMM, which floors are made of: x[rows of e] @ weights[e], [N, in], [El, in,
    out] -> [N, out]."""
    if x.is_cuda:
        return torch.nn.functional.grouped_mm(x, weights, offs=offsets)
    return grouped_matmul(x, weights, offsets, ends)


def torch_grouped_weight_grad(
    left: Tensor, right: Tensor, offsets: Tensor, ends: list[int]
) -> Tensor:
    """Torch's grouped GEMM: left[rows of e].T @ right[rows of e], [N, a], [N, b] -> [El, a, b]."""
    if left.is_cuda:
        return torch.nn.functional.grouped_mm(left.t(), right, offs=offsets)
    return grouped_weight_grad(left, right, offsets, ends)
