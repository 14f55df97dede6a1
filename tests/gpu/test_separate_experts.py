"""This package's experts behind Megatron's token dispatchers on one GPU, beside Transformer
Engine's behind the same: outputs, input gradients and every weight gradient, against the layer in
fp32. And the experts alone, with weights that lie in descending order."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fp32_oracle import (
    BIASED,
    draw_biases,
    errors_of,
    fp32_passes,
    two_passes,
    worse_of,
)
from tests.support.launch import run_ranks
from tests.support.machine import GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]

LAYER = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 384,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
}
# What the layer in fp32 leaves out.
FUSED = ("moe_grouped_gemm", "moe_permute_fusion", "fp8", "fp8_recipe")
ON_INPUT = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
# name: (TransformerConfig overrides, backend, whose exchange)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "all-to-all": ({}, "experts", "megatron"),
    "all-gather": ({"moe_token_dispatcher_type": "allgather"}, "experts", "megatron"),
    "all-gather, ungated": (
        {
            "moe_token_dispatcher_type": "allgather",
            "activation_func": torch.nn.functional.gelu,
            "gated_linear_unit": False,
        },
        "experts",
        "megatron",
    ),
    "all-gather, biases": (
        {"moe_token_dispatcher_type": "allgather", **BIASED},
        "experts",
        "megatron",
    ),
    "probabilities on the input": (ON_INPUT, "auto", "local"),
    "latent": ({"moe_latent_size": 128}, "auto", "local"),
    "all-gather, fp8": (
        {"moe_token_dispatcher_type": "allgather", "fp8": "e4m3", "fp8_recipe": "blockwise"},
        "experts",
        "megatron",
    ),
}


def _case(overrides: dict[str, Any], backend: str) -> dict[str, Any]:
    import contextlib

    from megatron.core.fp8_utils import get_fp8_context

    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    plain = contextlib.nullcontext
    given = LAYER | overrides
    config = tiny_gpt.config_of(
        **given, transformer_impl="transformer_engine", params_dtype=torch.bfloat16, bf16=True
    )
    fp8 = functools.partial(get_fp8_context, config) if config.fp8 else plain
    biased = "add_bias_linear" in overrides
    wide = {name: value for name, value in given.items() if name not in FUSED}
    oracle_config = tiny_gpt.config_of(**wide | {"moe_token_dispatcher_type": "alltoall"})
    generator = torch.Generator("cuda").manual_seed(5)
    hidden = torch.randn(400, 2, 256, device="cuda", generator=generator).bfloat16()
    with tiny_gpt.plug_in(False):
        stock = tiny_gpt.moe_layer(config)
        draw_biases(stock, 1000)
        theirs = two_passes(stock, hidden, fp8)
    with tiny_gpt.plug_in(biased, moe_backend="local"):  # with biases SequentialMLP fails here
        right = tiny_gpt.moe_layer(oracle_config)
        expected = fp32_passes(right, stock, hidden)
    with tiny_gpt.plug_in(True, moe_backend=backend, moe_fp8="ours", timeout_s=60.0):
        layer = tiny_gpt.moe_layer(config)
        layer.load_state_dict(stock.state_dict())
        ours, again = two_passes(layer, hidden, fp8), two_passes(layer, hidden, fp8)
        decision = moe_layer.DECISIONS.get(layer)
        assert decision is not None
        path = moe_layer.DECISIONS.separate_experts(layer, decision.path)
        taken = moe_layer.backend_of(layer)[0], path is not None
    errors = errors_of(expected, theirs, ours)
    repeats = all(torch.equal(again[name], value) for name, value in ours.items())
    return {"errors": errors, "taken": taken, "repeats": repeats}


def _world(rank: int, world_size: int, name: str) -> dict[str, Any]:
    import logging

    logging.getLogger("megatron").setLevel(logging.WARNING)
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from tests.support import tiny_gpt

    if not HAVE_TE:
        return {}
    tiny_gpt.parallel(expert_model_parallel_size=1)
    found = _case(*CASES[name][:2])
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_further_from_fp32_than_transformer_engine(name: str) -> None:
    pytest.importorskip("megatron.core")
    (case,) = run_ranks(_world, 1, name, timeout_s=200, backend="nccl")  # a crash is one case's
    if not case:
        pytest.skip("Transformer Engine is not installed")
    assert case["taken"] == (CASES[name][2], True)
    assert case["repeats"]
    worse = worse_of(case["errors"], "fp8" in CASES[name][0])
    assert not worse, f"(Transformer Engine's, ours) {worse}"


def _experts(descending: bool, dtype: torch.dtype, counts: list[int]) -> list[Tensor]:
    """Output and every gradient of experts whose matrices lie in ascending or descending order."""
    from tests.support.expert_calls import expert_rows

    g = torch.Generator("cuda").manual_seed(3)
    experts, hidden, ffn = len(counts), 256, 128
    step = -1 if descending else 1

    def matrices(*shape: int) -> list[Tensor]:
        values = torch.randn(experts, *shape, generator=g, device="cuda") * shape[1] ** -0.5
        stack = values.flip(0) if descending else values
        return [m.requires_grad_() for m in list(stack.to(dtype).unbind(0))[::step]]

    rows = torch.randn(sum(counts), hidden, generator=g, device="cuda").to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=g, device="cuda").requires_grad_()
    w1, w2 = matrices(2 * ffn, hidden), matrices(hidden, ffn)
    leaves = [rows, probs, *w1, *w2]
    y = expert_rows(rows, probs, counts, w1, w2)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_in_descending_order_make_the_same_bits(dtype: torch.dtype) -> None:
    counts = [70, 0, 1, 300, 64, 33, 0, 257]
    ascending = _experts(False, dtype, counts)
    for mine, right in zip(_experts(True, dtype, counts), ascending, strict=True):
        assert torch.equal(mine, right)
