"""Megatron's MoE layer on GPUs: our exchange under Megatron's experts, and our experts that
have biases, clamps and offsets: bf16, on one rank, and over symmetric memory on ranks that may
share a GPU.

Against an oracle in fp32 (Megatron's own layer with the same weights) ours may not be further off
than Megatron's in bf16.
"""

from __future__ import annotations

import traceback
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
from tests.support.machine import GPUS

pytest.importorskip("megatron.core")

from megatron.core import activations

WORLDS = (1, 4) if GPUS else ()
pytestmark = pytest.mark.gpu
LAYER = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 384,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_router_dtype": "fp32",
}
GPT_OSS = {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
    **BIASED,
}
# name: (TransformerConfig overrides, with Transformer Engine, whose experts: "ours", "megatron's")
CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "hooked experts": ({}, False, "megatron's"),
    "hooked experts, shared beside": (
        {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
        False,
        "megatron's",
    ),
    "hooked experts, dropping": ({"moe_expert_capacity_factor": 0.75}, False, "megatron's"),
    "te grouped, hooked": ({"moe_grouped_gemm": True}, True, "megatron's"),
    "te grouped, fp8 blockwise": (
        {"moe_grouped_gemm": True, "fp8": "e4m3", "fp8_recipe": "blockwise"},
        True,
        "megatron's",
    ),
    "te grouped, fp8 blockwise, padded by us": (
        {
            "moe_grouped_gemm": True,
            "fp8": "e4m3",
            "fp8_recipe": "blockwise",
            "moe_router_padding_for_quantization": True,
        },
        True,
        "megatron's",
    ),
    "te grouped, fp8 blockwise, ours": (
        {"moe_grouped_gemm": True, "fp8": "e4m3", "fp8_recipe": "blockwise"},
        True,
        "ours",
    ),
    "gpt-oss": (GPT_OSS, False, "ours"),
    "te grouped, gpt-oss": (GPT_OSS | {"moe_grouped_gemm": True}, True, "ours"),
    "biases, gelu, all-gather": (
        {
            "activation_func": torch.nn.functional.gelu,
            "gated_linear_unit": False,
            **BIASED,
            "moe_token_dispatcher_type": "allgather",
        },
        False,
        "ours",
    ),
}


def _case(rank: int, overrides: dict[str, Any], te: bool, whose: str) -> dict[str, Any]:
    import contextlib

    from megatron.core.fp8_utils import get_fp8_context

    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    def plain(name: str) -> bool:  # what the oracle shares
        return not name.startswith(("fp8", "moe_grouped", "moe_router_padding"))

    config = tiny_gpt.config_of(
        **LAYER | overrides,
        transformer_impl="transformer_engine" if te else "local",
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    oracle_config = tiny_gpt.config_of(**LAYER | {k: v for k, v in overrides.items() if plain(k)})
    generator = torch.Generator("cuda").manual_seed(5 + rank)
    hidden = torch.randn(400 + 37 * rank, 2, 256, device="cuda", generator=generator).bfloat16()
    if "allgather" in overrides.values():  # which wants as many tokens of every rank
        hidden = hidden[:400]

    def fp8() -> Any:
        return get_fp8_context(config) if config.fp8 else contextlib.nullcontext()

    with tiny_gpt.plug_in(False):
        stock = tiny_gpt.moe_layer(config)
        draw_biases(stock, 1000 * rank)
        theirs = two_passes(stock, hidden, fp8)
        right = tiny_gpt.moe_layer(oracle_config)
        expected = fp32_passes(right, stock, hidden)
    settings = {"moe_fp8": "ours" if whose == "ours" else "megatron"} if config.fp8 else {}
    with tiny_gpt.plug_in(True, moe_backend="auto", timeout_s=60.0, **settings):
        layer = tiny_gpt.moe_layer(config)
        layer.load_state_dict(stock.state_dict())
        if whose != "ours":
            layer.experts.register_forward_hook(lambda *_: None)
        ours = two_passes(layer, hidden, fp8)
        again = two_passes(layer, hidden, fp8)
        taken = moe_layer.backend_of(layer), moe_layer.experts_reason_of(layer)
    repeats = all(torch.equal(again[name], value) for name, value in ours.items())
    errors = errors_of(expected, theirs, ours)
    return {"errors": errors, "taken": taken, "repeats": repeats}


def _body(rank: int, world_size: int) -> dict[str, Any]:
    import logging

    logging.getLogger("megatron").setLevel(logging.WARNING)
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found = {}
    for name, case in CASES.items():
        # The reference, Megatron's SequentialMLP, adds biases in place to a view on one rank, which
        # autograd refuses.
        refused = world_size == 1 and case[0].get("add_bias_linear", False)
        if (HAVE_TE or not case[1]) and not refused:
            try:
                found[name] = _case(rank, *case)
            except Exception:  # reported by its own test; the cases after it still run
                found[name] = {"error": traceback.format_exc()}
    return found


@pytest.fixture(scope="module", params=WORLDS)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(_body, request.param, timeout_s=500, backend="nccl")


@pytest.mark.parametrize("name", CASES)
def test_no_further_from_fp32_than_megatron(results: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(results):
        if name not in result:
            pytest.skip("Transformer Engine is not installed, or the reference cannot compute it")
        case = result[name]
        assert "error" not in case, case["error"]
        (backend, reason), experts = case["taken"]
        assert backend == ("local" if len(results) == 1 else "nvlink"), reason
        assert (experts is None) is (CASES[name][2] == "ours"), experts
        assert case["repeats"]
        overrides = CASES[name][0]
        most = CLAMPED_ERROR if "activation_func_clamp_value" in overrides else 0.02
        worse = worse_of(case["errors"], "fp8" in overrides, most)
        assert not worse, f"rank {rank}: (Megatron's, ours) {worse}"
