"""Megatron's MoE layer over symmetric memory with parameters in fp16 and fp32, on two ranks that
may share a GPU: outputs and every gradient beside Megatron's own layer."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import pytest
import torch

from tests.support.fp32_oracle import two_passes
from tests.support.launch import run_ranks
from tests.support.machine import GPUS

pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]

LAYER = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 128,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
}
ERRORS = {"float16": 3e-3, "float32": 1e-5}  # relative to the norm of what Megatron has in fp32


def _layers(rank: int, dtype: torch.dtype) -> dict[str, Any]:
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    generator = torch.Generator("cuda").manual_seed(5 + rank)
    hidden = torch.randn(100 + 11 * rank, 2, 256, device="cuda", generator=generator).to(dtype)
    with tiny_gpt.plug_in(False):
        stock = tiny_gpt.moe_layer(tiny_gpt.config_of(**LAYER))
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.copy_(parameter.to(dtype))
        expected = two_passes(stock, hidden.float(), contextlib.nullcontext)
    half = dtype == torch.float16
    with tiny_gpt.plug_in(True, moe_backend="nvlink", timeout_s=60.0):
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**LAYER, params_dtype=dtype, fp16=half))
        layer.load_state_dict(stock.state_dict())
        found = two_passes(layer, hidden, contextlib.nullcontext)
        taken = moe_layer.backend_of(layer), moe_layer.experts_reason_of(layer)
    errors = {
        name: float((found[name] - value).norm() / (value.norm() + 1e-30))
        for name, value in expected.items()
    }
    return {"errors": errors, "taken": taken}


def _world(rank: int, world_size: int) -> dict[str, Any]:
    import logging

    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}
    for name in ERRORS:
        try:
            found[name] = _layers(rank, getattr(torch, name))
        except Exception:  # reported by its own test
            found[name] = {"error": traceback.format_exc()}
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=200, backend="nccl")


@pytest.mark.parametrize("dtype", ERRORS)
def test_output_and_every_gradient_are_megatrons(results: list[dict[str, Any]], dtype: str) -> None:
    for result in results:
        case = result[dtype]
        assert "error" not in case, case["error"]
        assert case["taken"] == (("nvlink", None), None)
        assert len(case["errors"]) == 11  # output, input, router, four experts
        assert max(case["errors"].values()) < ERRORS[dtype], case["errors"]
