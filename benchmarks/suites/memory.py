"""What a layer on one GPU keeps for its backward and holds at most, by what is computed again,
beside Megatron with Transformer Engine and its recompute flags.

    benchmarks/launch.sh memory --output benchmarks/results/memory-1gpu.json
    benchmarks/launch.sh memory --cases qwen3-30b-a3b

bf16, SwiGLU, 4096 tokens. Rows are of mode `train`: the time of a forward and backward, and in
config `kept_bytes`, allocated between the two, and `peak_bytes`, the most at any time, both above
input and weights. The gradients of the weights are part of the peak.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cases.attention import start_megatron, step_call
from benchmarks.cases.moe import CASES, ONE_GPU_CASES, MoECase, router_logits
from benchmarks.cases.moe_layers import MegatronMoE, fluid_layer, routed_tokens
from benchmarks.harness.options import chosen
from benchmarks.harness.results import Row, result_path, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from benchmarks.suites.moe_layer import memory_of
from megatron_fluid.cli.terminal import positive

__all__ = ["FLUID", "MEGATRON", "main"]

_TOKENS = 4096
FLUID: dict[str, tuple[str, ...]] = {
    "fluid": (),
    "fluid_rows": ("rows",),
    "fluid_hidden": ("hidden",),
    "fluid_both": ("rows", "hidden"),
}
"""Variants, and what they compute again."""
MEGATRON: dict[str, dict[str, object]] = {
    "megatron_te": {},
    "megatron_te_moe_act": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "megatron_te_moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def _builders(
    case: MoECase, device: torch.device, absent: str | None
) -> dict[str, Callable[[], nn.Module]]:
    found: dict[str, Callable[[], nn.Module]] = {}
    for name, again in FLUID.items():
        found[name] = lambda again=again: fluid_layer(  # type: ignore[misc]
            case, device, recompute=again, backend="local"
        )
    if absent is None:
        for name, settings in MEGATRON.items():
            found[name] = lambda settings=settings: MegatronMoE(  # type: ignore[misc]
                case, device, "alltoall", False, "megatron", **settings
            )
    return found


def _measure_case(
    label: str, case: MoECase, device: torch.device, absent: str | None, iters: int
) -> list[Row]:
    """One layer after the other, so that none holds memory beside another."""
    tokens = case.tokens or _TOKENS
    x = routed_tokens(router_logits(case, tokens, 0.0, 100, device), case.hidden).requires_grad_()
    rows: list[Row] = []
    for variant, build in _builders(case, device, absent).items():
        try:
            layer = build()
            call = step_call(layer, x)
            call()
            held = memory_of(call, device, layer, x)
        except Exception as error:  # it is named, and the others are measured
            print(f"{variant} left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        settings = {"iters": iters, "warmup": 3, "repeats": 4}
        head_start = layer_head_start_ms(device)
        timing = measure({variant: call}, device, **settings, head_start_ms=head_start)[variant]
        rows.append(timing.row(label, "train", variant, {"tokens": tokens, **held}))
        kept, peak = (held[name] / 2**20 for name in ("kept_bytes", "peak_bytes"))
        print(
            f"{label:20} {variant:20} kept {kept:6.0f} MiB, peak {peak:6.0f} MiB, "
            f"{timing.median_ms:.3f} ms",
            flush=True,
        )
        del layer, call
        torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each case; a line a variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = {name: CASES[name] for name in ("qwen3-30b-a3b", "olmoe", "mixtral-8x7b")}
    cases |= ONE_GPU_CASES
    parser.add_argument("--cases", default=",".join(cases), help="comma-separated")
    parser.add_argument("--iters", type=positive, default=20, help="samples (%(default)s)")
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    names = chosen(parser, "--cases", options.cases, cases)
    if not torch.cuda.is_available():
        parser.error("memory needs a GPU, found none")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if dist.get_world_size() > 1:
        parser.error("memory: one GPU, NPROC=1")
    absent = start_megatron(expert_model_parallel_size=1)
    if absent:
        print(f"no megatron_te variants: {absent}", flush=True)
    rows: list[Row] = []
    for name in names:
        rows += _measure_case(name, cases[name], device, absent, options.iters)
        write_results("memory", rows, 1, options.output or result_path("memory", 1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
