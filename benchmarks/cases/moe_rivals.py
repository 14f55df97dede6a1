"""MoE layers of other libraries, behind a router that is the same for all of them: torch's grouped
GEMM between torch's operations, Liger's Triton kernels, SonicMoE and LigerCute.

docs/rivals.md says how each is installed; `missing` says which is not. `take` copies the weights of
another layer, so that outputs can be compared before anything is timed.

Shapes: T tokens, K top-k, E experts, El experts of this rank, H hidden, F ffn, N = T * K rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.moe import MoECase

__all__ = ["EXPERT_PARALLEL", "RIVALS", "RoutedMoE", "close_rivals", "missing", "prepare_rivals"]


class RoutedMoE(nn.Module):
    """Router and experts' weights in nn.Linear's layout, the gate's rows before those of up:
    weight1 [El, 2F, H], weight2 [El, H, F]. `experts` computes."""

    def __init__(self, case: MoECase, device: torch.device, ranks: int = 1) -> None:
        super().__init__()
        self.num_experts, self.top_k = case.experts, case.top_k
        local = case.experts // ranks
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.router = nn.Linear(case.hidden, case.experts, bias=False, **made)
        self.weight1 = nn.Parameter(torch.empty(local, 2 * case.ffn, case.hidden, **made))
        self.weight2 = nn.Parameter(torch.empty(local, case.hidden, case.ffn, **made))

    @torch.no_grad()
    def take(self, weight1: Tensor, weight2: Tensor) -> None:
        """Copy the experts' weights of another layer of the same shape."""
        self.weight1.copy_(weight1)
        self.weight2.copy_(weight2)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        logits = nn.functional.linear(x, self.router.weight).float()
        values, ids = logits.topk(self.top_k, dim=1)
        return self.experts(x, ids, values.softmax(1))

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """sum over k of probs[t, k] * expert(ids[t, k])(x[t]): [T, H]."""
        raise NotImplementedError


class TorchGroupedMoE(RoutedMoE):
    """Sort, index_select, torch's grouped GEMM, silu and products, and a sum over the choices."""

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=x.device)
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


class LigerTritonMoE(RoutedMoE):
    """Liger-Kernel's fused MoE in Triton."""

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        apply = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply
        out: Tensor = apply(x, self.weight1, self.weight2, ids.int(), probs.to(x.dtype))
        return out


class SonicMoE(RoutedMoE):
    """SonicMoE with its own router, which chooses and weighs alike. It wants the rows of gate and
    up in turns."""

    @torch.no_grad()
    def take(self, weight1: Tensor, weight2: Tensor) -> None:
        gate_up = weight1.unflatten(1, (2, -1)).transpose(1, 2)
        super().take(gate_up.reshape_as(weight1), weight2)

    def forward(self, x: Tensor) -> Tensor:
        sonic = importlib.import_module("sonicmoe")
        kind = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        weights = (w.permute(1, 2, 0) for w in (self.weight1, self.weight2))
        w1, w2 = weights
        stream, inference = torch.cuda.current_stream().cuda_stream, not torch.is_grad_enabled()
        router = self.router.weight
        out: Tensor = sonic.moe_TC_softmax_topk_layer(
            x, router, w1, None, w2, None, self.top_k, stream, kind, inference
        )[0]
        return out


class LigerCuteMoE(RoutedMoE):
    """LigerCute over all ranks: exchanges and GEMMs of a pass in one kernel. Its gate and up are
    parameters of their own: weight1 is the gate's [El, F, H]. `prepare_rivals` comes first."""

    def __init__(self, case: MoECase, device: torch.device) -> None:
        super().__init__(case, device, dist.get_world_size())
        gate = self.weight1.detach()[:, : case.ffn]
        self.weight1 = nn.Parameter(torch.empty_like(gate, memory_format=torch.contiguous_format))
        self.up = nn.Parameter(torch.empty_like(self.weight1))

    @torch.no_grad()
    def take(self, weight1: Tensor, weight2: Tensor) -> None:
        gate, up = weight1.chunk(2, dim=1)
        super().take(gate, weight2)
        self.up.copy_(up)

    def experts(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        fused = importlib.import_module("liger_kernel.ops.cute.ops.moe").moe_fused
        sizes = self.num_experts, self.top_k
        weights = self.weight1, self.up, self.weight2
        out: Tensor = fused(x, ids.int(), probs.to(x.dtype), *weights, *sizes, dist.group.WORLD)
        return out


RIVALS: dict[str, Callable[[MoECase, torch.device], RoutedMoE]] = {
    "torch_grouped": TorchGroupedMoE,
    "liger_triton": LigerTritonMoE,
    "sonic": SonicMoE,
    "liger_cute": LigerCuteMoE,
}
"""By variant."""
EXPERT_PARALLEL = ("liger_cute",)
"""Those of RIVALS that run on several GPUs; the others have one GPU's experts."""
_MODULES = {
    "liger_triton": "liger_kernel",
    "sonic": "sonicmoe",
    "liger_cute": "liger_cute_kernels",
    "megatron_te_deepep": "deep_ep",
    "megatron_te_nccl_ep": "nccl",
}


def missing(variant: str) -> str | None:
    """Why this machine cannot measure a variant of another library, or None."""
    module = _MODULES.get(variant)
    if module is not None and importlib.util.find_spec(module) is None:
        return f"{module} is not importable (docs/rivals.md)"
    return None


def prepare_rivals(cases: Iterable[MoECase], tokens: int, device: torch.device) -> None:
    """Reserve LigerCute's buffers for the largest of some cases: they cannot grow. Collective."""
    cute = importlib.import_module("liger_cute_kernels")
    every = list(cases)
    most = cute.MoEConfig(
        max_tokens=max(case.tokens or tokens for case in every),
        hidden_size=max(case.hidden for case in every),
        num_experts=max(case.experts for case in every),
        top_k=max(case.top_k for case in every),
        num_hosts=1,
        gpus_per_host=dist.get_world_size(),
        group="ep",
        max_inflight=2,
    )
    world = dist.group.WORLD
    cute.configure(process_groups={"ep": world}, bootstrap_group=world, device=device, moe=most)


def close_rivals() -> None:
    """Free what `prepare_rivals` reserved, before the process groups go. Collective."""
    importlib.import_module("liger_cute_kernels").nvshmem.finalize()
