"""`megatron-fluid warm`: compile kernels into their caches before a job starts, for example while a
container image is built.

megatron-fluid warm qwen3-30b-a3b           a model by name, one or several
megatron-fluid warm --from-args FLAGS       all flags of a Megatron training, given last

NVRTC compiles the kernels for Hopper GPUs, which needs no GPU. If there is a GPU, one layer of the
model also runs forward and backward, which compiles Triton's kernels.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from megatron_fluid.cli.models import Model, add_models, wanted_models
from megatron_fluid.cli.terminal import writable_folder
from megatron_fluid.errors import ConfigError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "compile a model's kernels ahead of its first step"

_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the subcommand takes."""
    add_models(parser)
    dtype = "dtype of the experts (bf16, or that of the flags)"
    parser.add_argument("--dtype", choices=("bf16", "fp16"), help=dtype)


def run(args: argparse.Namespace) -> int:
    """Compile for each model. Raises ConfigError or FluidError if a kernel cannot be compiled or
    kept."""
    dtype = args.dtype or ("fp16" if "--fp16" in (args.from_args or ()) else "bf16")
    for name, model in wanted_models(args).items():
        if not model.experts:
            raise ConfigError(f"warm: {name} has no experts, and so no kernels to compile")
        _warm(model, dtype)
    return 0


def _warm(model: Model, name: str) -> None:
    import torch
    import triton

    from megatron_fluid.cuda import kernel_build
    from megatron_fluid.kernels.grouped_gemm.launch import GROUPED, layer_kernels

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    begin = time.monotonic()
    kernels = layer_kernels(model.hidden, "swiglu", sends=model.expert > 1)
    units = [GROUPED.unit(kernel, dtype) for kernel in kernels]
    folder = Path(triton.knobs.cache.dir) / "megatron_fluid"
    if not all((folder / f"{unit.key}.cubin").is_file() for unit in units):  # an image may hold all
        writable_folder("TRITON_CACHE_DIR", folder)  # before minutes of compilation
    for future in kernel_build.start(units):
        future.result()
    print(f"{len(kernels)} kernels for Hopper in {name}: {time.monotonic() - begin:.1f} s")
    if not torch.cuda.is_available():
        print("no GPU: Triton's kernels will be compiled at the first step")
        return
    begin = time.monotonic()
    _step(model, dtype)
    print(f"one layer's step on the GPU: {time.monotonic() - begin:.1f} s ({folder.parent})")


def _step(model: Model, dtype: Any) -> None:
    """One layer forward and backward, with the experts that one rank holds."""
    import torch
    import torch.distributed as dist

    from megatron_fluid import MoEConfig, MoELayer

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    experts, top_k = model.experts // model.expert, model.top_k
    sizes = model.hidden, model.expert_ffn, experts, min(top_k, experts)
    config = MoEConfig(*sizes, backend="local")
    layer = MoELayer(config, dist.group.WORLD, device="cuda", dtype=dtype)
    tokens = torch.randn(_TOKENS, model.hidden, device="cuda", dtype=dtype, requires_grad=True)
    layer(tokens).sum().backward()
    torch.cuda.synchronize()
    dist.destroy_process_group()
