"""One MoE layer of Megatron with the plug-in against Megatron's own, in double precision: outputs,
the input's gradient and the gradient of every parameter, by each way in which this package serves a
layer; and distributed checkpoints of either in the other.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import activations, dist_checkpointing
from megatron.core.fusions import fused_bias_geglu

from megatron_fluid import get_fluid_custom_layers
from megatron_fluid.errors import ConfigError
from tests.support import tiny_gpt
from tests.support.launch import on_ranks, run_ranks
from tests.support.megatron_parity import (
    SPLITS,
    WAYS,
    Layer,
    adapt,
    compare,
    hook_one_rank,
    keep_megatrons_experts,
    override_combine,
    pad_for_quantization,
    plug_in,
)

BIASES = {"add_bias_linear": True}
UNGATED = {"activation_func": F.gelu, "gated_linear_unit": False}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
CLAMPED = {"activation_func": activations.quick_gelu, "activation_func_clamp_value": 1.5}
CLAMPED |= {"glu_linear_offset": 1.0}
GPT_OSS = BIASES | CLAMPED | {"num_moe_experts": 8, "moe_router_topk": 4}
INTERLEAVED = {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 6}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ON_INPUT = TOP_1 | {"moe_apply_probs_on_input": True}
SHARED = {"moe_shared_expert_intermediate_size": 40}
SHARED_BESIDE = SHARED | {"moe_shared_expert_overlap": True}
DROPPING = {"moe_expert_capacity_factor": 0.75}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SPLIT = {"expert_tensor_parallel_size": 2}  # Megatron refuses biases beside it
ACT_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
REPLAYED = RECOMPUTED | {"moe_enable_routing_replay": True}
WEIGHT = {"moe_single_grouped_weight": True, "use_transformer_engine_op_fuser": True}
BIAS = {"moe_single_grouped_bias": True}
TO_ONE_RANK = {"num_moe_experts": 6, "moe_router_topk": 3}
FLEX = {"moe_token_dispatcher_type": "flex"}
GROUPED = {"moe_grouped_gemm": True, "num_moe_experts": 6}


def _frozen(layer: Any, rank: int) -> None:
    layer.experts.requires_grad_(False)


def _behind(model: dict[str, Any], **more: Any) -> Layer:
    """Experts of this package behind Megatron's exchange; ranks have as many tokens, which its
    all-gather asks for."""
    settings = {
        "fluid": {"moe_backend": "experts"}, "lengths": (6, 6), "way": "experts",
        "exchange": "megatron", "why": "moe_backend='experts'",
    }  # fmt: skip
    return Layer(model, **{**settings, **more})


def _exchanged(model: dict[str, Any], **more: Any) -> Layer:
    """Megatron's experts behind this package's exchange."""
    settings = {"way": "exchange", "change": keep_megatrons_experts, "why": "a hook is registered"}
    return Layer(model, **{**settings, **more})


def _by(exchange: str, model: dict[str, Any], **more: Any) -> Layer:
    return Layer(model, fluid={"moe_backend": exchange}, exchange=exchange, **more)


# Models that are served in each way: fused, or with Megatron's experts, or its exchange.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": (GPT_OSS, {"lengths": (3, 12)}),
    "all-gather, ungated": (BIASES | UNGATED | ALL_GATHER, {"lengths": (6, 6)}),
    "dropping": (BIASES | DROPPING, {"lengths": (9, 9)}),
    "capacity padding": (BIASES | PADDED, {"lengths": (9, 9)}),
    "probabilities on the input": (BIASES | ON_INPUT, {}),
    "shared experts beside": (SHARED_BESIDE | {"activation_func_clamp_value": 1.5}, {}),
}
AUTO = {"fluid": {"moe_backend": "auto"}, "why": "expert_tensor_parallel_size=2"}
DEFERRED = {"fluid": {"defer_weight_grads": True}}
SINGLE = {"ours": WEIGHT | BIAS}
REPLAY = {"way": "phases", "why": "moe_enable_routing_replay"}
CASES: dict[str, dict[str, Layer]] = {
    "ep2": {
        **{name: Layer(model, **more) for name, (model, more) in MODELS.items()},
        "uneven ranks, chunks": Layer(
            {"num_moe_experts": 8, "moe_router_topk": 5}, lengths=(3, 17), fluid={"dx_chunks": 2}
        ),
        "all tokens to one rank": Layer(BIASES | TO_ONE_RANK, wanted=(0, 1, 2)),
        "all tokens to one expert": Layer(TOP_1, wanted=(3,)),
        "one token": Layer(TOP_1, lengths=(1, 1)),
        "every expert, deferred": Layer({"moe_router_topk": 4}, **DEFERRED),
        "geglu": Layer({"activation_func": F.gelu}),
        "gelu, more chunks than rows": Layer(UNGATED, fluid={"dx_chunks": 50}),
        "padding mask": Layer({"moe_z_loss_coeff": 1e-2, "moe_aux_loss_coeff": 1.0}, padded=2),
        "grouped, activation recomputed": Layer(GROUPED, ours=ACT_RECOMPUTED, **DEFERRED),
        "frozen experts": Layer(BIASES, change=_frozen),
        "one local expert": Layer(BIASES | {"num_moe_experts": 2}),
        "grouped, interleaved gates": Layer(GPT_OSS | INTERLEAVED),
        "fused quick GeGLU": Layer(
            CLAMPED
            | {"activation_func": fused_bias_geglu.quick_gelu, "bias_activation_fusion": True}
        ),
        "single weights, fc1 recomputed": Layer(
            GROUPED, ours=WEIGHT, fluid={"moe_recompute": "both"}
        ),
        "single weights, biases apart": Layer(GROUPED | BIASES, ours=WEIGHT),
        "single biases": Layer(GROUPED | BIASES, ours=BIAS),
        "single, deferred": Layer(GROUPED | BIASES, **SINGLE, **DEFERRED),
        "single, gpt-oss": Layer(GROUPED | BIASES | CLAMPED, **SINGLE),
        "single, layer recomputed": Layer(GROUPED, ours=WEIGHT | RECOMPUTED),
        # Megatron's experts.
        **{
            f"exchange, {name}": _exchanged(model, **more) for name, (model, more) in MODELS.items()
        },
        "adapters": _exchanged({}, change=adapt, why=""),
        "a hook of one rank": _exchanged(
            {}, change=hook_one_rank, why="rank 1 of the group: a hook is registered on"
        ),
        "exchange, all tokens to one rank": _exchanged(TO_ONE_RANK, wanted=(0, 1, 2)),
        "exchange, frozen": _exchanged(
            BIASES, change=lambda layer, rank: (_frozen(layer, rank), keep_megatrons_experts(layer))
        ),
        "padded for quantisation": _exchanged(
            GROUPED,
            lengths=(16, 24),  # Megatron pads with each rank's own tokens: full tiles of 16
            change=pad_for_quantization,
            why="fp8='hybrid': megatron_fluid's fp8 experts have the format e4m3",
        ),
        # One phase after the other.
        "an overridden phase": Layer(
            change=override_combine, way="phases", why="Scaled.combine is overridden"
        ),
        "latent": Layer({"moe_latent_size": 12}, way="phases", why="moe_latent_size=12"),
        "replayed routing in place of flex": Layer(FLEX | REPLAYED, lengths=(6, 6), **REPLAY),
        "single, replayed routing": Layer(
            GROUPED | BIASES, ours=WEIGHT | BIAS | REPLAYED, **REPLAY
        ),
        # Megatron's exchange.
        **{f"behind, {name}": _behind(model, **more) for name, (model, more) in MODELS.items()},
        "behind all-gather, gated": _behind(ALL_GATHER),
        "behind all-to-all, interleaved": _behind(GPT_OSS | INTERLEAVED),
        "behind, single": _behind(GROUPED | BIASES, **SINGLE),
        "behind, single, deferred": _behind(
            GROUPED | ALL_GATHER,
            ours=WEIGHT,
            fluid={"moe_backend": "experts", "defer_weight_grads": True},
        ),
        "behind, no symmetric memory": _behind(
            BIASES, fluid={"moe_backend": "auto"}, why="no symmetric memory"
        ),
        "behind all-to-all, biases of rows that pad": _behind(
            BIASES | PADDED | ON_INPUT,
            fluid={"moe_backend": "auto", "moe_recompute": "both"},
            lengths=(9, 9),
            why="moe_pad_expert_input_to_capacity",
        ),
        "behind flex": _behind(
            BIASES | FLEX, fluid={"moe_backend": "auto"}, why="moe_token_dispatcher_type='flex'"
        ),
    },
    "etp2": {
        "gated": _behind(SPLIT, **AUTO),
        "all-gather, ungated": _behind(UNGATED | ALL_GATHER | SPLIT, **AUTO),
        "gpt-oss without biases": _behind(GPT_OSS | SPLIT | {"add_bias_linear": False}, **AUTO),
    },
    "two hosts": {
        "single": _by("hierarchical", GROUPED | BIASES, **SINGLE),
        "recomputed": Layer(
            GROUPED | BIASES,
            fluid={"moe_backend": "hierarchical", "moe_recompute": "both"},
            exchange="hierarchical",
        ),
    },
    "ep1": {
        "single": _by("local", GROUPED | BIASES, **SINGLE),
        "dropping": _by("local", DROPPING, lengths=(9, 9)),
    },
    "ep2 etp2": {
        "gated": _behind(SPLIT, **AUTO),
        "all-gather, ungated": _behind(UNGATED | ALL_GATHER | SPLIT, **AUTO),
    },
}
NAMES = [(split, name) for split, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    return {n: run_ranks(_world, n) for n in (2, 4)}


def _world(rank: int, world_size: int) -> dict[str, Any]:
    return compare(CASES)


@pytest.mark.parametrize(("split", "name"), NAMES)
def test_output_and_every_gradient_in_double_precision(
    results: dict[int, list[dict[str, Any]]], split: str, name: str
) -> None:
    case = CASES[split][name]
    for rank, result in enumerate(results[SPLITS[split].ranks]):
        found = result[split][name]
        assert "error" not in found, f"rank {rank}:\n{found['error']}"
        assert not any(found["stock"]["counts"].values())
        assert {part for part, count in found["counts"].items() if count} == WAYS[case.way]
        assert all(count >= 3 for count in found["counts"].values() if count)
        assert found["copies"] == 0, "a single grouped parameter was copied"
        exchange, why = found["exchange"]
        assert exchange == case.exchange, why
        reasons = {"exchange": "experts", "phases": "fusion"}
        told = why if case.way == "experts" else found[reasons.get(case.way, "experts")]
        assert (told is None) is (case.way == "fused")
        assert str(told).startswith(case.why) or not case.why, told
        assert (found["experts"] is None) is (case.way != "exchange")
        # The choices of these have their probabilities in fp32.
        most = 1e-6 if exchange in ("hierarchical", "local") else 1e-11
        stock, ours = found["stock"]["values"], found["values"]
        assert stock.keys() == ours.keys()
        sizes = {
            name: (float(value.abs().max()), float((value - ours[name]).abs().max()))
            for name, value in stock.items()
        }
        trained = case.change is not _frozen and name != "exchange, frozen"
        biased = case.model.get("add_bias_linear", False)
        assert any("bias" in what and size > 0 for what, (size, _) in sizes.items()) is biased
        assert len([what for what in sizes if "weight" in what]) >= (3 if trained else 1)
        for what, (size, difference) in sizes.items():
            assert difference <= most * max(size, 1.0), f"rank {rank}, {what}: {difference}"


@on_ranks(2)
def test_checkpoints_of_either_load_in_the_other(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Distributed checkpoints; plain state dicts have the same keys and shapes."""
    tiny_gpt.parallel(expert_model_parallel_size=world_size)

    def model(on: bool, seed: int) -> Any:
        with plug_in(on):
            config = tiny_gpt.config_of(num_moe_experts=8)
            return tiny_gpt.gpt(config, get_fluid_custom_layers(config) if on else None, seed=seed)

    stock, ours = (
        {n: getattr(v, "shape", None) for n, v in model(on, 1).state_dict().items()}
        for on in (False, True)
    )
    assert stock == ours and len(stock) > 20
    for writer_on in (True, False):
        folder = tmp_path / f"{writer_on}"
        folder.mkdir(exist_ok=True)
        writer, reader = model(writer_on, 1), model(not writer_on, 2)
        dist_checkpointing.save(writer.sharded_state_dict(), str(folder))
        loaded = dist_checkpointing.load(reader.sharded_state_dict(), str(folder))
        reader.load_state_dict(loaded)
        for (name, a), b in zip(writer.named_parameters(), reader.parameters(), strict=True):
            assert torch.equal(a, b), name


@on_ranks(2)
def test_a_setting_that_is_not_honoured_is_named(rank: int, world_size: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    unsupported = tiny_gpt.config_of()
    unsupported.expert_gtp_weight_remat_size = 2
    named = "moe_backend: found 'rounds'.*expert_gtp_weight_remat_size"
    with plug_in(True), pytest.raises(ConfigError, match=named):
        tiny_gpt.gpt(unsupported)
