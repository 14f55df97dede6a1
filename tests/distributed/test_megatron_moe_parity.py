"""Megatron's MoE layer with the plug-in against Megatron's own: the same losses, gradients and
checkpoints.

One world of two ranks (and one of four) is spawned for the file; it trains every case twice and
hands the numbers back. The tests then judge them one by one, so that a failure names its case.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_fluid.config import FluidConfig, set_config
from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

ITERATIONS = 8  # of every case that does not say otherwise
TWENTY = {"iterations": 20}
# name: (TransformerConfig overrides, training options, FluidConfig fields)
EP2_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, TWENTY, {}),
    "accumulation": ({}, {"microbatches": 3}, {}),
    "shared_experts": (
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
        {},
        {},
    ),
    "shared_experts_overlap": (
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True},
        {"microbatches": 2},
        {},
    ),
    "distributed_optimizer": (
        {},
        {
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "microbatches": 2,
            **TWENTY,
        },
        {},
    ),
    "sigmoid_bias_groups_top3": (
        {
            "num_moe_experts": 8,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
        },
        {},
        {},
    ),
    "top1_probs_on_input": (
        {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
        {},
        {},
    ),
    "skewed": (
        {"num_moe_experts": 8, "moe_router_force_biased": 6.0, "moe_z_loss_coeff": 1e-3},
        {"overlap_grad_reduce": True, "microbatches": 2, **TWENTY},
        {},
    ),
    "allgather_dispatcher": ({"moe_token_dispatcher_type": "allgather"}, {"microbatches": 2}, {}),
    "dropping": ({"moe_expert_capacity_factor": 0.75}, {}, {}),
    "capacity_padding": (
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {},
        {},
    ),
    "deferred": ({}, {"microbatches": 3}, {"defer_weight_grads": True}),
    "deferred_overlap_grad_reduce": (
        {"num_moe_experts": 8, "moe_router_force_biased": 6.0, "moe_z_loss_coeff": 1e-3},
        {"overlap_grad_reduce": True, "microbatches": 2, **TWENTY},
        {"defer_weight_grads": True},
    ),
    "dx_chunks": ({}, {}, {"dx_chunks": 3}),
    "recompute_moe": (
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_shared_expert_intermediate_size": 40,
            "moe_z_loss_coeff": 1e-3,
        },
        {"microbatches": 2},
        {},
    ),
    "recompute_full_deferred": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"microbatches": 2},
        {"defer_weight_grads": True, "dx_chunks": 2},
    ),
}
EP4_CASES = {
    "ep4_deferred_accumulation": (
        {"num_moe_experts": 8, "moe_shared_expert_intermediate_size": 40},
        {"microbatches": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
        {"defer_weight_grads": True},
    )
}
PARAM_GATHER: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = (
    {},
    {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    {},
)


_stock: dict[
    str, Any
] = {}  # cases that differ in the plug-in's settings alone share Megatron's run


def _train_both(
    config: dict[str, Any], training: dict[str, Any], fluid: dict[str, Any]
) -> dict[str, Any]:
    from tests.support import tiny_gpt

    training = {"iterations": ITERATIONS} | training
    key = repr((torch.distributed.get_world_size(tiny_gpt.expert_group()), config, training))
    if key not in _stock:
        with tiny_gpt.plug_in(False) as calls:
            _stock[key] = tiny_gpt.train(tiny_gpt.gpt(tiny_gpt.config_of(**config)), **training)
            assert not calls
    stock = _stock[key]
    with tiny_gpt.plug_in(True, **fluid) as calls:
        ours = tiny_gpt.train(tiny_gpt.gpt(tiny_gpt.config_of(**config)), **training)
    return {
        "stock": stock.losses,
        "fluid": ours.losses,
        "norms": (stock.gradient_norms, ours.gradient_norms),
        "calls": len(calls),
        "iterations": training["iterations"],
        "descending": tiny_gpt.descending(ours.model),
    }


# Of gradients that go straight to main_grad: settings of training and of the plug-in.
FUSED_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deferred": ({"overlap_grad_reduce": True}, {"defer_weight_grads": True}),
    "at once": ({"overlap_grad_reduce": True}, {}),
    "without overlap": ({}, {}),
    "distributed optimizer": ({"overlap_grad_reduce": True, "distributed_optimizer": True}, {}),
}


def _train_fused(training: dict[str, Any], fluid: dict[str, Any]) -> dict[str, Any]:
    """Gradient accumulation fusion. "reported" counts the parameters of which autograd was asked
    nothing."""
    from megatron_fluid.patches import gradient_readiness

    reported = []
    report = gradient_readiness._Gate.report

    def counted(self: Any, pending: Any) -> None:
        reported.append([param.grad for param in self.params])
        report(self, pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_readiness._Gate, "report", counted)
        results = _train_both(
            {"gradient_accumulation_fusion": True}, {"microbatches": 2, **training}, fluid
        )
    assert all(grad is None for grads in reported for grad in grads)
    return results | {"reported": len(reported)}


def _cases(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    results = {
        name: tiny_gpt.guarded(lambda case=case: _train_both(*case)) for name, case in cases.items()
    }
    if (
        world_size == 4
    ):  # two replicas of each expert: only the experts' hooks wait for the gathered parameters
        tiny_gpt.parallel(expert_model_parallel_size=2)
        results["param_gather"] = tiny_gpt.guarded(lambda: _train_both(*PARAM_GATHER))
    if world_size == 2:
        for name, case in FUSED_CASES.items():
            results[f"fused {name}"] = tiny_gpt.guarded(lambda case=case: _train_fused(*case))
        results["repeated"] = tiny_gpt.guarded(
            lambda: _train_both(*cases["deferred_overlap_grad_reduce"])
        )
        results["spec"] = tiny_gpt.guarded(_train_specs)
        tiny_gpt.parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2)
        results["tensor_parallel"] = tiny_gpt.guarded(
            lambda: _train_both({}, {"microbatches": 2}, {})
        )
    return results


def _train_specs() -> dict[str, Any]:
    """Without any patch, the layer spec alone: with a configuration, and without one."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid import get_fluid_custom_layers
    from megatron_fluid.patches.layer_specs import FluidMoELayer
    from tests.support import tiny_gpt

    losses = {}
    overrides = {"moe_layer_freq": [0, 1]}
    for name in ("stock", "config", "no config"):
        with tiny_gpt.plug_in(False) as calls:
            set_config(FluidConfig(moe_backend="rounds"))
            config = tiny_gpt.config_of(**overrides)
            spec = {
                "stock": None,
                "config": get_fluid_custom_layers(config),
                "no config": get_fluid_custom_layers(),
            }
            model = tiny_gpt.gpt(config, spec[name])
            kinds = [type(layer.mlp) for layer in model.decoder.layers]
            assert not issubclass(kinds[0], MoELayer) and kinds[1] is (
                MoELayer if name == "stock" else FluidMoELayer
            )
            losses[name] = tiny_gpt.train(model, iterations=5).losses
            assert len(calls) == (0 if name == "stock" else 5)
    return losses


@pytest.fixture(scope="module")
def ep2() -> list[dict[str, Any]]:
    return run_ranks(_cases, 2, EP2_CASES, timeout_s=240)


@pytest.fixture(scope="module")
def ep4() -> list[dict[str, Any]]:
    return run_ranks(_cases, 4, EP4_CASES, timeout_s=120)


def _judge(results: list[dict[str, Any]], name: str, moe_layers: int = 2) -> None:
    for rank, result in enumerate(results):
        case = result[name]
        assert "error" not in case, f"rank {rank}:\n{case['error']}"
        stock, fluid = case["stock"], case["fluid"]
        assert stock[-1] < 0.9 * stock[0], "the model must learn, or equal losses say nothing"
        assert case["calls"] >= case["iterations"] * moe_layers, "the overlapped path must have run"
        assert fluid == pytest.approx(stock, rel=1e-6, abs=0)
        assert case["norms"][1] == pytest.approx(case["norms"][0], rel=1e-4, abs=0)


@pytest.mark.parametrize("name", EP2_CASES)
def test_losses_and_gradient_norms_are_megatrons(ep2: list[dict[str, Any]], name: str) -> None:
    _judge(ep2, name)


def test_with_tensor_and_sequence_parallel_attention(ep2: list[dict[str, Any]]) -> None:
    _judge(ep2, "tensor_parallel")


@pytest.mark.parametrize("name", EP4_CASES)
def test_four_expert_parallel_ranks(ep4: list[dict[str, Any]], name: str) -> None:
    _judge(ep4, name)


def test_the_experts_wait_for_gathered_parameters(ep4: list[dict[str, Any]]) -> None:
    _judge(ep4, "param_gather")


def test_experts_of_a_parameter_buffer_are_read_in_reverse(
    ep2: list[dict[str, Any]], ep4: list[dict[str, Any]]
) -> None:
    for result in ep2 + ep4:
        for name, case in result.items():
            if isinstance(case, dict) and "descending" in case:
                in_buffer = name in (
                    "distributed_optimizer",
                    "fused distributed optimizer",
                    "ep4_deferred_accumulation",
                    "param_gather",
                )
                assert case["descending"] is in_buffer, name


@pytest.mark.parametrize("name", FUSED_CASES)
def test_gradients_go_straight_into_main_grad(ep2: list[dict[str, Any]], name: str) -> None:
    _judge(ep2, f"fused {name}")
    for result in ep2:
        fused = result[f"fused {name}"]
        assert fused["reported"] == 2 * fused["calls"], "autograd visited the experts' parameters"


def test_a_run_repeats_bit_by_bit(ep2: list[dict[str, Any]]) -> None:
    for result in ep2:
        first, second = result["deferred_overlap_grad_reduce"], result["repeated"]
        assert "error" not in second, second["error"]
        assert first["fluid"] == second["fluid"] and first["norms"][1] == second["norms"][1]


def test_the_layer_spec_alone_without_patches(ep2: list[dict[str, Any]]) -> None:
    for result in ep2:
        losses = result["spec"]
        assert "error" not in losses, losses["error"]
        assert losses["config"] == pytest.approx(losses["stock"], rel=1e-6, abs=0)
        assert losses["no config"] == pytest.approx(losses["stock"], rel=1e-6, abs=0)
