"""Models and variants of the end-to-end benchmark, as flags of Megatron's own command line.

Widths are the models' own, layers are fewer: what a GPU holds beside the optimizer's states.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "BEST",
    "CASES",
    "OPTIONS",
    "ROUTINGS",
    "VARIANTS",
    "PretrainCase",
    "Variant",
    "best_variant",
    "common_flags",
    "flags_of",
]

BEST = Path(__file__).resolve().parents[1] / "tune" / "megatron_best.json"
"""What benchmarks/tune/megatron_best.py found, by case and ranks."""


@dataclass(frozen=True)
class PretrainCase:
    """A model: ``model`` are its flags; ``layers`` by whether one GPU trains it or several;
    ``experts`` likewise."""

    model: Sequence[str]
    layers: tuple[int, int]
    experts: tuple[int, int]
    sequence: int = 4096
    microbatches: int = 16
    vocabulary: int = 32000


def _widths(hidden: int, heads: int, groups: int, ffn: int, top_k: int) -> list[str]:
    flags = ["--hidden-size", str(hidden), "--num-attention-heads", str(heads)]
    if groups != heads:
        flags += ["--group-query-attention", "--num-query-groups", str(groups)]
    flags += ["--ffn-hidden-size", str(ffn), "--moe-ffn-hidden-size", str(ffn)]
    return [*flags, "--moe-router-topk", str(top_k)]


_LATENT_ATTENTION = [
    "--multi-latent-attention",
    *("--q-lora-rank", "1536", "--kv-lora-rank", "512"),
    *("--qk-head-dim", "128", "--qk-pos-emb-head-dim", "64", "--v-head-dim", "128"),
    "--qk-layernorm",
]

CASES = {
    "qwen3-30b-a3b": PretrainCase(_widths(2048, 32, 4, 768, 8), (4, 8), (128, 128)),
    "olmoe": PretrainCase(_widths(2048, 16, 16, 1024, 8), (6, 12), (64, 64)),
    "qwen3-235b-a22b": PretrainCase(_widths(4096, 64, 4, 1536, 8), (1, 3), (128, 128)),
    "mixtral-8x7b": PretrainCase(_widths(4096, 32, 8, 14336, 2), (2, 4), (8, 8)),
    # The experts that one of four GPUs holds; on several GPUs all.
    "deepseek-v3": PretrainCase(
        [
            *_widths(7168, 128, 128, 2048, 8),
            *_LATENT_ATTENTION,
            *("--moe-shared-expert-intermediate-size", "2048"),
        ],
        (1, 1),
        (64, 256),
    ),
    "tiny": PretrainCase(
        _widths(64, 4, 4, 96, 2), (2, 2), (8, 8), sequence=64, microbatches=2, vocabulary=512
    ),
}
"""``tiny`` is for CPUs, the others are for GPUs."""


@dataclass(frozen=True)
class Variant:
    """One way to train: flags and environment beside those that all share.

    ``fluid``: megatron_fluid is imported and overlaps; else nothing of ours is in the process.
    ``needs``: modules without which the variant cannot be run. ``without``: flags of
    common_flags that it leaves out.
    """

    fluid: bool = False
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    without: Sequence[str] = ()

    def with_option(self, name: str) -> Variant:
        """This and one of OPTIONS."""
        more = OPTIONS[name]
        return Variant(
            flags=[*self.flags, *more.flags],
            environment={**self.environment, **more.environment},
            needs=[*self.needs, *more.needs],
            without=[*self.without, *more.without],
        )

    def missing(self) -> str | None:
        """Why this machine cannot run the variant, or None."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{absent[0]} is not importable" if absent else None


_GRAPH = [
    *("--cuda-graph-impl", "transformer_engine"),
    *("--cuda-graph-modules", "attn", "moe_router", "moe_preprocess"),
    "--te-rng-tracker",
]
# Forward and backward of all microbatches as one graph. On one rank there is no reduction or gather
# to overlap. On four, losses with both were not those of an eager run to the last bit.
_UNCHECKED = ["--no-check-for-nan-in-loss-and-grad"]
# A graph replays the fused optimizer; eager iterations of Megatron are left as one finds them.
_WHOLE_GRAPH = ["--fluid-graph", "--fluid-fused-optimizer"]
_OVERLAPS = ["--overlap-grad-reduce", "--overlap-param-gather"]
_FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
_ENGINE = ["transformer_engine"]
_APEX = "fused_weight_gradient_mlp_cuda"
# All experts' weights of a layer as two parameters. Megatron asks for the fused operation with it,
# and Transformer Engine for both variables.
_GROUPED_WEIGHT: dict[str, Any] = {
    "flags": ["--moe-single-grouped-weight", "--use-transformer-engine-op-fuser"],
    "environment": {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"},
    "needs": _ENGINE,
}

_FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend"]
_OVERLAP_1F1B = ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"]
_CAPACITY = [
    *("--moe-expert-capacity-factor", "1.25", "--moe-pad-expert-input-to-capacity"),
    *("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn", "moe"),
]
_STASH = ["--moe-paged-stash", "--moe-expert-rank-capacity-factor", "1.25"]

OPTIONS = {
    "graph": Variant(flags=_GRAPH, needs=_ENGINE),
    "apex": Variant(needs=[_APEX]),
    "unchecked": Variant(flags=_UNCHECKED),
    "late_reductions": Variant(without=_OVERLAPS),
    "cutlass": Variant(environment={"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}, needs=_ENGINE),
    "single_launch": Variant(
        environment={"NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": "1"}, needs=_ENGINE
    ),
    "grouped_weight": Variant(**_GROUPED_WEIGHT),
    "router_fusion": Variant(flags=["--moe-router-fusion"], needs=_ENGINE),
    "cross_entropy": Variant(
        flags=["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]
    ),
    "allgather": Variant(flags=["--moe-token-dispatcher-type", "allgather"]),
    "wgrad_overlap": Variant(flags=["--overlap-dispatch-backward-with-experts-wgrad"]),
    "expert_overlap": Variant(
        flags=_OVERLAP_1F1B, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    ),
    "deepep": Variant(flags=[*_FLEX, "deepep"], needs=["deep_ep"]),
    "nccl_ep": Variant(flags=[*_FLEX, "ncclep", "--moe-ncclep-static-shape", *_STASH]),
    # An overflow of the stash runs the iteration again without a graph.
    "stash_graph": Variant(
        flags=[
            *(*_FLEX, "ncclep", "--moe-ncclep-static-shape", *_STASH),
            *("--cuda-graph-impl", "full_iteration", *_UNCHECKED),
        ],
        without=_OVERLAPS,
    ),
    "capacity_graph": Variant(flags=_CAPACITY, needs=_ENGINE),
    "fp8": Variant(flags=_FP8, needs=_ENGINE),
}
"""Flags of Megatron's that benchmarks/tune/megatron_best.py searches, by the name of each set."""


def best_variant(case: str, ranks: int, fp8: bool = False) -> Variant | None:
    """The fastest set of OPTIONS that was found for a case, None where none was searched."""
    found = json.loads(BEST.read_text()) if BEST.is_file() else {}
    kept = found.get(f"{case}, {ranks} GPU" + (", fp8" if fp8 else ""))
    if kept is None:
        return None
    variant = Variant()
    for name in kept["winner"]:
        variant = variant.with_option(name)
    return variant


VARIANTS = {
    "megatron": Variant(),
    # Their flags are those of best_variant.
    "megatron_best": Variant(needs=_ENGINE),
    "megatron_best_fp8": Variant(needs=_ENGINE),
    "megatron_graph": Variant(flags=_GRAPH, needs=_ENGINE),
    # As fluid_whole_graph, but for the graph of a whole iteration: row counts that the host reads
    # keep Megatron from it.
    "megatron_graph_unchecked": Variant(
        flags=[*_GRAPH, *_UNCHECKED], needs=_ENGINE, without=_OVERLAPS
    ),
    "megatron_graph_apex": Variant(
        flags=[*_GRAPH, *_UNCHECKED], needs=[_APEX, *_ENGINE], without=_OVERLAPS
    ),
    "fluid": Variant(fluid=True),
    "fluid_graph": Variant(fluid=True, flags=_GRAPH, needs=_ENGINE),
    "fluid_whole_graph": Variant(fluid=True, flags=_WHOLE_GRAPH, needs=_ENGINE, without=_OVERLAPS),
    "fluid_whole_graph_fp8": Variant(
        fluid=True, flags=[*_WHOLE_GRAPH, *_FP8], needs=_ENGINE, without=_OVERLAPS
    ),
    "fluid_fp8": Variant(fluid=True, flags=_FP8, needs=_ENGINE),
    "fluid_graph_fp8": Variant(fluid=True, flags=[*_GRAPH, *_FP8], needs=_ENGINE),
}


ROUTINGS = {
    "forced": ["--moe-router-force-load-balancing", "--moe-router-load-balancing-type", "none"],
    "real": ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"],
}
"""How experts get their tokens: at random, so that every run does the same work, or as a router
sends them that an auxiliary loss balances."""


def common_flags(
    case: PretrainCase, ranks: int, iterations: int, gpu: bool, routing: str = "forced"
) -> list[str]:
    """What all variants share: the model, one expert-parallel group over all ranks, mock data, and
    one of ROUTINGS."""
    several = int(ranks > 1)
    flags = [
        *case.model,
        *("--num-layers", str(case.layers[several])),
        *("--num-experts", str(case.experts[several])),
        *("--seq-length", str(case.sequence), "--max-position-embeddings", str(case.sequence)),
        *("--micro-batch-size", "1", "--global-batch-size", str(case.microbatches * ranks)),
        *("--expert-model-parallel-size", str(ranks)),
        *("--vocab-size", str(case.vocabulary), "--tokenizer-type", "NullTokenizer"),
        *("--mock-data", "--split", "1,1,1", "--no-create-attention-mask-in-dataloader"),
        *("--train-iters", str(iterations), "--eval-iters", "0", "--eval-interval", "1000000"),
        *("--log-interval", "1", "--seed", "1234"),
        *("--lr", "1e-4", "--lr-decay-style", "constant"),
        *("--moe-token-dispatcher-type", "alltoall", *ROUTINGS[routing]),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
    ]
    if gpu:
        return [
            *flags,
            *("--bf16", "--moe-grouped-gemm", "--moe-permute-fusion"),
            *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
            "--disable-gloo-process-groups",
        ]
    return [
        *flags,
        *("--transformer-impl", "local", "--no-persist-layer-norm", "--no-rope-fusion"),
        "--no-masked-softmax-fusion",
    ]


def flags_of(variant: Variant, ranks: int, gpu: bool) -> list[str]:
    """The flags of one variant beside :func:`common_flags`."""
    flags = list(variant.flags)
    # Megatron refuses the fusion without Apex, where ours has a kernel of its own.
    if not (gpu and variant.fluid) and _APEX not in variant.needs:
        flags.append("--no-gradient-accumulation-fusion")
    if variant.fluid:
        flags += ["--fluid-moe-backend", "local" if gpu and ranks == 1 else "auto"]
    elif not gpu:
        flags += ["--fluid-moe-backend", "megatron"]  # the CPU mode itself is ours
    return flags
