"""Megatron's MoE layer on GPUs, with the plug-in and without: local modules and Transformer Engine;
peer rounds, symmetric memory, one rank; Megatron's experts or exchange; fp8, grouped parameters.

In fp32 the patched layer may be no further off than Megatron's own; trained losses are Megatron's.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from typing import Any

import pytest
import torch

from tests.support.fp32_oracle import (
    BIASED,
    CLAMPED_ERROR,
    draw_biases,
    errors_of,
    fp32_passes,
    two_passes,
    worse_of,
)
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS, SHARED

pytest.importorskip("megatron.core")

from megatron.core import activations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]

LAYER = {
    "hidden_size": 256, "moe_ffn_hidden_size": 384, "num_moe_experts": 16, "moe_router_topk": 4,
    "moe_router_dtype": "fp32",
}  # fmt: skip
GROUPED = {"moe_grouped_gemm": True}
PERMUTED = GROUPED | {"moe_permute_fusion": True}  # else Megatron's own bits do not repeat
FUSED = GROUPED | {"gradient_accumulation_fusion": True}
SHARED_BESIDE = {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
UNGATED = {"activation_func": torch.nn.functional.gelu, "gated_linear_unit": False}
GPT_OSS = BIASED | {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
}
ON_INPUT = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
WEIGHT = {"moe_single_grouped_weight": True, "use_transformer_engine_op_fuser": True}
BIAS = {"moe_single_grouped_bias": True}
NVLINK, DEFERRED = {"moe_backend": "nvlink"}, {"defer_weight_grads": True}
# Settings that the oracle leaves out: they change how a layer is computed, not what.
HOW = ("fp8", "moe_grouped", "moe_permute", "moe_router_padding", "gradient_accumulation")
HOW += ("moe_shared_expert_overlap", "moe_token_dispatcher_type")
# Transformer Engine asks for both; without the first it makes a parameter for each expert.
ENVIRONMENT = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer. Only the patched one gets `ours`, too: settings for single grouped parameters."""

    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of TransformerConfig
    te: bool = False  # whether its modules are Transformer Engine's
    fluid: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of FluidConfig
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    exchange: str = "local"  # which it must report
    experts: str = "fused"  # or "alone", behind the exchange, or "megatron's", which a hook keeps
    dtype: torch.dtype = torch.bfloat16


def _auto(exchange: str) -> dict[str, Case]:
    """Cases of `moe_backend="auto"`, which takes `exchange`."""
    hooked = {"exchange": exchange, "experts": "megatron's"}
    auto = functools.partial(Case, exchange=exchange)
    return {
        "hooked": Case(**hooked),
        "hooked, shared beside": Case(SHARED_BESIDE, **hooked),
        "hooked, dropping": Case({"moe_expert_capacity_factor": 0.75}, **hooked),
        "te, hooked": Case(GROUPED, te=True, **hooked),
        "te, fp8, hooked": Case(GROUPED | FP8, te=True, **hooked),
        "te, fp8, hooked, padded by us": Case(
            GROUPED | FP8 | {"moe_router_padding_for_quantization": True}, te=True, **hooked
        ),
        "te, fp8": auto(GROUPED | FP8, te=True),
        "gpt-oss": auto(GPT_OSS),
        "te, gpt-oss": auto(GPT_OSS | GROUPED, te=True),
        "biases, gelu, all-gather": auto(BIASED | UNGATED | ALL_GATHER),
    }


_behind = functools.partial(
    Case, te=True, fluid={"moe_backend": "experts"}, exchange="megatron", experts="alone"
)
_alone = functools.partial(Case, te=True, experts="alone")
_local = functools.partial(Case, te=True, fluid={"moe_backend": "local"})
_over_nvlink = functools.partial(Case, te=True, exchange="nvlink")
_in_rounds = functools.partial(Case, te=True, fluid={"moe_backend": "rounds"}, exchange="rounds")
# By the ranks that run them: see _ranks.
CASES: dict[str, dict[str, Case]] = {
    "one rank": {
        **_auto("local"),
        "behind all-to-all": _behind(PERMUTED),
        "behind all-gather": _behind(PERMUTED | ALL_GATHER),
        "behind all-gather, ungated": _behind(PERMUTED | ALL_GATHER | UNGATED),
        "behind all-gather, biases": _behind(PERMUTED | ALL_GATHER | BIASED),
        "behind all-gather, fp8": _behind(PERMUTED | ALL_GATHER | FP8),
        "probabilities on the input": _alone(PERMUTED | ON_INPUT),
        "latent": _alone(PERMUTED | {"moe_latent_size": 128}),
    },
    "one rank, single parameters": {
        "weights": _local(GROUPED, ours=WEIGHT),
        "biases": _local(GROUPED | BIASED, ours=WEIGHT | BIAS),
        "biases alone": _local(GROUPED | BIASED, ours=BIAS),
        "behind all-to-all": _behind(PERMUTED, ours=WEIGHT),
    },
    "shared GPUs": {
        **_auto("nvlink"),
        "fp16": Case(dtype=torch.float16, fluid=NVLINK, exchange="nvlink"),
        "fp32": Case(dtype=torch.float32, fluid=NVLINK, exchange="nvlink"),
        "te": _over_nvlink(GROUPED, fluid=NVLINK),
    },
    # Trained, too: reductions of gradients need NCCL.
    "symmetric memory": {
        "deferred": Case(fluid=NVLINK | DEFERRED, exchange="nvlink"),
        "te, main_grad, deferred, shared beside": _over_nvlink(
            FUSED | SHARED_BESIDE, fluid=NVLINK | DEFERRED
        ),
    },
    "rounds": {
        "local modules": Case(fluid={"moe_backend": "rounds"}, exchange="rounds"),
        "local modules, deferred, chunks": Case(
            fluid={"moe_backend": "rounds", "dx_chunks": 2} | DEFERRED, exchange="rounds"
        ),
        "te": _in_rounds(GROUPED),
        "te sequential": _in_rounds(),
        "te, main_grad": _in_rounds(FUSED),
        "te, main_grad, deferred, shared beside": _in_rounds(
            FUSED | SHARED_BESIDE, fluid={"moe_backend": "rounds"} | DEFERRED
        ),
    },
}
NAMES = [(ranks, name) for ranks, cases in CASES.items() for name in cases]
# Of these a small model is trained, too.
TRAINED = {
    "one rank, single parameters": ("weights",),
    "symmetric memory": ("deferred", "te, main_grad, deferred, shared beside"),
    "rounds": ("te, main_grad, deferred, shared beside", "local modules, deferred, chunks"),
}


def _ranks(which: str) -> int:
    if which.startswith("one rank"):
        return 1
    if which == "shared GPUs":
        return 4
    if SHARED or RANKS < 2:
        pytest.skip("needs NCCL, which refuses ranks that share a GPU")
    return min(RANKS, 4)


def _implementation(case: Case) -> dict[str, Any]:
    kind = {"transformer_impl": "transformer_engine" if case.te else "local"}
    precision = {"bf16": case.dtype == torch.bfloat16, "fp16": case.dtype == torch.float16}
    return kind | precision | {"params_dtype": case.dtype}


def _layer(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    from megatron.core.fp8_utils import get_fp8_context

    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    given = LAYER | case.model
    config = tiny_gpt.config_of(**given, **_implementation(case))
    oracle = {name: value for name, value in given.items() if not name.startswith(HOW)}
    generator = torch.Generator().manual_seed(5 + rank)
    # Megatron's all-gather wants as many tokens of every rank.
    tokens = 400 + (0 if "allgather" in given.values() else 37 * rank)
    hidden = torch.randn(tokens, 2, 256, generator=generator).to(tiny_gpt.device(), case.dtype)
    fp8 = functools.partial(get_fp8_context, config) if config.fp8 else contextlib.nullcontext
    with tiny_gpt.plug_in(False):
        stock = tiny_gpt.moe_layer(config)
        draw_biases(stock, 1000 * (rank + 1))
        theirs = two_passes(stock, hidden, fp8)
    # With biases, Megatron's SequentialMLP fails on one rank.
    biased = "add_bias_linear" in given and ranks == 1
    with tiny_gpt.plug_in(biased, moe_backend="local"):
        right = tiny_gpt.moe_layer(tiny_gpt.config_of(**oracle))
        expected = fp32_passes(right, stock, hidden)
    whose = {"moe_fp8": "megatron" if case.experts == "megatron's" else "ours"}
    fluid = {"moe_backend": "auto", "timeout_s": 60.0} | (whose if config.fp8 else {}) | case.fluid
    with tiny_gpt.plug_in(True, **fluid) as calls:
        layer = tiny_gpt.moe_layer(
            tiny_gpt.config_of(**given, **_implementation(case), **case.ours)
        )
        layer.load_state_dict(stock.state_dict())  # Transformer Engine stacks what it finds apart
        if case.experts == "megatron's":
            layer.experts.register_forward_hook(lambda *_: None)
        ours = two_passes(layer, hidden, fp8)
        again = two_passes(layer, hidden, fp8)
    assert bool(calls) is (case.experts == "fused"), "fused calls"
    kinds = {type(parameter).__name__ for parameter in layer.experts.parameters()}
    assert not case.ours or "GroupedTensor" in kinds
    return {
        "errors": errors_of(expected, theirs, ours),
        "exchange": moe_layer.backend_of(layer),
        "experts": moe_layer.experts_reason_of(layer),
        "differs": [name for name, value in ours.items() if not torch.equal(again[name], value)],
    }


def _train(ranks: int, case: Case) -> dict[str, list[float]]:
    from tests.support import tiny_gpt

    losses = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on, **({"timeout_s": 60.0} | case.fluid if on else {})) as calls:
            sizes = {"hidden_size": 128, "num_moe_experts": 8, "moe_ffn_hidden_size": 128}
            ours = case.ours if on else {}
            config = tiny_gpt.config_of(**sizes, **case.model, **_implementation(case), **ours)
            run = tiny_gpt.train(
                tiny_gpt.gpt(config),
                microbatches=2,
                distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                learning_rate=1e-3,
            )
            losses["ours" if on else "stock"] = run.losses
            assert bool(calls) is on
            named = run.model.named_parameters()
            experts = [p for name, p in named if ".experts." in name and ".linear_fc" in name]
            # In main_grad each gradient is added once: no copy of it stands in .grad.
            assert experts and all(p.grad is None for p in experts)
    return losses


def _world(rank: int, ranks: int, which: str) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    if "single" in which:
        os.environ |= ENVIRONMENT
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import is_te_min_version

    from tests.support import tiny_gpt

    def can(case: Case) -> bool:
        # Megatron's SequentialMLP adds biases in place to a view on one rank, which autograd
        # refuses.
        refused = ranks == 1 and "add_bias_linear" in case.model and not case.te
        new = not case.ours or (HAVE_TE and is_te_min_version("2.14.0"))
        return new and not refused and bool(HAVE_TE or not case.te)

    cases = {name: case for name, case in CASES[which].items() if can(case)}
    tiny_gpt.parallel(expert_model_parallel_size=ranks)
    found: dict[str, Any] = {
        name: tiny_gpt.guarded(lambda case=case: _layer(rank, ranks, case))
        for name, case in cases.items()
    }
    # On four ranks two replicas of each expert: gradients are reduced.
    tiny_gpt.parallel(expert_model_parallel_size=min(ranks, max(2, ranks // 2)))
    for name in TRAINED.get(which, ()):
        if name in cases:
            case = cases[name]
            found[f"{name}: training"] = tiny_gpt.guarded(lambda case=case: _train(ranks, case))
    if GPUS:
        torch.cuda.synchronize()
    return found


@functools.cache
def _results(which: str, ranks: int) -> list[dict[str, Any]]:
    return run_ranks(_world, ranks, which, timeout_s=500, backend="nccl" if GPUS else "gloo")


def _found(which: str, name: str) -> list[dict[str, Any]]:
    results = _results(which, _ranks(which))
    if name not in results[0]:
        pytest.skip("Transformer Engine is not installed or too old, or the reference fails")
    for result in results:
        assert "error" not in result[name], result[name]["error"]
    return [result[name] for result in results]


@pytest.mark.parametrize(("which", "name"), NAMES)
def test_no_further_from_fp32_than_megatron(which: str, name: str) -> None:
    case = CASES[which][name]
    for rank, found in enumerate(_found(which, name)):
        assert found["exchange"][0] == case.exchange, found["exchange"]
        assert (found["experts"] is None) is (case.experts != "megatron's"), found["experts"]
        assert len(found["errors"]) > 4
        limits = {torch.float16: 3e-3, torch.float32: 1e-5}
        if case.dtype in limits:
            assert all(e.ours < limits[case.dtype] for e in found["errors"].values())
            continue
        assert not found["differs"], found["differs"]
        most = CLAMPED_ERROR if "activation_func_clamp_value" in case.model else 0.02
        worse = worse_of(found["errors"], "fp8" in case.model, most)
        assert not worse, f"rank {rank}: (Megatron's, ours) {worse}"


@pytest.mark.parametrize(
    ("which", "name"), [(which, name) for which, names in TRAINED.items() for name in names]
)
def test_losses_follow_megatrons(which: str, name: str) -> None:
    for run in _found(which, f"{name}: training"):
        assert run["stock"][-1] < 0.9 * run["stock"][0]
        assert run["ours"] == pytest.approx(run["stock"], rel=1e-2)
