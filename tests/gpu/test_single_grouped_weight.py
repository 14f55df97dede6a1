"""Experts of ours that read Transformer Engine's single grouped parameters
(`--moe-single-grouped-weight`, `--moe-single-grouped-bias`) on one GPU: against Transformer
Engine's experts with a parameter each, and against the layer in fp32; and trained under Megatron's
distributed optimizer."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fp32_oracle import draw_biases, errors_of, fp32_passes, two_passes, worse_of
from tests.support.launch import run_ranks
from tests.support.machine import GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]

LAYER = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 384,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_router_dtype": "fp64",
}
TE = {
    "transformer_impl": "transformer_engine",
    "moe_grouped_gemm": True,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
WEIGHT = {"moe_single_grouped_weight": True, "use_transformer_engine_op_fuser": True}
BIASED = {"add_bias_linear": True}
# name: (TransformerConfig overrides of all, those that make single parameters, backend)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fused": ({}, WEIGHT, "local"),
    "biases": (BIASED, WEIGHT | {"moe_single_grouped_bias": True}, "local"),
    "biases alone": (BIASED, {"moe_single_grouped_bias": True}, "local"),
    # Without moe_permute_fusion Megatron's unpermute gives other bits in each pass.
    "behind all-to-all": ({}, WEIGHT | {"moe_permute_fusion": True}, "experts"),
}
# Transformer Engine asks for both; without the first it makes a parameter for each expert.
ENVIRONMENT = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}


def _by_expert(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients under the names that parameters of their own have."""
    named: dict[str, Tensor] = {}
    for name, value in found.items():
        if re.fullmatch(r"experts\.linear_fc\d\.(weight|bias)", name):
            named |= {f"{name}{i}": member for i, member in enumerate(value.unbind(0))}
        else:
            named[name] = value
    return named


def _case(overrides: dict[str, Any], single: dict[str, Any], backend: str) -> dict[str, Any]:
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    given, plain = LAYER | overrides, contextlib.nullcontext
    generator = torch.Generator("cuda").manual_seed(5)
    hidden = torch.randn(400, 2, 256, device="cuda", generator=generator).bfloat16()
    with tiny_gpt.plug_in(False):
        stock = tiny_gpt.moe_layer(tiny_gpt.config_of(**given, **TE))
        draw_biases(stock, 1000)
        theirs = two_passes(stock, hidden, plain)
    with tiny_gpt.plug_in(bool(overrides), moe_backend="local"):  # SequentialMLP's biases fail here
        right = tiny_gpt.moe_layer(tiny_gpt.config_of(**given))
        expected = fp32_passes(right, stock, hidden)
    with tiny_gpt.plug_in(True, moe_backend=backend, timeout_s=60.0):
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**given, **TE, **single))
        kinds = {type(parameter).__name__ for parameter in layer.experts.parameters()}
        layer.load_state_dict(stock.state_dict())  # Transformer Engine stacks what it finds apart
        ours = _by_expert(two_passes(layer, hidden, plain))
        again = _by_expert(two_passes(layer, hidden, plain))
        path = moe_layer.path_of(layer)
        taken = path is not None, moe_layer.experts_reason_of(layer)
    return {
        "errors": errors_of(expected, theirs, ours),
        "kinds": kinds,
        "taken": taken,
        "repeats": all(torch.equal(again[name], value) for name, value in ours.items()),
    }


def _train(rank: int) -> dict[str, Any]:
    from tests.support import tiny_gpt

    found: dict[str, Any] = {}
    for way, single in (("separate", {}), ("single", WEIGHT)):
        with tiny_gpt.plug_in(True, moe_backend="local", timeout_s=60.0) as calls:
            widths = {"hidden_size": 64, "moe_ffn_hidden_size": 128, "num_moe_experts": 8}
            model = tiny_gpt.gpt(tiny_gpt.config_of(**widths, **TE, **single))
            run = tiny_gpt.train(
                model,
                iterations=8,
                microbatches=2,
                distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
            )
            count = sum("experts" in name for name, _ in model.named_parameters())
            found[way] = run.losses, run.gradient_norms, count, len(calls)
    return found


def _world(rank: int, world_size: int, name: str) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    os.environ |= ENVIRONMENT
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import is_te_min_version

    from tests.support import tiny_gpt

    if not HAVE_TE or not is_te_min_version("2.14.0"):
        return {}
    tiny_gpt.parallel(expert_model_parallel_size=1)
    found = _train(rank) if name == "train" else _case(*CASES[name])
    torch.cuda.synchronize()
    return found


def _run(name: str) -> dict[str, Any]:
    pytest.importorskip("megatron.core")
    (found,) = run_ranks(_world, 1, name, timeout_s=200, backend="nccl")
    if not found:
        pytest.skip("Transformer Engine 2.14 or later is not installed")
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_further_from_fp32_than_transformer_engine(name: str) -> None:
    case = _run(name)
    assert "GroupedTensor" in case["kinds"]
    assert case["taken"] == (True, None)
    assert case["repeats"]
    worse = worse_of(case["errors"], False)
    assert not worse, f"(Transformer Engine's, ours) {worse}"


def test_losses_are_those_of_a_parameter_for_each_expert() -> None:
    found = _run("train")
    losses, norms, separate, calls = found["separate"]
    assert found["single"][0] == pytest.approx(losses, rel=1e-3)
    assert found["single"][1] == pytest.approx(norms, rel=2e-2)
    assert (separate, found["single"][2]) == (2 * 2 * 8, 2 * 2)
    assert found["single"][3] == calls > 0
