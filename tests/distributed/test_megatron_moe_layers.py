"""One MoE layer of Megatron with the plug-in against Megatron's own, in double precision: outputs,
the input's gradient and the gradient of every parameter, by each way in which this package serves a
layer; and distributed checkpoints of either in the other.

A world of two ranks and one of four run all cases; the tests judge them one by one.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_fluid.errors import ConfigError
from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu

from tests.support.megatron_parity import (
    SPLITS,
    Layer,
    adapt,
    compare_layers,
    hook_one_rank,
    keep_megatrons_experts,
    override_combine,
    pad_for_quantization,
    plug_in,
    ran,
)

BIASES = {"add_bias_linear": True}
UNGATED = {"activation_func": F.gelu, "gated_linear_unit": False}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
CLAMPED = {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
}
GPT_OSS = BIASES | CLAMPED | {"num_moe_experts": 8, "moe_router_topk": 4}
INTERLEAVED = {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 6}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ON_INPUT = TOP_1 | {"moe_apply_probs_on_input": True}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True}
DROPPING = {"moe_expert_capacity_factor": 0.75}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SPLIT = {"expert_tensor_parallel_size": 2}  # Megatron refuses biases beside it
ACT_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
REPLAYED = RECOMPUTED | {"moe_enable_routing_replay": True}
WEIGHT = {
    "moe_grouped_gemm": True,
    "use_transformer_engine_op_fuser": True,
    "moe_single_grouped_weight": True,
}
BIAS = {"moe_single_grouped_bias": True}
GROUPED = {"moe_grouped_gemm": True, "num_moe_experts": 6}


def _frozen(layer: Any, rank: int) -> None:
    layer.experts.requires_grad_(False)


def _behind(model: dict[str, Any], **more: Any) -> Layer:
    """Experts of this package behind Megatron's exchange; ranks have as many tokens, which its
    all-gather asks for."""
    settings = {
        "fluid": {"moe_backend": "experts"},
        "lengths": (6, 6),
        "way": "experts",
        "exchange": "megatron",
        "why": "moe_backend='experts'",
    }
    return Layer(model, **{**settings, **more})


def _exchanged(model: dict[str, Any], **more: Any) -> Layer:
    """Megatron's experts behind this package's exchange."""
    settings = {"way": "exchange", "change": keep_megatrons_experts, "why": "a hook is registered"}
    return Layer(model, **{**settings, **more})


AUTO = {"fluid": {"moe_backend": "auto"}, "why": "expert_tensor_parallel_size=2"}
CASES: dict[str, dict[str, Layer]] = {
    "ep2": {
        "uneven ranks, chunks": Layer(
            {"num_moe_experts": 8, "moe_router_topk": 5}, lengths=(3, 17), fluid={"dx_chunks": 2}
        ),
        "all tokens to one rank": Layer(
            BIASES | {"num_moe_experts": 6, "moe_router_topk": 3}, wanted=(0, 1, 2)
        ),
        "all tokens to one expert": Layer(TOP_1, wanted=(3,)),
        "one token": Layer(TOP_1, lengths=(1, 1)),
        "every expert, deferred": Layer({"moe_router_topk": 4}, fluid={"defer_weight_grads": True}),
        "geglu": Layer({"activation_func": F.gelu}),
        "gelu, more chunks than rows": Layer(UNGATED, fluid={"dx_chunks": 50}),
        "padding mask": Layer({"moe_z_loss_coeff": 1e-2, "moe_aux_loss_coeff": 1.0}, padded=2),
        "grouped, activation recomputed": Layer(
            GROUPED, ours=ACT_RECOMPUTED, fluid={"defer_weight_grads": True}
        ),
        "frozen experts": Layer(BIASES, change=_frozen),
        "one local expert": Layer(BIASES | {"num_moe_experts": 2}),
        "megatron's defaults": Layer(BIASES | UNGATED | ALL_GATHER, lengths=(6, 6)),
        "gpt-oss": Layer(GPT_OSS, lengths=(3, 12)),
        "grouped, interleaved gates": Layer(GPT_OSS | INTERLEAVED),
        "fused quick GeGLU": Layer(
            CLAMPED
            | {"activation_func": fused_bias_geglu.quick_gelu, "bias_activation_fusion": True}
        ),
        "dropping": Layer(BIASES | DROPPING, lengths=(9, 9)),
        "capacity padding": Layer(BIASES | PADDED, lengths=(9, 9)),
        "probabilities on the input": Layer(BIASES | ON_INPUT),
        "shared experts beside": Layer(SHARED | {"activation_func_clamp_value": 1.5}),
        "single weights, fc1 recomputed": Layer(
            GROUPED, ours=WEIGHT, fluid={"moe_recompute": "hidden"}
        ),
        "single weights, biases apart": Layer(GROUPED | BIASES, ours=WEIGHT),
        "single biases": Layer(GROUPED | BIASES, ours=BIAS),
        "single, deferred": Layer(
            GROUPED | BIASES, ours=WEIGHT | BIAS, fluid={"defer_weight_grads": True}
        ),
        "single, gpt-oss": Layer(GROUPED | BIASES | CLAMPED, ours=WEIGHT | BIAS),
        "single, layer recomputed": Layer(GROUPED, ours=WEIGHT | RECOMPUTED),
        # Megatron's experts.
        "adapters": _exchanged({}, change=adapt, why=""),
        "a hook of one rank": _exchanged(
            {}, change=hook_one_rank, why="rank 1 of the group: a hook is registered on"
        ),
        "exchange, gpt-oss": _exchanged(GPT_OSS, lengths=(3, 12)),
        "exchange, all tokens to one rank": _exchanged(
            {"num_moe_experts": 6, "moe_router_topk": 3}, wanted=(0, 1, 2)
        ),
        "exchange, all-gather": _exchanged(BIASES | UNGATED | ALL_GATHER, lengths=(6, 6)),
        "exchange, capacity padding": _exchanged(BIASES | PADDED, lengths=(9, 9)),
        "exchange, probabilities on the input": _exchanged(BIASES | ON_INPUT),
        "exchange, shared experts beside": _exchanged(SHARED),
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
        "replayed routing in place of flex": Layer(
            {"moe_token_dispatcher_type": "flex"} | REPLAYED,
            lengths=(6, 6),
            way="phases",
            why="moe_enable_routing_replay",
        ),
        "single, replayed routing": Layer(
            GROUPED | BIASES,
            ours=WEIGHT | BIAS | REPLAYED,
            way="phases",
            why="moe_enable_routing_replay",
        ),
        # Megatron's exchange.
        "behind all-gather, ungated": _behind(BIASES | UNGATED | ALL_GATHER),
        "behind all-gather, gated": _behind(ALL_GATHER),
        "behind all-to-all, gpt-oss": _behind(GPT_OSS),
        "behind all-to-all, interleaved": _behind(GPT_OSS | INTERLEAVED),
        "behind, probabilities on the input": _behind(BIASES | ON_INPUT),
        "behind, dropping, shared beside": _behind(SHARED | DROPPING),
        "behind, capacity padding": _behind(PADDED),
        "behind, single": _behind(GROUPED | BIASES, ours=WEIGHT | BIAS),
        "behind, single, deferred": _behind(
            GROUPED | ALL_GATHER,
            ours=WEIGHT,
            fluid={"moe_backend": "experts", "defer_weight_grads": True},
        ),
        "behind, no symmetric memory": _behind(
            BIASES, fluid={"moe_backend": "auto"}, why="no symmetric memory"
        ),
        "behind flex": _behind(
            BIASES | {"moe_token_dispatcher_type": "flex"},
            fluid={"moe_backend": "auto"},
            why="moe_token_dispatcher_type='flex'",
        ),
    },
    "etp2": {
        "gated": _behind(SPLIT, **AUTO),
        "all-gather, ungated": _behind(UNGATED | ALL_GATHER | SPLIT, **AUTO),
        "gpt-oss without biases": _behind(GPT_OSS | SPLIT | {"add_bias_linear": False}, **AUTO),
    },
    "two hosts": {
        "single": Layer(
            GROUPED | BIASES,
            ours=WEIGHT | BIAS,
            fluid={"moe_backend": "hierarchical"},
            exchange="hierarchical",
        )
    },
    "ep1": {
        "single": Layer(
            GROUPED | BIASES, ours=WEIGHT | BIAS, fluid={"moe_backend": "local"}, exchange="local"
        ),
        "dropping": Layer(
            DROPPING, lengths=(9, 9), fluid={"moe_backend": "local"}, exchange="local"
        ),
    },
    "ep2 etp2": {
        "gated": _behind(SPLIT, **AUTO),
        "all-gather, ungated": _behind(UNGATED | ALL_GATHER | SPLIT, **AUTO),
    },
}
NAMES = [(split, name) for split, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    return {n: run_ranks(_world, n, timeout_s=300) for n in (2, 4)}


def _world(rank: int, world_size: int) -> dict[str, Any]:
    return compare_layers(rank, world_size, CASES)


@pytest.mark.parametrize(("split", "name"), NAMES)
def test_output_and_every_gradient_in_double_precision(
    results: dict[int, list[dict[str, Any]]], split: str, name: str
) -> None:
    case = CASES[split][name]
    for rank, result in enumerate(results[SPLITS[split].ranks]):
        found = result[split][name]
        assert "error" not in found, f"rank {rank}:\n{found['error']}"
        assert not any(found["stock counts"].values())
        assert {part for part, count in found["counts"].items() if count} == ran(case.way)
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
        sizes = found["differences"]
        trained = case.change is not _frozen and name != "exchange, frozen"
        biased = case.model.get("add_bias_linear", False)
        assert any("bias" in what and size > 0 for what, (size, _) in sizes.items()) is biased
        assert len([what for what in sizes if "weight" in what]) >= (3 if trained else 1)
        for what, (size, difference) in sizes.items():
            assert difference <= most * max(size, 1.0), f"rank {rank}, {what}: {difference}"


def _checkpoints(rank: int, world_size: int) -> dict[str, Any]:
    """Distributed checkpoints written by either load into the other; plain state dicts have the
    same keys and shapes. And a setting that is refused by name."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megatron_fluid import get_fluid_custom_layers
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)

    def model(on: bool, seed: int) -> Any:
        with plug_in(on):
            config = tiny_gpt.config_of(num_moe_experts=8)
            return tiny_gpt.gpt(config, get_fluid_custom_layers(config) if on else None, seed=seed)

    shapes = [
        {n: getattr(v, "shape", None) for n, v in model(on, 1).state_dict().items()}
        for on in (False, True)
    ]
    different = []
    folders: list[Any] = [[tempfile.mkdtemp() for _ in range(2)] if rank == 0 else None]
    dist.broadcast_object_list(folders)
    for writer_on, folder in zip((True, False), folders[0], strict=True):
        writer, reader = model(writer_on, 1), model(not writer_on, 2)
        dist_checkpointing.save(writer.sharded_state_dict(), folder)
        reader.load_state_dict(dist_checkpointing.load(reader.sharded_state_dict(), folder))
        different += [
            name
            for (name, a), b in zip(writer.named_parameters(), reader.parameters(), strict=True)
            if not torch.equal(a, b)
        ]
    unsupported = tiny_gpt.config_of()
    unsupported.expert_gtp_weight_remat_size = 2
    with plug_in(True), pytest.raises(ConfigError) as refused:
        tiny_gpt.gpt(unsupported)
    return {
        "shapes": shapes[0] == shapes[1] and len(shapes[0]) > 20,
        "different": different,
        "refused": str(refused.value),
    }


def test_checkpoints_of_either_load_in_the_other_and_what_is_not_honoured_is_named() -> None:
    for found in run_ranks(_checkpoints, 2):
        assert found["shapes"] and not found["different"]
        assert "moe_backend: found 'rounds'" in found["refused"]
        assert "expert_gtp_weight_remat_size" in found["refused"]
