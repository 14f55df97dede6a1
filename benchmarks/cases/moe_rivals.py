"""MoE layers of others on one GPU: torch's grouped GEMM with torch's own operations around it, and
Liger's fused kernels. With the router of the benchmark, alike for all.

SonicMoE is measured where it is installed with the kernels that it needs; `missing` says what is
not.

Shapes: T tokens, K top-k, E experts, H hidden, F ffn, N = T * K rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.cases.moe import MoECase

__all__ = ["RIVALS", "LigerMoE", "TorchGroupedMoE", "missing"]


class _RoutedMoE(nn.Module):
    """Router and experts' weights in nn.Linear's layout; `experts` computes."""

    def __init__(self, case: MoECase, device: torch.device) -> None:
        super().__init__()
        self.top_k = case.top_k

        def weight(*shape: int) -> nn.Parameter:
            drawn = torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02
            return nn.Parameter(drawn)

        self.router = nn.Linear(
            case.hidden, case.experts, bias=False, device=device, dtype=torch.bfloat16
        )
        self.weight1 = weight(case.experts, 2 * case.ffn, case.hidden)
        self.weight2 = weight(case.experts, case.hidden, case.ffn)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        logits = nn.functional.linear(x, self.router.weight).float()
        values, ids = logits.topk(self.top_k, dim=1)
        return self.experts(x, ids, values.softmax(1))

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """sum over k of probs[t, k] * expert(ids[t, k])(x[t]): [T, H]."""
        raise NotImplementedError


class TorchGroupedMoE(_RoutedMoE):
    """Sort, index_select, torch's grouped GEMM, silu and products, and a sum over the choices."""

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        experts, flat = self.weight1.shape[0], ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x.index_select(0, order // self.top_k)
        grouped = torch.nn.functional.grouped_mm
        gate, up = grouped(rows, self.weight1.transpose(1, 2), offs=ends).chunk(2, dim=1)
        weights = probs.reshape(-1).index_select(0, order).unsqueeze(1)
        activated = (nn.functional.silu(gate) * up * weights).to(x.dtype)
        y = grouped(activated, self.weight2.transpose(1, 2), offs=ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=x.device)
        return y.index_select(0, inverse).view(len(x), self.top_k, -1).sum(1)


class LigerMoE(_RoutedMoE):
    """Liger-Kernel's fused MoE in Triton."""

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        out: Tensor = LigerFusedMoEFunction.apply(
            x, self.weight1, self.weight2, ids.int(), probs.to(x.dtype)
        )
        return out


RIVALS: dict[str, Callable[[MoECase, torch.device], nn.Module]] = {
    "torch_grouped": TorchGroupedMoE,
    "liger": LigerMoE,
}
"""By variant."""


def missing(variant: str) -> str | None:
    """Why this machine cannot measure a variant of RIVALS, or None."""
    if variant == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not importable"
    return None
