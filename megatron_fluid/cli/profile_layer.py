"""One MoE layer under torch's profiler. `megatron-fluid profile` starts this on every rank."""

import argparse
import dataclasses
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.moe.config import MoEConfig
from megatron_fluid.moe.layer import MoEBaseline, MoELayer
from megatron_fluid.profiling.timeline import STEP, add_facts

__all__ = ["main"]

# (tokens, layer): the widths of Qwen3-30B-A3B on a GPU, small ones on a CPU.
_ON_GPU = 4096, MoEConfig(hidden_size=2048, ffn_hidden_size=768, num_experts=128, top_k=8)
_ON_CPU = 1024, MoEConfig(hidden_size=256, ffn_hidden_size=1024, num_experts=8, top_k=2)


def main() -> int:
    """Run a few forwards and backwards, the last three of them under the profiler; rank 0 writes
    its trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--hosts", action="store_true", help="each rank counts as a host")
    options = parser.parse_args()
    if options.hosts:
        os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host {os.environ['RANK']}"
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    tokens, layer = _ON_GPU if on_gpu else _ON_CPU
    # Round up, so that any number of ranks divides the experts.
    each = math.ceil(layer.num_experts / dist.get_world_size())
    layer = dataclasses.replace(layer, num_experts=each * dist.get_world_size())
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kind = MoEBaseline if options.baseline else MoELayer
    model = kind(layer, ep_group=dist.group.WORLD, device=device, dtype=dtype)
    scheduler = get_backward_scheduler()
    if not options.baseline:
        scheduler.enable()

    def step() -> None:
        shape = (tokens, layer.hidden_size)
        with torch.profiler.record_function(STEP):
            x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            with torch.profiler.record_function("forward"):
                loss = model(x).square().mean()
            with torch.profiler.record_function("backward"):
                loss.backward()
            scheduler.finish_batch()
            model.zero_grad(set_to_none=True)
            if on_gpu:
                torch.cuda.synchronize()  # a step's kernels lie within its mark

    for _ in range(5):
        step()
    dist.barrier()
    # FLOPs of a rank if the rows of the experts are spread evenly over the ranks.
    weights = model.weight1[0].numel() + model.weight2[0].numel()
    forward = 2 * tokens * (layer.top_k * weights + model.router.weight.numel())
    with torch.profiler.profile(acc_events=True, record_shapes=True) as profiler:
        add_facts(profiler, flops=3 * forward, dtype=str(dtype).removeprefix("torch."))
        for _ in range(3):
            step()
    if dist.get_rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(options.output / "moe_layer.json.gz"))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
