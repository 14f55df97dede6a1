"""This package's experts behind a token dispatcher of Megatron's, or phase by phase behind ours:
the same losses and the same gradient of every parameter as Megatron's own layer.

One world of two ranks and one of four run every case; the tests judge them one by one.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations

from tests.support.exchanged_layers import guarded
from tests.support.flex_stand_in import flex_without_deepep
from tests.support.separate_experts import compared, plug_in, uneven_collectives, worst

BIASES = {"add_bias_linear": True}
UNGATED = {
    "activation_func": F.gelu,
    "gated_linear_unit": False,
    "moe_token_dispatcher_type": "allgather",
}
DEFAULTS = BIASES | UNGATED
GPT_OSS = BIASES | {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
    "num_moe_experts": 8,
    "moe_router_topk": 4,
}
ON_INPUT = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True}
SPLIT = {"expert_tensor_parallel_size": 2}  # Megatron refuses biases beside it
EXPERTS, AUTO = {"moe_backend": "experts"}, {"moe_backend": "auto"}

# What is ours phase by phase, in the place of flex.
NAMED = {"moe_token_dispatcher_type": "flex", "moe_enable_routing_replay": True}
NAMED |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ROUNDS = {"moe_backend": "rounds"}

# World and split: name: (TransformerConfig overrides, FluidConfig fields, why the exchange is
# Megatron's). All ranks have as many tokens: the all-gather asks for it.
CASES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any], str]]] = {
    "ep2": {
        "megatron's defaults": (DEFAULTS, EXPERTS, "moe_backend='experts'"),
        "all-gather, gated": (
            {"moe_token_dispatcher_type": "allgather"},
            EXPERTS,
            "moe_backend='experts'",
        ),
        "all-to-all, gpt-oss": (GPT_OSS, EXPERTS, "moe_backend='experts'"),
        "grouped, interleaved gates": (
            GPT_OSS | {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 6},
            EXPERTS,
            "moe_backend='experts'",
        ),
        "no symmetric memory": (BIASES, AUTO, "no symmetric memory"),
        "probabilities on the input": (BIASES | ON_INPUT, EXPERTS, "moe_backend='experts'"),
        "flex": (
            BIASES | {"moe_token_dispatcher_type": "flex"},
            AUTO,
            "moe_token_dispatcher_type='flex'",
        ),
        "dropping, shared experts beside": (
            SHARED | {"moe_expert_capacity_factor": 0.75},
            EXPERTS,
            "moe_backend='experts'",
        ),
        "capacity padding": (
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            EXPERTS,
            "moe_backend='experts'",
        ),
    },
    "etp2": {
        "gated": (SPLIT, AUTO, "expert_tensor_parallel_size=2"),
        "all-gather, ungated": (UNGATED | SPLIT, AUTO, "expert_tensor_parallel_size=2"),
        "gpt-oss without biases": (
            GPT_OSS | SPLIT | {"add_bias_linear": False},
            AUTO,
            "expert_tensor_parallel_size=2",
        ),
    },
    "ep2, etp2": {
        "gated": (SPLIT, AUTO, "expert_tensor_parallel_size=2"),
        "all-gather, ungated": (UNGATED | SPLIT, AUTO, "expert_tensor_parallel_size=2"),
    },
}
WORLDS = {"ep2": (2, 2, 1), "etp2": (2, 1, 2), "ep2, etp2": (4, 2, 2)}  # ranks, EP, ETP
ITERATIONS = 6


def _train_both(overrides: dict[str, Any], fields: dict[str, Any], **training: Any) -> Any:
    from tests.support import tiny_gpt

    found = {}
    for way in ("stock", "ours"):
        with plug_in(way == "ours", **fields) as calls:
            model = tiny_gpt.gpt(tiny_gpt.config_of(**overrides))
            run = tiny_gpt.train(model, iterations=ITERATIONS, **training)
            found[way] = run.losses, run.gradient_norms, len(calls)
    return found


TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ep2": (
        DEFAULTS,
        EXPERTS | {"defer_weight_grads": True},
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "etp2": (
        SPLIT | {"recompute_granularity": "selective", "recompute_modules": ["moe"], **SHARED},
        AUTO,
        {"microbatches": 2},
    ),
    "ep2, etp2": (SPLIT, AUTO, {"distributed_optimizer": True, "microbatches": 2}),
}


def _changed(rank: int) -> dict[str, Any]:
    """A layer whose experts are changed between its calls: new memory for a parameter of rank 1,
    which ours take as it is, and a hook on each rank, which they would never call."""
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    hidden = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(rank))
    with plug_in(False):
        right = tiny_gpt.moe_layer(tiny_gpt.config_of())(hidden)[0].detach()
    found: dict[str, Any] = {"off": 0.0, "hooked": 0}

    def count(*_: Any) -> None:
        found["hooked"] += 1

    with plug_in(True, **EXPERTS) as calls:
        layer = tiny_gpt.moe_layer(tiny_gpt.config_of())

        def call() -> tuple[int, str | None]:
            output = layer(hidden)[0].detach()
            found["off"] = max(found["off"], float((output - right).abs().max()))
            return len(calls), moe_layer.experts_reason_of(layer)

        weight = layer.experts.local_experts[0].linear_fc1.weight
        found["first"] = call()
        decision = moe_layer.DECISIONS.get(layer)
        assert decision is not None
        experts: Any = decision.path
        rows, probs = (
            torch.randn(9, 32),
            torch.rand(9),
        )  # a buffer of a fixed size, of which 6 count
        exact = experts.compute(layer, rows[:6], [4, 2], probs[:6])
        spare = experts.compute(layer, rows, [4, 2], probs)
        found["spare"] = torch.equal(spare[:6], exact) and not spare[6:].any()
        calls.clear()
        calls.append(1)
        if rank == 1:
            weight.data = weight.data.clone()
        found["moved"] = call()
        layer.experts.local_experts[1].linear_fc2.register_forward_hook(count)
        with pytest.raises(ConfigError, match="was changed after its first forward: a hook"):
            call()
        patches.reset_layers()
        found["last"] = call()
    return found


def _world(rank: int, world_size: int, name: str) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    _, experts, split = WORLDS[name]
    sizes = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": split}
    tiny_gpt.parallel(tensor_model_parallel_size=split, **sizes)
    lengths = (6,) * world_size
    uneven = uneven_collectives() if name == "ep2, etp2" else contextlib.nullcontext()
    with uneven, flex_without_deepep():
        found = {
            case: guarded(lambda o=overrides, f=fields: compared(rank, o, lengths, f))
            for case, (overrides, fields, _) in CASES[name].items()
        }
        overrides, fields, training = TRAININGS[name]
        found["train"] = guarded(lambda: _train_both(overrides, fields, **training))
        if name == "ep2":
            found["changed"] = guarded(lambda: _changed(rank))
            found["named"] = guarded(lambda: compared(rank, NAMED, lengths, ROUNDS))
    return found


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    name: str = request.param
    return name, run_ranks(_world, WORLDS[name][0], name, timeout_s=300)


def test_output_and_every_gradient_in_double_precision(
    world: tuple[str, list[dict[str, Any]]],
) -> None:
    name, results = world
    for rank, result in enumerate(results):
        for case, (overrides, _, why) in CASES[name].items():
            found = result[case]
            assert worst(found) < 1e-11, f"rank {rank}, {case}: {found['differences']}"
            assert (found["stock calls"], found["ours calls"]) == (0, 3), case
            assert found["exchange"][0] == "megatron" and found["exchange"][1].startswith(why)
            assert found["experts"] is None
            biased = overrides.get("add_bias_linear", False)
            sizes = found["differences"].items()
            assert any("bias" in n and size > 0 for n, (size, _) in sizes) is biased


def test_trained_models_have_megatrons_losses(world: tuple[str, list[dict[str, Any]]]) -> None:
    for result in world[1]:
        found = result["train"]
        assert "error" not in found, found["error"]
        losses, norms, calls = found["stock"]
        assert losses[-1] < 0.99 * losses[0] and calls == 0
        assert found["ours"][0] == pytest.approx(losses, rel=1e-6, abs=0)
        assert found["ours"][1] == pytest.approx(norms, rel=1e-4, abs=0)
        assert found["ours"][2] >= 2 * ITERATIONS


def test_a_backend_that_is_named_takes_the_place_of_flex(
    world: tuple[str, list[dict[str, Any]]],
) -> None:
    if world[0] != "ep2":
        pytest.skip("flex stands in the world without split experts")
    for result in world[1]:
        found = result["named"]
        assert worst(found) < 1e-11, found["differences"]
        # The recomputation calls the experts again.
        assert found["exchange"] == ("rounds", None) and found["experts"] is None
        assert (found["stock calls"], found["ours calls"]) == (0, 5)


def test_experts_that_are_changed_are_refused_and_after_a_reset_megatrons(
    world: tuple[str, list[dict[str, Any]]],
) -> None:
    if world[0] != "ep2":
        pytest.skip("one world is enough")
    for result in world[1]:
        found = result["changed"]
        assert "error" not in found, found["error"]
        assert found["off"] < 1e-5 and found["hooked"] == 1 and found["spare"]
        assert found["first"] == (1, None) and found["moved"] == (2, None)
        calls, reason = found["last"]
        assert calls == 2 and "hook is registered" in reason
