"""Experts split over tensor-parallel ranks: AllGather, scatter, grouped GEMM; grouped GEMM, gather,
ReduceScatter; overlapped or not.

    benchmarks/launch.sh tp_experts --output benchmarks/results/tp_experts.json

`fluid` is what the rule takes, `fluid_copy_engine` the overlapped form, a block of rows a rank,
`nccl` the collective form, one block. `floor` is the two grouped GEMMs alone, on rows that are
already in place. bf16, SwiGLU-wide first product without the activation, random routing. Cases are
model-tokens, tokens of all ranks; mode ag, rs (one product, forward), layer (both, forward), train
(both, and backward).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases.moe import CASES as MODELS
from benchmarks.cases.moe import MoECase, router_logits, torch_grouped_matmul
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import measure
from megatron_fluid import close_group
from megatron_fluid.errors import ConfigError
from megatron_fluid.tensor_parallel import (
    all_gather_grouped_matmul,
    grouped_matmul_reduce_scatter,
    plan_rows,
)

__all__ = ["main"]

BACKENDS = {"fluid": "auto", "fluid_copy_engine": "copy_engine", "nccl": "collective"}
CASES = {**MODELS, "tiny": MoECase(32, 48, 4, 2)}


def _calls(
    case: MoECase, tokens: int, mode: str, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Every variant of one mode; variants that this group cannot have are left out, and named on
    rank 0."""
    group = dist.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mine = tokens // ranks

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (
            (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_(mode == "train")
        )

    logits = router_logits(case, mine, 0.0, 100 + rank, device)
    probs, ids = logits.softmax(-1).topk(case.top_k, -1)
    x, grad = random(mine, case.hidden), torch.randn(mine, case.hidden, device=device).to(dtype)
    w1 = random(case.experts, 2 * case.ffn // ranks, case.hidden, scale=0.02)
    w2 = random(case.experts, case.hidden, 2 * case.ffn // ranks, scale=0.02)
    h = random(tokens * case.top_k, 2 * case.ffn // ranks)
    ends = plan_rows(ids, case.experts, group, "collective").rows.ends[0]
    rows = torch.randn(tokens * case.top_k, case.hidden, device=device).to(dtype)

    def gemms() -> None:
        with torch.no_grad():
            for _ in range(3 if mode == "train" else 1):
                if mode != "rs":
                    torch_grouped_matmul(rows, w1.transpose(1, 2), ends)
                if mode != "ag":
                    torch_grouped_matmul(h, w2.transpose(1, 2), ends)

    calls: dict[str, Callable[[], object]] = {"floor": gemms}
    for name, backend in BACKENDS.items():
        try:
            routed = plan_rows(ids, case.experts, group, backend)
        except ConfigError as error:
            if rank == 0:
                print(f"{name} absent: {error}", flush=True)
            continue

        def call(routed=routed) -> None:  # type: ignore[no-untyped-def]
            if mode == "ag":
                all_gather_grouped_matmul(x, w1, routed)
            elif mode == "rs":
                grouped_matmul_reduce_scatter(h, w2, routed, probs)
            else:
                inner = all_gather_grouped_matmul(x, w1, routed)
                y = grouped_matmul_reduce_scatter(inner, w2, routed, probs)
                if mode == "train":
                    y.backward(grad)
                    for tensor in (x, w1, w2):
                        tensor.grad = None

        calls[name] = call
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", choices=sorted(CASES), default=["mixtral-8x7b", "qwen3-30b-a3b"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of all ranks")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("ag", "rs", "layer", "train"),
        default=["ag", "rs", "layer", "train"],
    )
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    results: list[Row] = []
    for name in options.cases:
        for tokens in options.tokens:
            for mode in options.modes:
                calls = _calls(CASES[name], tokens, mode, device)
                timings = measure(
                    calls, device, warmup=2, iters=options.iters, repeats=options.repeats
                )
                label = f"{name}-{tokens}"
                results += [
                    t.row(label, mode, v, {"ranks": dist.get_world_size()})
                    for v, t in timings.items()
                ]
                if dist.get_rank() == 0:
                    floor = timings["floor"].median_ms
                    line = "  ".join(
                        f"{v} {t.median_ms:.3f} ({t.median_ms / floor:.2f})"
                        for v, t in timings.items()
                    )
                    print(f"{label} {mode}: {line}", flush=True)
                    if options.output is not None:
                        write_results("tp_experts", results, dist.get_world_size(), options.output)
                del calls
    dist.barrier()
    assert dist.group.WORLD is not None
    close_group(dist.group.WORLD)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
