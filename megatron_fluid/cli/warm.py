"""`megatron-fluid warm`: compile kernels into their caches before a job starts, for example while a
container image is built.

megatron-fluid warm qwen3-30b-a3b                 a model by name
megatron-fluid warm --hidden 2048 --ffn 768 --experts 128 --top-k 8
megatron-fluid warm --from-args --hidden-size 2048 --num-experts 128 ...
                                                  the flags of a Megatron training, given last

NVRTC compiles the kernels for Hopper GPUs, which needs no GPU. If there is a GPU, one layer of the
model also runs forward and backward, which compiles Triton's kernels.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_fluid.cli.arguments import positive
from megatron_fluid.errors import ConfigError, FluidError

__all__ = ["MODELS", "Shape", "add_parser", "run", "shape_of_flags"]

_TOKENS = 256


class Shape(NamedTuple):
    """Hidden size, width of an expert, number of experts, experts of a token."""

    hidden: int
    ffn: int
    experts: int
    top_k: int


MODELS = {
    "deepseek-v3": Shape(7168, 2048, 256, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "olmoe": Shape(2048, 1024, 64, 8),
    "qwen3-235b-a22b": Shape(4096, 1536, 128, 8),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "warm",
        help="compile a model's kernels ahead of its first step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    for name in Shape._fields:
        add(f"--{name.replace('_', '-')}", type=positive, help="of another model: all four sizes")
    add("--dtype", choices=("bf16", "fp16"), default=None, help="dtype of the experts (bf16)")
    ranks = "number of expert-parallel ranks (%(default)s)"
    add("--expert-parallel", type=positive, default=1, help=ranks)
    add("--from-args", nargs=argparse.REMAINDER, metavar="FLAGS", help="flags of a training")
    parser.set_defaults(run=run)


def shape_of_flags(flags: Sequence[str]) -> tuple[Shape, str, int]:
    """Read a Megatron command line.

    Returns:
        The experts' shape, "bf16" or "fp16", and the number of expert-parallel ranks.

    Raises:
        ConfigError: a flag that the shape needs is missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("hidden-size", "ffn-hidden-size", "moe-ffn-hidden-size", "num-experts")
    for name in names:
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--moe-router-topk", type=positive, default=2)  # Megatron's own default
    parser.add_argument("--expert-model-parallel-size", type=positive, default=1)
    parser.add_argument("--fp16", action="store_true")
    found, _ = parser.parse_known_args(flags)
    ffn = found.moe_ffn_hidden_size or found.ffn_hidden_size
    for name, value in zip(
        ("--hidden-size", "--moe-ffn-hidden-size", "--num-experts"),
        (found.hidden_size, ffn, found.num_experts),
        strict=True,
    ):
        if value is None:
            raise ConfigError(f"--from-args: give {name}")
    shape = Shape(found.hidden_size, ffn, found.num_experts, found.moe_router_topk)
    return shape, "fp16" if found.fp16 else "bf16", found.expert_model_parallel_size


def _wanted(args: argparse.Namespace) -> tuple[Shape, str, int]:
    sizes = [getattr(args, name) for name in Shape._fields]
    given = [args.model is not None, any(size is not None for size in sizes), bool(args.from_args)]
    if sum(given) != 1:
        raise ConfigError("warm: give exactly one of MODEL, all four sizes, or --from-args")
    if args.from_args:
        shape, dtype, ranks = shape_of_flags(args.from_args)
        return shape, args.dtype or dtype, ranks
    if args.model is None and None in sizes:
        flags = ("--hidden", "--ffn", "--experts", "--top-k")
        missing = [flag for flag, size in zip(flags, sizes, strict=True) if size is None]
        raise ConfigError(f"warm: give all four sizes; missing: {', '.join(missing)}")
    shape = MODELS[args.model] if args.model is not None else Shape(*sizes)
    return shape, args.dtype or "bf16", args.expert_parallel


def run(args: argparse.Namespace) -> int:
    """Compile; returns 2 if the command line is wrong or a kernel cannot be compiled."""
    try:
        shape, name, ranks = _wanted(args)
        if shape.experts % ranks:
            raise ConfigError.of("--expert-parallel", ranks, f"a divisor of {shape.experts}")
        _warm(shape, name, ranks)
    except (ConfigError, FluidError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _warm(shape: Shape, name: str, ranks: int) -> None:
    import torch

    from megatron_fluid.cuda import kernel_build
    from megatron_fluid.kernels.grouped_gemm.launch import GROUPED, layer_kernels

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    begin = time.monotonic()
    kernels = layer_kernels(shape.hidden, "swiglu", sends=ranks > 1)
    for future in kernel_build.start(GROUPED.unit(kernel, dtype) for kernel in kernels):
        future.result()
    print(f"{len(kernels)} kernels for Hopper in {name}: {time.monotonic() - begin:.1f} s")
    if not torch.cuda.is_available():
        print("no GPU: Triton's kernels will be compiled at the first step")
        return
    begin = time.monotonic()
    _step(shape, dtype, ranks)
    folder = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
    print(f"one layer's step on the GPU: {time.monotonic() - begin:.1f} s ({folder})")


def _step(shape: Shape, dtype: Any, ranks: int) -> None:
    """One layer forward and backward, with the experts that one of `ranks` ranks holds."""
    import torch
    import torch.distributed as dist

    from megatron_fluid import MoEConfig, MoELayer

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    experts = shape.experts // ranks
    config = MoEConfig(shape.hidden, shape.ffn, experts, min(shape.top_k, experts), backend="local")
    layer = MoELayer(config, dist.group.WORLD, device="cuda", dtype=dtype)
    tokens = torch.randn(_TOKENS, shape.hidden, device="cuda", dtype=dtype, requires_grad=True)
    layer(tokens).sum().backward()
    torch.cuda.synchronize()
    dist.destroy_process_group()
