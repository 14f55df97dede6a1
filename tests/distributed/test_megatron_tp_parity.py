"""Megatron's linear layers under TP2 with sequence parallelism, served by megatron_fluid: the same
losses and gradient norms."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from tests.support import tiny_gpt

LINEARS = ("column-parallel-linear", "row-parallel-linear")

DENSE: dict[str, Any] = {
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "expert_model_parallel_size": 1,
}

# name: (TransformerConfig overrides, training options)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "bias": (
        {**DENSE, "add_bias_linear": True, "gated_linear_unit": False, "activation_func": F.gelu},
        {},
    ),
    "accumulation_distributed_optimizer": (
        DENSE,
        {"microbatches": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
    "moe_with_shared_expert": ({"moe_shared_expert_intermediate_size": 40}, {}),
}


def _train(
    overrides: dict[str, Any], options: dict[str, Any], served: bool
) -> tuple[list[float], list[float], int]:
    from megatron_fluid import patches
    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.patches.linears import overlap as seam

    calls: list[str] = []
    real = seam.all_gather_matmul, seam.matmul_reduce_scatter

    def gather(*args: Any, **kwargs: Any) -> Any:
        calls.append("gather")
        return real[0](*args, **kwargs)

    def scatter(*args: Any, **kwargs: Any) -> Any:
        calls.append("scatter")
        return real[1](*args, **kwargs)

    patches.revert(*LINEARS)
    set_config(FluidConfig(tp_overlap="on" if served else "off"))
    seam.all_gather_matmul, seam.matmul_reduce_scatter = gather, scatter  # type: ignore[assignment]
    try:
        with patches.patched(*LINEARS):
            run = tiny_gpt.train(
                tiny_gpt.gpt(tiny_gpt.config_of(**overrides)), iterations=8, **options
            )
    finally:
        seam.all_gather_matmul, seam.matmul_reduce_scatter = real
        set_config(None)
    return run.losses, run.gradient_norms, len(set(calls))


def _body(rank: int, ranks: int) -> dict[str, tuple[Any, Any]]:
    logging.getLogger("megatron").setLevel(logging.WARNING)

    tiny_gpt.parallel(tensor_model_parallel_size=ranks)
    return {
        name: (_train(overrides, options, True), _train(overrides, options, False))
        for name, (overrides, options) in CASES.items()
    }


def test_losses_and_gradient_norms_equal_megatrons() -> None:
    for found in run_ranks(_body, 2, timeout_s=200):
        for name, ((losses, norms, kinds), (own_losses, own_norms, own_kinds)) in found.items():
            assert kinds == 2, f"{name}: the linears were not served by both operations"
            assert own_kinds == 0, f"{name}: Megatron's own run was served"
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(own_losses), rtol=2e-6, atol=0, msg=name
            )
            torch.testing.assert_close(
                torch.tensor(norms), torch.tensor(own_norms), rtol=1e-5, atol=0, msg=name
            )
            assert losses[-1] < losses[0], (
                f"{name}: nothing was learnt, so a lost gradient could hide"
            )
