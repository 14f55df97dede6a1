"""Megatron's MoE layer on GPUs, with the plug-in and without: local modules and Transformer Engine,
bf16, fused gradients.

Against an oracle in fp32 (Megatron's own layer with the same weights) the overlapped layer may not
be further off than Megatron's own; trained models follow each other's losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS, SHARED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none"),
    pytest.mark.skipif(
        SHARED, reason="peer rounds need NCCL, which refuses ranks that share a GPU"
    ),
]
WORLD = max(min(RANKS, 4), 1)
LAYER = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 384,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_router_dtype": "fp32",
}
GROUPED = {"moe_grouped_gemm": True}
FUSED = GROUPED | {"gradient_accumulation_fusion": True}
SHARED_BESIDE = {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True}
NVLINK, DEFERRED = {"moe_backend": "nvlink"}, {"defer_weight_grads": True}
TE = "transformer_engine"
# name: (implementation, TransformerConfig overrides, FluidConfig fields)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "local": ("local", {}, {}),
    "local, deferred, chunks": ("local", {}, DEFERRED | {"dx_chunks": 2}),
    "te grouped": (TE, GROUPED, {}),
    "te grouped, main_grad": (TE, FUSED, {}),
    "te grouped, main_grad, deferred, shared beside": (TE, FUSED | SHARED_BESIDE, DEFERRED),
    "local, nvlink": ("local", {}, NVLINK),
    "local, nvlink, deferred": ("local", {}, NVLINK | DEFERRED),
    "te grouped, nvlink": (TE, GROUPED, NVLINK),
    "te grouped, nvlink, main_grad": (TE, FUSED, NVLINK),
    "te grouped, nvlink, main_grad, deferred, shared beside": (
        TE,
        FUSED | SHARED_BESIDE,
        NVLINK | DEFERRED,
    ),
    "te grouped, nvlink, main_grad, bounded": (TE, FUSED, NVLINK | {"moe_capacity_factor": 4.0}),
    "te sequential": (TE, {"moe_grouped_gemm": False}, {}),
}


def _has_te() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


@contextlib.contextmanager
def _plug_in(on: bool, **fluid: Any) -> Iterator[list[int]]:
    """tiny_gpt.plug_in, whose waits on a GPU end after 60 s."""
    from tests.support import tiny_gpt

    with tiny_gpt.plug_in(on, **{"timeout_s": 60.0, **fluid}) as calls:
        yield calls


def _run_layer(layer: torch.nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two accumulated passes: output, input gradient, and weight gradients (from main_grad where it
    is fused)."""
    x = hidden.detach().clone().requires_grad_()
    fused = layer.config.gradient_accumulation_fusion  # type: ignore[union-attr]
    for parameter in layer.parameters():
        parameter.grad = None
        if fused:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for _ in range(2):
        output, _ = layer(x)
        (
            output.float() * torch.linspace(-1, 1, output.shape[-1], device=output.device)
        ).square().sum().mul(1e-2).backward()
    found = {"output": output.detach(), "input": x.grad}
    for name, parameter in layer.named_parameters():
        added = getattr(parameter, "grad_added_to_main_grad", False)
        found[name] = parameter.main_grad if added else parameter.grad  # type: ignore[attr-defined,assignment]
    return {name: value.float() for name, value in found.items() if value is not None}


def _copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> dict[str, str]:
    """Into a layer with SequentialMLP; returns target's name of each of source's parameters."""
    names = {}
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            theirs = name
            if (
                name not in values
            ):  # experts.local_experts.3.linear_fc1.weight -> experts.linear_fc1.weight3
                *_, index, linear, weight = name.split(".")
                theirs = f"experts.{linear}.{weight}{index}"
            parameter.copy_(values[theirs])
            names[theirs] = name
    return names


def _layer_case(
    rank: int, implementation: str, overrides: dict[str, Any], fluid: dict[str, Any]
) -> dict[str, Any]:
    from tests.support import tiny_gpt

    shared = {k: v for k, v in overrides.items() if k == "moe_shared_expert_intermediate_size"}
    config = tiny_gpt.config_of(
        **LAYER,
        transformer_impl=implementation,
        params_dtype=torch.bfloat16,
        bf16=True,
        **overrides,
    )
    generator = torch.Generator("cuda").manual_seed(5 + rank)
    hidden = torch.randn(400 + 37 * rank, 2, 256, device="cuda", generator=generator).bfloat16()
    with _plug_in(False):
        stock = tiny_gpt.moe_layer(config)
        theirs = _run_layer(stock, hidden)
        oracle_layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**LAYER, **shared))
        names = _copy_weights(stock, oracle_layer)
        oracle = _run_layer(oracle_layer, hidden.float())
    with _plug_in(True, **fluid) as calls:
        layer = tiny_gpt.moe_layer(config)
        layer.load_state_dict(stock.state_dict())
        ours = _run_layer(layer, hidden)
        again = _run_layer(layer, hidden)
        assert len(calls) == 4 and all(
            torch.equal(again[name], value) for name, value in ours.items()
        ), "not repeatable"
    errors = {}
    for name, value in theirs.items():
        right = oracle[names.get(name, name)]
        size = right.norm() + 1e-30
        errors[name] = (
            float((value - right).norm() / size),
            float((ours[name] - right).norm() / size),
        )
    assert set(ours) == set(theirs)
    return errors


def _train_case(
    implementation: str, overrides: dict[str, Any], fluid: dict[str, Any]
) -> dict[str, Any]:
    from tests.support import tiny_gpt

    losses = []
    for on in (False, True):
        with _plug_in(on, **(fluid if on else {})) as calls:
            config = tiny_gpt.config_of(
                hidden_size=128,
                num_attention_heads=4,
                num_moe_experts=8,
                moe_ffn_hidden_size=128,
                transformer_impl=implementation,
                params_dtype=torch.bfloat16,
                bf16=True,
                **overrides,
            )
            run = tiny_gpt.train(
                tiny_gpt.gpt(config),
                microbatches=2,
                distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                learning_rate=1e-3,
            )
            losses.append(run.losses)
            assert bool(calls) is on
            experts = [
                p
                for name, p in run.model.named_parameters()
                if ".experts." in name and ".linear_fc" in name
            ]
            # In main_grad each gradient is added once: no copy of it stands in .grad.
            assert experts and all(p.grad is None for p in experts)
    return {"stock": losses[0], "fluid": losses[1]}


def _body(rank: int, world_size: int) -> dict[str, Any]:
    import logging

    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    found: dict[str, Any] = {}
    cases = {name: case for name, case in CASES.items() if case[0] == "local" or _has_te()}
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    for name, case in cases.items():
        found[name] = _layer_case(rank, *case)
    # On four GPUs two replicas of each expert: gradients are reduced.
    tiny_gpt.parallel(expert_model_parallel_size=max(2, world_size // 2))
    for name, case in cases.items():
        found[f"{name}: training"] = _train_case(*case)
    return found


def _worse(errors: dict[str, Any]) -> dict[str, Any]:
    """What is further from the oracle than Megatron's: (Megatron's relative error, ours)."""
    return {what: both for what, both in errors.items() if both[1] > 1.1 * both[0] + 1e-5}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    pytest.importorskip("megatron.core")
    if WORLD < 2:
        pytest.skip(f"{WORLD} ranks on GPUs")
    return run_ranks(_body, WORLD, timeout_s=500, backend="nccl")


@pytest.mark.parametrize("name", CASES)
def test_no_further_from_fp32_than_megatron(results: list[dict[str, Any]], name: str) -> None:
    for rank, result in enumerate(results):
        if name not in result:
            pytest.skip("Transformer Engine is not installed")
        assert len(result[name]) > 5
        assert all(ours < 0.02 for _, ours in result[name].values()), f"rank {rank}: {result[name]}"
        assert not _worse(result[name]), f"rank {rank}: (Megatron's, ours) {_worse(result[name])}"


@pytest.mark.parametrize("name", CASES)
def test_losses_follow_megatrons(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        if name not in result:
            pytest.skip("Transformer Engine is not installed")
        run = result[f"{name}: training"]
        assert run["stock"][-1] < 0.9 * run["stock"][0]
        assert run["fluid"] == pytest.approx(run["stock"], rel=1e-2)
