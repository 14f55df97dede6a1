"""Megatron's `--moe-single-grouped-weight` and `--moe-single-grouped-bias`: experts of ours that
read one parameter of all experts, against Megatron's own with a parameter each.

One world of two ranks runs every case; the tests judge them one by one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.exchanged_layers import guarded
from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations

FUSED = {"moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True}
WEIGHT = FUSED | {"moe_single_grouped_weight": True, "num_moe_experts": 6}
BIASES = {"add_bias_linear": True}
BIAS = BIASES | {"moe_single_grouped_bias": True}
GPT_OSS = {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
}
MOE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ACTIVATION_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
# Settings of Megatron that only ask for single parameters, for the fused operation, or for what
# Megatron's own path on a CPU has not.
ONLY_OURS = (
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "use_transformer_engine_op_fuser",
    "recompute_granularity",
    "recompute_modules",
    "moe_enable_routing_replay",
)

# name: (TransformerConfig overrides, FluidConfig fields, whose exchange)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fused": (WEIGHT, {}, "rounds"),
    "fused, gpt-oss": (WEIGHT | BIAS | GPT_OSS, {}, "rounds"),
    "weights alone": (WEIGHT | BIASES, {}, "rounds"),
    "biases alone": (BIAS | {"moe_grouped_gemm": True}, {}, "rounds"),
    "layer recomputed": (WEIGHT | MOE_RECOMPUTED, {}, "rounds"),
    "activation recomputed": (WEIGHT | ACTIVATION_RECOMPUTED, {}, "rounds"),
    "fc1 recomputed": (WEIGHT, {"moe_recompute": "hidden"}, "rounds"),
    "deferred": (WEIGHT | BIAS, {"defer_weight_grads": True}, "rounds"),
    "phase by phase": (
        WEIGHT | BIAS | MOE_RECOMPUTED | {"moe_enable_routing_replay": True},
        {},
        "rounds",
    ),
    "behind all-to-all": (WEIGHT | BIAS, {"moe_backend": "experts"}, "megatron"),
    "behind all-gather, delayed": (
        WEIGHT | {"moe_token_dispatcher_type": "allgather"},
        {"moe_backend": "experts", "defer_weight_grads": True},
        "megatron",
    ),
}


@contextlib.contextmanager
def _plug_in(on: bool, **fields: Any) -> Iterator[None]:
    from tests.support import tiny_gpt
    from tests.support.grouped_tensor import megatron_with_grouped_tensors

    linears = "megatron_fluid.patches.moe.expert_modules._te_linear_types"
    with (
        megatron_with_grouped_tensors(),
        mock.patch(linears, return_value=(tiny_gpt.GroupedLinear,)),
        tiny_gpt.plug_in(on, **fields),
    ):
        yield


def _by_expert(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A gradient under the names that parameters of their own have."""
    if "experts" not in name or name[-1].isdigit():
        return {name: value}
    return {f"{name}{i}": member for i, member in enumerate(value.unbind(0))}


def _layer_both(rank: int, overrides: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """One MoELayer in fp64, two accumulated passes and one without gradients: for output, input
    gradient and every weight gradient its size and the difference."""
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt
    from tests.support.grouped_tensor import GroupedTensor

    wide = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", **overrides}
    separate = {name: value for name, value in wide.items() if name not in ONLY_OURS}
    found: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for way, settings in (("stock", separate), ("ours", wide)):
        with _plug_in(way == "ours", **(fields if way == "ours" else {})):
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings), grouped=True)
            for name, parameter in layer.named_parameters():
                if "experts" in name and "bias" in name:  # Megatron starts them at zero
                    kind = name.split(".bias")[0]
                    values = torch.linspace(-1, 1, parameter.shape[-1], dtype=torch.float64)
                    numbers = [int(name[-1])] if name[-1].isdigit() else range(len(parameter))
                    stacked = torch.stack([values * (1 + n) for n in numbers])
                    with torch.no_grad():
                        parameter.copy_(stacked.view(parameter.shape) * len(kind))
            generator = torch.Generator().manual_seed(77 + rank)
            even = overrides.get("moe_token_dispatcher_type") == "allgather"  # it asks for that
            shape = 9 - 3 * (rank and not even), 2, layer.config.hidden_size
            hidden = torch.randn(*shape, dtype=torch.float64, generator=generator)
            hidden.requires_grad_()
            copies = GroupedTensor.copies
            for _ in range(2):
                output, bias = layer(hidden)
                (output.square().sum() + output.sum()).backward()
            with torch.no_grad():
                last = layer(hidden)[0]
            result[f"{way} copies"] = GroupedTensor.copies - copies
            assert bias is None
            values = {"output": output.detach(), "input": hidden.grad, "last": last}
            for name, parameter in layer.named_parameters():
                assert type(parameter.grad) is torch.Tensor, name
                values |= _by_expert(name, parameter.grad)
            found[way] = values
            result["parameters"] = sum(1 for _ in layer.experts.parameters())
            result["exchange"] = moe_layer.backend_of(layer)
            result["experts"] = moe_layer.experts_reason_of(layer)
            result["served"] = moe_layer.path_of(layer) is not None
    stock, ours = found["stock"], found["ours"]
    assert stock.keys() == ours.keys()
    result["differences"] = {
        name: (float(value.abs().max()), float((value - ours[name]).abs().max()))
        for name, value in stock.items()
    }
    return result


TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"microbatches": 2},
    "distributed optimizer": {
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "microbatches": 3,
    },
}
ITERATIONS = 5


def _train(rank: int, training: dict[str, Any], experts: int) -> dict[str, Any]:
    """Losses, gradient norms and trained expert weights of Megatron's with a parameter each, of
    Megatron's with one of all, and of ours."""
    from tests.support import tiny_gpt

    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    sizes = {"num_moe_experts": experts, "moe_grouped_gemm": True, **bf16}
    packed = sizes | WEIGHT | {"num_moe_experts": experts}
    ways = {"separate": (False, sizes), "stock": (False, packed), "ours": (True, packed)}
    found = {}
    for way, (on, overrides) in ways.items():
        with _plug_in(on, **({"moe_backend": "auto"} if on else {})):
            config = tiny_gpt.config_of(**overrides)
            model = tiny_gpt.gpt(config, tiny_gpt.grouped_spec(config))
            run = tiny_gpt.train(model, iterations=ITERATIONS, **training)
            weights = {}
            for name, value in model.state_dict().items():
                if "experts" in name and "weight" in name:
                    plain = getattr(value, "rowwise_data", value).float().view(value.shape)
                    weights |= _by_expert(name, plain.clone())
            found[way] = run.losses, run.gradient_norms, weights
    return found


def _world(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=2)
    found: dict[str, Any] = {
        name: guarded(lambda o=overrides, f=fields: _layer_both(rank, o, f))
        for name, (overrides, fields, _) in CASES.items()
    }
    for name, training in TRAININGS.items():
        found[f"train {name}"] = guarded(lambda t=training: _train(rank, t, 4))
    os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{rank}"
    tiny_gpt.parallel(expert_model_parallel_size=2)
    two_levels = {"moe_backend": "hierarchical"}
    found["hierarchical"] = guarded(lambda: _layer_both(rank, WEIGHT | BIAS, two_levels))
    # One expert-parallel rank, two data-parallel ones that share every expert.
    tiny_gpt.parallel(expert_model_parallel_size=1)
    found["local"] = guarded(lambda: _layer_both(rank, WEIGHT | BIAS, {"moe_backend": "local"}))
    distributed = TRAININGS["distributed optimizer"]
    found["train local"] = guarded(lambda: _train(rank, distributed, 4))
    return found


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


@pytest.mark.parametrize("name", [*CASES, "hierarchical", "local"])
def test_output_and_every_gradient_in_double_precision(
    world: list[dict[str, Any]], name: str
) -> None:
    for result in world:
        found = result[name]
        assert "error" not in found, found["error"]
        worst = max(off / max(size, 1.0) for size, off in found["differences"].values())
        # Choices have their probabilities in fp32.
        assert worst < (1e-11 if name in CASES else 1e-6), found["differences"]
        exchange = CASES[name][2] if name in CASES else name
        assert found["exchange"][0] == exchange and found["served"], found["exchange"]
        assert found["experts"] is None
        assert found["ours copies"] == 0, "a packed parameter was copied"


@pytest.mark.parametrize("name", [*TRAININGS, "local"])
def test_training_is_megatrons(world: list[dict[str, Any]], name: str) -> None:
    for result in world:
        found = result[f"train {name}"]
        assert "error" not in found, found["error"]
        losses, norms, weights = found["separate"]
        assert losses[-1] < losses[0]
        for way in ("stock", "ours"):
            assert found[way][0] == pytest.approx(losses, rel=1e-3), way
            assert found[way][1] == pytest.approx(norms, rel=2e-2), way
            assert found[way][2].keys() == weights.keys()
            for key, value in weights.items():
                torch.testing.assert_close(found[way][2][key], value, rtol=2e-2, atol=2e-2)
