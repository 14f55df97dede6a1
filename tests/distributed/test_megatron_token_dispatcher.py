"""Experts of every kind, Megatron's behind our exchange and our own: the same losses and the same
gradient of every parameter as Megatron's own layer.

One world of two ranks (and one of four) runs every case by Megatron, with our exchange alone and,
where they can be ours, with our experts; the tests judge them one by one.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch.nn.functional as F

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu

from tests.support.exchanged_layers import (
    NEVER_FUSED,
    NEVER_OURS,
    WAYS,
    guarded,
    keep_megatrons,
    layer_both,
    plug_in,
)

BIASES = {"add_bias_linear": True}
GPT_OSS = {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "num_moe_experts": 8,
    "moe_router_topk": 4,
}

# name: (TransformerConfig overrides, tokens of the two ranks, what else changes the layer)
LAYERS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "biases": (BIASES, (9, 9), ""),
    "megatron's defaults": (
        {
            "add_bias_linear": True,
            "activation_func": F.gelu,
            "gated_linear_unit": False,
            "moe_token_dispatcher_type": "allgather",
        },
        (6, 6),
        "",
    ),
    "gpt-oss": (GPT_OSS, (3, 12), ""),
    "grouped, interleaved gates": (
        GPT_OSS | {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 6},
        (5, 8),
        "",
    ),
    "fused quick GeGLU": (
        {
            "activation_func": fused_bias_geglu.quick_gelu,
            "activation_func_clamp_value": 1.5,
            "glu_linear_offset": 1.0,
            "bias_activation_fusion": True,
        },
        (5, 8),
        "",
    ),
    "one local expert": (BIASES | {"num_moe_experts": 2}, (4, 5), ""),
    "all tokens to one rank": (
        BIASES | {"num_moe_experts": 6, "moe_router_topk": 3},
        (4, 6),
        "wanted",
    ),
    "dropping": (BIASES | {"moe_expert_capacity_factor": 0.75}, (9, 9), ""),
    "capacity padding": (
        BIASES | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        (9, 9),
        "",
    ),
    "probabilities on the input": (
        BIASES
        | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
        (6, 8),
        "",
    ),
    "shared experts beside": (
        {
            "activation_func_clamp_value": 1.5,
            "moe_shared_expert_intermediate_size": 40,
            "moe_shared_expert_overlap": True,
        },
        (6, 8),
        "",
    ),
    "adapters": ({}, (6, 8), "adapters"),
    "a hook of one rank": ({}, (6, 8), "hook"),
    "an overridden phase": ({}, (6, 8), "phase"),
    "grouped, padded for quantisation": (
        {"moe_grouped_gemm": True, "num_moe_experts": 6},
        (16, 24),  # Megatron pads with each rank's own tokens: full tiles of 16 need as many
        "quantisation",
    ),
    "frozen experts": (BIASES, (6, 6), "frozen"),
}
ITERATIONS = 8
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "biases": (BIASES, {"microbatches": 2}),
    "gpt-oss, overlapped reduction": (GPT_OSS, {"overlap_grad_reduce": True, "microbatches": 2}),
    "recompute": (
        {
            "activation_func_clamp_value": 1.5,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_shared_expert_intermediate_size": 40,
            "moe_z_loss_coeff": 1e-3,
        },
        {},
    ),
    "full recompute, sigmoid, groups": (
        BIASES
        | {
            "num_moe_experts": 8,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}


def _train_both(config: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from tests.support import tiny_gpt

    found: dict[str, Any] = {}
    for way in WAYS:
        with plug_in(way != "stock") as (calls, exchanged):
            model = tiny_gpt.gpt(tiny_gpt.config_of(**config))
            if way == "exchange":
                keep_megatrons(m for m in model.modules() if isinstance(m, MoELayer))
            run = tiny_gpt.train(model, iterations=ITERATIONS, **training)
            found[way] = run.losses, run.gradient_norms, (len(calls), len(exchanged))
    return found


def _world(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}
    if world_size == 2:
        for name, layer in LAYERS.items():
            found[name] = guarded(lambda c=layer: layer_both(rank, *c))
        for name, case in TRAININGS.items():
            found[f"train {name}"] = guarded(lambda c=case: _train_both(*c))
    else:
        case = GPT_OSS, {"distributed_optimizer": True, "microbatches": 2}
        found["train four ranks"] = guarded(lambda: _train_both(*case))
    return found


@pytest.fixture(scope="module")
def ep2() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


@pytest.mark.parametrize("name", LAYERS)
def test_output_and_every_gradient_in_double_precision(
    ep2: list[dict[str, Any]], name: str
) -> None:
    for rank, result in enumerate(ep2):
        case = result[name]
        assert "error" not in case, f"rank {rank}:\n{case['error']}"
        ways = WAYS[1:2] if LAYERS[name][2] in NEVER_OURS else WAYS[1:]
        assert tuple(case["differences"]) == ways
        assert case["counts"]["stock"] == (0, 0) and case["counts"]["exchange"] == (0, 3)
        assert case["counts"].get("ours", (3, 0)) == (3, 0)
        assert case["separate"] is (LAYERS[name][2] in NEVER_FUSED)
        for way, differences in case["differences"].items():
            biased = "add_bias_linear" in LAYERS[name][0]
            assert any("bias" in n and size > 0 for n, (size, _) in differences.items()) is biased
            for what, (size, difference) in differences.items():
                where = f"rank {rank}, {way}, {what}: {difference} of {size}"
                assert difference <= 1e-11 * max(size, 1.0), where


def test_the_reason_is_that_of_a_setting_or_of_the_first_rank_with_one(
    ep2: list[dict[str, Any]],
) -> None:
    for result in ep2:
        reason = result["grouped, padded for quantisation"]["reason"]
        assert reason.startswith("fp8='hybrid': e4m3 is the format")
        assert "Scaled.combine is overridden" in result["an overridden phase"]["reason"]
        hook = result["a hook of one rank"]["reason"]
        assert hook.startswith("rank 1 of the group: a hook is registered on")


def _judge(result: dict[str, Any], layers: int = 2) -> None:
    assert "error" not in result, result["error"]
    losses, norms, counts = result["stock"]
    assert losses[-1] < 0.98 * losses[0] and counts == (0, 0)
    for way, mine in (("exchange", 1), ("ours", 0)):
        found, found_norms, counts = result[way]
        assert found == pytest.approx(losses, rel=1e-6, abs=0), way
        assert found_norms == pytest.approx(norms, rel=1e-4, abs=0), way
        assert counts[mine] >= ITERATIONS * layers and counts[1 - mine] == 0


@pytest.mark.parametrize("name", TRAININGS)
def test_trained_models_have_megatrons_losses(ep2: list[dict[str, Any]], name: str) -> None:
    for result in ep2:
        _judge(result[f"train {name}"])


def test_four_expert_parallel_ranks() -> None:
    for result in run_ranks(_world, 4, timeout_s=300):
        _judge(result["train four ranks"])
