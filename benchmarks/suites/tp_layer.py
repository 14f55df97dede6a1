"""One dense Transformer layer under tensor and sequence parallelism: Megatron as it is, with our
overlap, with Transformer Engine's.

    benchmarks/launch.sh tp_layer --output benchmarks/results/tp_layer.json

All ranks are tensor parallel. bf16, SwiGLU, RMSNorm, grouped-query attention, no bias, no dropout,
causal; forward, and with backward. With Transformer Engine installed the layer is Megatron's
Transformer Engine spec, else its local spec. `megatron` and `fluid` are the same layer with
`--fluid-tp-overlap` off and auto (`fluid_on`: on); `megatron_te_tp_overlap` is `--tp-comm-overlap`
with userbuffers, without multicast. `floor` are the layer's four linears on data that is already
here, three times that in train. The host has a head start (benchmarks/harness/timing.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from benchmarks.report.timeline import write_trace
from megatron_fluid.cli.terminal import positive

__all__ = ["CASES", "Shape", "main"]

PATCHES = ("column-parallel-linear", "row-parallel-linear", "te-linear", "te-layer-norm-linear")
OVERLAP = {"megatron": "off", "fluid": "auto", "fluid_on": "on"}
VARIANTS = ("floor", *OVERLAP, "megatron_te_tp_overlap")


@dataclass(frozen=True)
class Shape:
    """Widths of one layer."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int

    def linears(self, ranks: int) -> list[tuple[int, int]]:
        """(N, K) of the four linears on one rank."""
        head = self.hidden // self.heads
        qkv = head * (self.heads + 2 * self.kv_heads)
        return [
            (qkv // ranks, self.hidden),
            (self.hidden, self.hidden // ranks),
            (2 * self.ffn // ranks, self.hidden),
            (self.hidden, self.ffn // ranks),
        ]


CASES = {
    "llama-3-70b": Shape(8192, 64, 8, 28672, 8192),
    "llama-3-8b": Shape(4096, 32, 8, 14336, 8192),
    "qwen3-1.7b": Shape(2048, 16, 8, 6144, 4096),
    "tiny": Shape(64, 4, 2, 96, 32),
}


def _has_te() -> bool:
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def _layer(shape: Shape, device: torch.device, overlap: bool) -> torch.nn.Module:
    """The layer, with Transformer Engine's own overlap if asked for."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=True,
        bias_activation_fusion=device.type == "cuda",
        gradient_accumulation_fusion=False,
        tp_comm_overlap=overlap,
    )
    spec = (
        get_gpt_layer_with_transformer_engine_spec()
        if _has_te()
        else get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    return build_module(spec, config=config, layer_number=1).to(device=device, dtype=dtype)


def _userbuffers_layer(shape: Shape, device: torch.device) -> torch.nn.Module:
    """Transformer Engine's tp-comm-overlap, as megatron.training initialises it. Collective."""
    if not _has_te():
        raise RuntimeError("Transformer Engine is not installed")
    from transformer_engine.pytorch.module import base

    os.environ.setdefault("UB_SKIPMC", "1")
    base.destroy_ub()  # of the case before
    base.initialize_ub(
        shape=[shape.sequence, shape.hidden],
        tp_size=dist.get_world_size(),
        quantization_modes=[base.UserBufferQuantizationMode.NONE],
        bootstrap_backend="nccl",
    )
    return _layer(shape, device, overlap=True)


def _gemms(shape: Shape, device: torch.device, train: bool) -> Callable[[], None]:
    ranks, dtype = dist.get_world_size(), torch.bfloat16 if device.type == "cuda" else torch.float32
    pairs = []
    for n, k in shape.linears(ranks):
        a = torch.randn(shape.sequence, k, device=device, dtype=dtype)
        pairs.append(
            (
                a,
                torch.randn(n, k, device=device, dtype=dtype),
                torch.randn(shape.sequence, n, device=device, dtype=dtype),
            )
        )

    def run() -> None:
        for a, b, c in pairs:
            torch.mm(a, b.t())
            if train:
                torch.mm(c, b)
                torch.mm(c.t(), a)

    return run


def _call(
    layer: torch.nn.Module, x: Tensor, grad: Tensor, train: bool, overlap: str
) -> Callable[[], None]:
    from megatron_fluid.config import FluidConfig, set_config

    settings, parameters = FluidConfig(tp_overlap=overlap), [*layer.parameters(), x]

    def forward() -> None:
        set_config(settings)
        with torch.no_grad():
            layer(hidden_states=x, attention_mask=None)

    def step() -> None:
        set_config(settings)
        layer(hidden_states=x, attention_mask=None)[0].backward(grad)
        for parameter in parameters:
            parameter.grad = None

    return step if train else forward


def _outputs(layer: torch.nn.Module, x: Tensor, grad: Tensor, overlap: str) -> list[Tensor]:
    """Output and every gradient of one step."""
    from megatron_fluid.config import FluidConfig, set_config

    set_config(FluidConfig(tp_overlap=overlap))
    y = layer(hidden_states=x, attention_mask=None)[0]
    y.backward(grad)
    parameters = [*layer.parameters(), x]
    found = [y.detach().float(), *(p.grad.float() for p in parameters if p.grad is not None)]
    for parameter in parameters:
        parameter.grad = None
    return found


def _verify(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> float:
    """Largest relative difference between the layer with and without our overlap, over outputs,
    gradients and ranks."""
    own, ours = (_outputs(layer, x, grad, overlap) for overlap in ("off", "on"))
    assert len(own) == len(ours)
    errors = [(a - b).norm() / a.norm().clamp_min(1e-20) for a, b in zip(own, ours, strict=True)]
    worst = torch.stack(errors).nan_to_num(9.0).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and, on rank 0, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["llama-3-70b"])
    parser.add_argument(
        "--modes", nargs="+", choices=("forward", "train"), default=["forward", "train"]
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--iters", type=positive, default=15)
    parser.add_argument("--repeats", type=positive, default=3, help="calls in one sample")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write a trace and a timeline picture of each mode",
    )
    parser.add_argument("--profile-folder", type=Path, default=Path("profiles"))
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_fluid
    from megatron_fluid import close_group, patches

    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    patches.apply_all()
    applied = [name for name in PATCHES if patches.is_applied(name)]
    if rank == 0:
        print(
            f"megatron_fluid {megatron_fluid.__version__}, patches applied: {', '.join(applied)}",
            flush=True,
        )
    rows: list[Row] = []
    for name in options.cases:
        shape = CASES[name]
        layer = _layer(shape, device, overlap=False)
        dtype = next(layer.parameters()).dtype
        x = torch.randn(
            shape.sequence // ranks, 1, shape.hidden, device=device, dtype=dtype, requires_grad=True
        )
        grad = torch.randn_like(x)
        error = _verify(layer, x, grad)
        if not error <= (2e-2 if on_gpu else 1e-4):
            raise ValueError(
                f"{name}: outputs or gradients with the overlap differ from Megatron's by "
                f"{error:.1e}"
            )
        layers = {
            variant: (layer, overlap)
            for variant, overlap in OVERLAP.items()
            if variant in options.variants
        }
        absent: dict[str, str] = {}
        if "megatron_te_tp_overlap" in options.variants:
            reason = None
            try:
                layers["megatron_te_tp_overlap"] = (_userbuffers_layer(shape, device), "off")
                _outputs(layers["megatron_te_tp_overlap"][0], x, grad, "off")
            except (
                Exception
            ) as problem:  # a rival that does not start is named, and the others are measured
                reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            reasons: list[str | None] = [None] * ranks
            dist.all_gather_object(reasons, reason)
            if any(reasons):
                layers.pop("megatron_te_tp_overlap", None)
                absent["megatron_te_tp_overlap"] = next(r for r in reasons if r)
        for mode in options.modes:
            train = mode == "train"
            calls: dict[str, Callable[[], object]] = {}
            if "floor" in options.variants:
                calls["floor"] = _gemms(shape, device, train)
            calls |= {
                v: _call(built, x, grad, train, overlap) for v, (built, overlap) in layers.items()
            }
            head_start = layer_head_start_ms(device)
            timings = measure(
                calls,
                device,
                iters=options.iters,
                warmup=3,
                repeats=options.repeats,
                head_start_ms=head_start,
            )
            config: dict[str, Any] = {
                "tokens": shape.sequence,
                "ranks": ranks,
                "error": error,
                "absent": absent,
            }
            config |= {"repeats": options.repeats, "head_start_ms": head_start}
            config["spec"] = "transformer_engine" if _has_te() else "local"
            rows += [timing.row(name, mode, variant, config) for variant, timing in timings.items()]
            if rank == 0:
                base = timings.get("megatron", next(iter(timings.values()))).median_ms
                line = "  ".join(
                    f"{v} {t.median_ms:.3f} ({base / t.median_ms:.3f}x)" for v, t in timings.items()
                )
                print(f"{name} {mode}: {line}", flush=True)
                if options.output is not None:
                    write_results("tp_layer", rows, ranks, options.output)
            if options.profile:
                write_trace(calls, device, options.profile_folder / f"tp_layer-{name}-{mode}.json")
        if rank == 0:
            for variant, reason in absent.items():
                print(f"{name}: {variant} absent: {reason}", flush=True)
    dist.barrier()
    close_group(parallel_state.get_tensor_model_parallel_group())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
