"""One MoE layer, router included, under every way that is installed of running it: forward, and forward with backward.

    benchmarks/launch.sh moe_layer --output benchmarks/results/moe_layer.json

bf16, SwiGLU, no bias, dropless, 4096 tokens a rank. Every variant routes by the same fixed random logits: its own
router computes its logits, which are then replaced. `floor` is two grouped GEMMs over as many rows, evenly spread (in
train, three times that work); it moves and routes nothing. `fluid_no_overlap` runs the same kernels one after the
other. Cases of which popular experts get more carry `-zipf`.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.moe_cases import CASES, MoECase, router_logits
from benchmarks.results import Row, write_results
from benchmarks.timing import measure
from megatron_fluid.moe import fused_router
from megatron_fluid.moe.nvlink import nvlink_moe
from megatron_fluid.moe.nvlink_domain import NvlinkDomain
from megatron_fluid.moe.nvlink_schedule import NO_OVERLAP
from megatron_fluid.moe.nvlink_shared import shared_domain

__all__ = ["FluidLayer", "main"]

ZIPF = 0.6
MEGATRON = {
    "megatron_te_alltoall": ("alltoall", False),
    "megatron_te_allgather": ("allgather", False),
    "megatron_te_overlap_wgrad": ("alltoall", True),
}


class FluidLayer(nn.Module):
    """Router and experts over NVLink, with the weights in Megatron's layout."""

    def __init__(self, case: MoECase, domain: NvlinkDomain, logits: Tensor) -> None:
        super().__init__()
        local = domain.local_experts

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=logits.device, dtype=torch.bfloat16) * 0.02)

        self.router = weight(case.experts, case.hidden)
        self.w1 = weight(local, 2 * case.ffn, case.hidden)
        self.w2 = weight(local, case.hidden, case.ffn)
        self.case, self.domain, self.logits = case, domain, logits

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        computed = fused_router.router_logits(x, self.router)
        ids, probs = fused_router.topk_softmax(torch.add(self.logits, computed, alpha=0.0), self.case.top_k)
        return nvlink_moe(self.domain, x, ids, probs, self.w1, self.w2)


def _megatron_layer(case: MoECase, dispatcher: str, overlap: bool, logits: Tensor) -> nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=16,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.experts,
        moe_router_topk=case.top_k,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        expert_model_parallel_size=dist.get_world_size(),
        moe_router_load_balancing_type="none",
        moe_permute_fusion=True,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
        moe_router_dtype="fp32",
        **({"overlap_dispatch_backward_with_experts_wgrad": True} if overlap else {}),
    )
    build = get_moe_module_spec(use_te=True, num_experts=case.experts, moe_grouped_gemm=True)
    layer = build(config).to(logits.device).bfloat16()
    if hasattr(layer, "set_layer_number"):
        layer.set_layer_number(1)
    gating = layer.router.gating
    layer.router.gating = lambda x: torch.add(logits.view(*x.shape[:-1], case.experts), gating(x), alpha=0.0)
    return layer


def _start_megatron() -> str | None:
    """Initialise Megatron's groups; the reason where it cannot be measured."""
    try:
        import transformer_engine.pytorch  # noqa: F401
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    except ImportError as error:
        return str(error)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    return None


def _floor(case: MoECase, tokens: int, ranks: int, device: torch.device, train: bool) -> Callable[[], object]:
    rows, local, bf16 = tokens * case.top_k, case.experts // ranks, torch.bfloat16
    x = torch.randn(rows, case.hidden, device=device, dtype=bf16)
    h = torch.randn(rows, 2 * case.ffn, device=device, dtype=bf16)
    a = torch.randn(rows, case.ffn, device=device, dtype=bf16)
    w1 = torch.randn(local, 2 * case.ffn, case.hidden, device=device, dtype=bf16) * 0.02
    w2 = torch.randn(local, case.hidden, case.ffn, device=device, dtype=bf16) * 0.02
    offsets = (torch.arange(1, local + 1, device=device) * (rows // local)).to(torch.int32)

    def run() -> None:
        torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets)
        torch._grouped_mm(a, w2.transpose(1, 2), offs=offsets)
        if train:
            torch._grouped_mm(x, w2, offs=offsets)
            torch._grouped_mm(h, w1, offs=offsets)
            torch._grouped_mm(x.t(), a, offs=offsets)
            torch._grouped_mm(h.t(), x, offs=offsets)

    return run


def _call(
    layer: Callable[[Tensor], Any], parameters: list[nn.Parameter], x: Tensor, grad: Tensor, train: bool
) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def step() -> None:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).backward(grad)
        for p in [*parameters, x]:
            p.grad = None

    return step if train else forward


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--modes", default="forward,train")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--routing", default="balanced,zipf")
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    absent = _start_megatron()
    if absent and rank == 0:
        print(f"no megatron_te variants: {absent}", flush=True)
    rows: list[Row] = []
    for name in options.cases.split(","):
        case = CASES[name]
        for routing in options.routing.split(","):
            logits = router_logits(case, options.tokens, ZIPF if routing == "zipf" else 0.0, 100 + rank, device)
            group = dist.group.WORLD
            assert group is not None
            shape = (group, options.tokens, case.hidden, case.ffn, case.top_k, case.experts)
            fluid = FluidLayer(case, shared_domain(*shape), logits)
            plain = FluidLayer(case, shared_domain(*shape, schedule=NO_OVERLAP), logits)
            plain.w1, plain.w2 = fluid.w1, fluid.w2
            layers: dict[str, nn.Module] = {"fluid": fluid, "fluid_no_overlap": plain}
            for variant, (dispatcher, overlap) in MEGATRON.items():
                if absent is None:
                    try:
                        layers[variant] = _megatron_layer(case, dispatcher, overlap, logits)
                    except Exception as error:  # a rival that does not start is named, and the others are measured
                        print(
                            f"rank {rank}: {variant} left out: {type(error).__name__}: {error}",
                            file=sys.stderr,
                            flush=True,
                        )
            label = name if routing == "balanced" else f"{name}-zipf"
            for mode in options.modes.split(","):
                train = mode == "train"
                calls: dict[str, Callable[[], object]] = {"floor": _floor(case, options.tokens, ranks, device, train)}
                for variant, layer in layers.items():
                    flat = variant.startswith("fluid")
                    size = (options.tokens, case.hidden) if flat else (options.tokens, 1, case.hidden)
                    x = torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)
                    calls[variant] = _call(layer, list(layer.parameters()), x, torch.randn_like(x), train)
                timings = measure(calls, device, iters=options.iters, warmup=3)
                config = {"tokens": options.tokens, "ranks": ranks, "zipf": ZIPF if routing == "zipf" else 0.0}
                config |= {"schedule": str(fluid.domain.schedule)}
                rows += [timing.row(label, mode, variant, config) for variant, timing in timings.items()]
                if rank == 0:
                    floor = timings["floor"].median_ms
                    line = "  ".join(f"{v} {t.median_ms:.3f} ({t.median_ms / floor:.2f})" for v, t in timings.items())
                    print(f"{label} {mode}: {line}", flush=True)
                    if options.output is not None:  # kept up to date, so that a run cut short has told what it measured
                        write_results("moe_layer", rows, ranks, options.output)
                del calls
            del layers, fluid, plain
            torch.cuda.empty_cache()
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
