"""Whole transformer layers, context times expert parallelism over all ranks: ours, Megatron with
Transformer Engine, and the floor.

    benchmarks/launch.sh block --output benchmarks/results/block.json
    benchmarks/launch.sh block --tiny               the same on gloo ranks, without a GPU

Two layers, bf16, causal attention with rotation, SwiGLU experts, dropless, no biases; random tokens
and weights route evenly. The host has a head start (harness/timing.py). A variant that cannot be
built and run forward and backward on every rank is named and left out. Variants:

    fluid             megatron_fluid.TransformerLayer
    fluid_no_overlap  the same over plain all-to-all collectives
    fluid_graph       fluid with a capacity factor, replayed from a CUDA graph; forward only
    fluid_megatron    Megatron's layers, patched
    megatron_te_a2a   Megatron's layers, unpatched: cp_comm_type a2a, alltoall dispatcher, grouped
                      GEMM, fused permute
    megatron_te_grouped_weight  the same with one parameter for all experts of a layer, whose GEMMs
                      are a launch each from cuBLAS 13.4 on
    floor             projections, attention kernel and grouped GEMMs alone
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.attention import (
    AttentionCase,
    attention_floor,
    forward_call,
    start_megatron,
    step_call,
)
from benchmarks.cases.moe import MoECase
from benchmarks.cases.moe_layers import CAPACITY_FACTOR, graph_call
from benchmarks.cases.moe_variants import ENVIRONMENT, settings_of
from benchmarks.harness.left_out import everywhere
from benchmarks.harness.options import MODES, chosen
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from benchmarks.harness.variants import runnable
from megatron_fluid import MoELayer, TransformerLayer
from megatron_fluid.cli.terminal import positive

__all__ = ["main"]

LAYERS = 2
VARIANTS = (
    "fluid",
    "fluid_no_overlap",
    "fluid_graph",
    "fluid_megatron",
    "megatron_te_a2a",
    "megatron_te_grouped_weight",
    "floor",
)


@dataclass(frozen=True)
class BlockCase:
    """Layers alike; ``batch`` sequences of ``length`` positions, of which a rank holds length /
    W."""

    hidden: int
    heads: int
    kv_heads: int
    moe: MoECase
    length: int
    batch: int = 1
    head_dim: int = 128

    def attention(self) -> AttentionCase:
        return AttentionCase(self.hidden, self.heads, self.kv_heads, self.length, self.head_dim)


CASES = {
    "seed": BlockCase(4096, 32, 32, MoECase(4096, 14336, 8, 2), 4096, batch=2),
    "mixtral-8x7b": BlockCase(4096, 32, 8, MoECase(4096, 14336, 8, 2), 16384),
    "qwen3-30b-a3b": BlockCase(2048, 32, 4, MoECase(2048, 768, 128, 8), 16384),
}
TINY = {"tiny": BlockCase(64, 8, 4, MoECase(64, 48, 4, 2), 32, batch=2, head_dim=8)}


def _fluid(case: BlockCase, device: torch.device, overlap: bool = True) -> nn.Sequential:
    """Return our layers: x [s, B, H] -> [s, B, H]."""
    group = dist.group.WORLD
    assert group is not None
    layers = []
    for index in range(LAYERS):
        layer = TransformerLayer(
            case.hidden,
            case.heads,
            case.moe.ffn,
            case.moe.experts,
            case.moe.top_k,
            ep_group=group,
            cp_group=group,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            sequence_layout="zigzag",
            overlap=overlap,
            layer_id=index,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        )
        layers.append(layer)
    return nn.Sequential(*layers)


def _bounded(layers: nn.Sequential) -> nn.Sequential:
    """Return layers of the same parameters whose MoE has a capacity factor."""
    found = []
    for index, layer in enumerate(layers):
        assert isinstance(layer, TransformerLayer)
        bounded = copy.copy(layer)
        bounded._modules = dict(layer._modules)
        moe, weight = layer.mlp, layer.mlp.weight1
        config = dataclasses.replace(moe.config, capacity_factor=CAPACITY_FACTOR)
        bounded.mlp = MoELayer(config, layer.ep_group, weight.device, weight.dtype, index)
        bounded.mlp.router = moe.router
        bounded.mlp.weight1, bounded.mlp.weight2 = moe.weight1, moe.weight2
        found.append(bounded)
    return nn.Sequential(*found)


def _fits(layers: nn.Sequential) -> bool:
    """Raise FluidError if a replayed graph left rows out, whose time would be missing."""
    for layer in layers:
        layer.mlp.check_overflow()  # type: ignore[operator, union-attr]
    return True


class _Megatron(nn.Module):
    """Megatron's decoder with Transformer Engine; ``backend``: of attention's exchange and of the
    MoE, "megatron" or "nvlink"; ``settings``: more of Megatron's TransformerConfig."""

    def __init__(
        self, case: BlockCase, device: torch.device, backend: str, **settings: Any
    ) -> None:
        super().__init__()
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_fluid.config import FluidConfig, set_config

        ranks = dist.get_world_size()
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=case.hidden,
            num_attention_heads=case.heads,
            num_query_groups=case.kv_heads,
            kv_channels=case.head_dim,
            ffn_hidden_size=case.moe.ffn,
            moe_ffn_hidden_size=case.moe.ffn,
            num_moe_experts=case.moe.experts,
            moe_router_topk=case.moe.top_k,
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=True,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            add_bias_linear=False,
            bf16=True,
            params_dtype=torch.bfloat16,
            normalization="RMSNorm",
            context_parallel_size=ranks,
            cp_comm_type="a2a",
            expert_model_parallel_size=ranks,
            moe_router_load_balancing_type="none",
            moe_router_force_load_balancing=True,
            moe_permute_fusion=True,
            moe_router_dtype="fp32",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            # As Megatron's command line has them.
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
            apply_rope_fusion=True,
            **settings,
        )
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=case.moe.experts, moe_grouped_gemm=True
        )
        self.config = FluidConfig(moe_backend=backend, cp_backend=backend, tp_overlap="off")
        set_config(self.config)
        model = GPTModel(
            config,
            spec,
            vocab_size=1024,
            max_sequence_length=case.length,
            position_embedding_type="rope",
        )
        model = model.to(device).bfloat16()
        self.decoder, self.rotary = model.decoder, model.rotary_pos_emb(case.length)
        set_config(None)

    def forward(self, x: Tensor) -> Tensor:
        from megatron_fluid.config import set_config

        set_config(self.config)  # a layer may choose its path at its first call
        y: Tensor = self.decoder(hidden_states=x, attention_mask=None, rotary_pos_emb=self.rotary)
        set_config(None)  # megatron_fluid's own layers, built or called next, have theirs
        return y


class _Floor(nn.Module):
    """The layers' projections, attention kernel and grouped GEMMs, without any exchange, routing or
    permutation."""

    def __init__(self, case: BlockCase, device: torch.device, tokens: int) -> None:
        super().__init__()
        self.attention, self.batch = attention_floor(case.attention(), device, "sdpa"), case.batch
        moe, local, rows = (
            case.moe,
            case.moe.experts // dist.get_world_size(),
            tokens * case.moe.top_k,
        )
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * 0.02)

        self.rows, self.activated = parameter(rows, moe.hidden), parameter(rows, moe.ffn)
        self.w1, self.w2 = (
            parameter(local, 2 * moe.ffn, moe.hidden),
            parameter(local, moe.hidden, moe.ffn),
        )
        self.ends = (torch.arange(1, local + 1, device=device) * (rows // local)).to(torch.int32)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _ in range(LAYERS):
            for entry in range(self.batch):
                found += self.attention(x[:, entry : entry + 1])
            found.append(torch._grouped_mm(self.rows, self.w1.transpose(1, 2), offs=self.ends))
            found.append(torch._grouped_mm(self.activated, self.w2.transpose(1, 2), offs=self.ends))
        return tuple(found)


def _variants(
    case: BlockCase, device: torch.device, te: bool, wanted: set[str], x: Tensor
) -> dict[str, nn.Module]:
    on_gpu = device.type == "cuda"
    builders: dict[str, Callable[[], nn.Module]] = {
        "fluid": lambda: _fluid(case, device),
        "fluid_no_overlap": lambda: _fluid(case, device, overlap=False),
    }
    if te:
        builders["fluid_megatron"] = lambda: _Megatron(case, device, "nvlink")
        builders["megatron_te_a2a"] = lambda: _Megatron(case, device, "megatron")
        os.environ.update(ENVIRONMENT)
        name = "megatron_te_grouped_weight"
        builders[name] = lambda: _Megatron(case, device, "megatron", **settings_of(name))
    builders["floor"] = lambda: _Floor(case, device, x.shape[0] * x.shape[1])
    known = [*builders, *(["fluid_graph"] if on_gpu else [])]
    if not wanted <= set(known):
        raise SystemExit(
            f"--variants {','.join(sorted(wanted))}: here there are {', '.join(known)}"
        )
    return runnable(builders, wanted | {"fluid"} if "fluid_graph" in wanted else wanted, x)


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=None, help="comma-separated; all by default")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--iters", type=positive, default=12)
    parser.add_argument(
        "--variants", default="", help="comma-separated; all that can run by default"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes, which gloo ranks can run too"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    known = TINY if options.tiny else CASES
    names = (
        list(known) if options.cases is None else chosen(parser, "--cases", options.cases, known)
    )
    modes = chosen(parser, "--modes", options.modes, MODES)
    wanted = set(
        chosen(parser, "--variants", options.variants, VARIANTS) if options.variants else ()
    )
    warnings.filterwarnings("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    on_gpu = device.type == "cuda"
    absent = "Megatron's groups need GPUs here"
    if on_gpu:
        absent = start_megatron(context_parallel_size=ranks, expert_model_parallel_size=ranks) or ""
    if absent and rank == 0:
        print(f"no fluid_megatron and megatron_te_a2a: {absent}", flush=True)
    rows: list[Row] = []
    for name in names:
        case = known[name]
        shape = (case.length // ranks, case.batch, case.hidden)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        first = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        modules = _variants(case, device, not absent, wanted, first)
        for mode in modes if modules else ():
            make = step_call if mode == "train" else forward_call
            calls: dict[str, Callable[[], object]] = {}
            for variant, module in modules.items():
                x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
                calls[variant] = make(module, x)
            graphed = mode == "forward" and on_gpu and (not wanted or "fluid_graph" in wanted)
            if graphed and "fluid" in modules:
                x = torch.randn(shape, device=device, dtype=dtype)
                bounded = _bounded(modules["fluid"])
                graph = everywhere("fluid_graph", functools.partial(graph_call, bounded, x))
                if graph is not None:
                    calls["fluid_graph"] = graph
            head_start = layer_head_start_ms(device)
            timings = measure(
                calls, device, iters=options.iters, warmup=3, head_start_ms=head_start
            )
            config: dict[str, Any] = {
                "ranks": ranks,
                "layers": LAYERS,
                "length": case.length,
                "batch": case.batch,
            }
            config["head_start_ms"] = head_start
            if "fluid_graph" in timings and not everywhere(
                "fluid_graph", functools.partial(_fits, bounded)
            ):
                del timings["fluid_graph"]
            rows += [timing.row(name, mode, variant, config) for variant, timing in timings.items()]
            if rank == 0:
                base = timings.get(
                    "megatron_te_a2a", timings.get("floor", next(iter(timings.values())))
                ).median_ms
                line = "  ".join(
                    f"{v} {t.median_ms:.3f} ({base / t.median_ms:.2f}x)" for v, t in timings.items()
                )
                print(f"{name} {mode}: {line}", flush=True)
                if options.output is not None:  # also kept if the run is cut short
                    write_results("block", rows, ranks, options.output)
            del calls
        del modules
        if on_gpu:
            torch.cuda.empty_cache()
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
