"""GPT-MoEs trained by Megatron with the plug-in and without: the same losses and gradient norms,
for public models cut down in width and depth, for each way in which this package serves a layer,
and for splits of a model. test_training_sequences.py draws what people change between steps.
"""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid import get_fluid_custom_layers
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches.layer_specs import FluidMoELayer
from tests.distributed.test_megatron_moe_layers import (
    ALL_GATHER,
    BIASES,
    GPT_OSS,
    RECOMPUTED,
    SHARED,
    SHARED_BESIDE,
    SPLIT,
    UNGATED,
    WEIGHT,
)
from tests.support import tiny_gpt
from tests.support.launch import on_ranks, run_ranks
from tests.support.megatron_parity import SPLITS, WAYS, Training, compare, plug_in

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
SKEWED = {"num_moe_experts": 8, "moe_router_force_biased": 6.0, "moe_z_loss_coeff": 1e-3}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DEFERRED, MAIN_GRAD = {"defer_weight_grads": True}, {"gradient_accumulation_fusion": True}
BEHIND = {"way": "experts", "exchange": "megatron"}

TWO = {"microbatches": 2}
REDUCED = TWO | {"overlap_grad_reduce": True}
SHARDED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}

# Of public models, TransformerConfig's fields at widths of tiny_gpt.
RMS = {"normalization": "RMSNorm", "num_query_groups": 2}
QWEN3 = RMS | {
    "num_moe_experts": 16, "moe_router_topk": 8, "moe_ffn_hidden_size": 24, "kv_channels": 16,
    "qk_layernorm": True, "moe_router_dtype": "fp32", "moe_aux_loss_coeff": 1e-3,
}  # fmt: skip
DEEPSEEK = {
    "normalization": "RMSNorm", "multi_latent_attention": True, "q_lora_rank": 16,
    "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
    "qk_layernorm": True, "mtp_num_layers": 1, "num_layers": 3, "moe_layer_freq": [0, 1, 1],
    "num_moe_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4,
}  # fmt: skip
GPT_OSS_20B = RMS | GPT_OSS | {
    "kv_channels": 16, "activation_func_clamp_value": 7.0, "window_size": (7, 0),
    "window_attn_skip_freq": 2, "softmax_type": "learnable", "moe_router_dtype": "fp32",
}  # fmt: skip
OLMOE = RMS | {
    "num_moe_experts": 16, "moe_router_topk": 8, "moe_ffn_hidden_size": 24, "qk_layernorm": True,
    "moe_router_pre_softmax": True, "moe_z_loss_coeff": 1e-3,
}  # fmt: skip
QWEN3_235B = QWEN3 | {
    "num_layers": 3, "num_attention_heads": 8, "num_query_groups": 1,
    "moe_router_load_balancing_type": "global_aux_loss",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": QWEN3_235B, "DeepSeek-V3": DEEPSEEK, "gpt-oss-20b": GPT_OSS_20B,
    "OLMoE-1B-7B": OLMOE,
}  # fmt: skip
CASES: dict[str, dict[str, Training]] = {
    "ep2": {
        **{name: Training(m, {"learning_rate": 2e-3}) for name, m in MODELS.items()},
        "shared experts beside": Training(SHARED_BESIDE | {"moe_shared_expert_gate": False}, TWO),
        "skewed, deferred": Training(SKEWED, REDUCED, DEFERRED),
        "full recompute, deferred, chunks": Training(FULL, TWO, DEFERRED | {"dx_chunks": 2}),
        "main_grad, sharded": Training(MAIN_GRAD, TWO | SHARDED),
        "main_grad, deferred": Training(MAIN_GRAD, REDUCED, DEFERRED),
        "single weights": Training(
            BF16 | {"moe_grouped_gemm": True}, TWO | SHARDED, ours=WEIGHT, grouped=True
        ),
        "exchange, gpt-oss": Training(GPT_OSS, REDUCED, way="exchange"),
        "exchange, recomputed": Training(SHARED | FULL, SHARDED, way="exchange"),
        "behind all-gather, deferred": Training(
            BIASES | UNGATED | ALL_GATHER, SHARDED, DEFERRED | {"moe_backend": "experts"}, **BEHIND
        ),
    },
    "ep1": {
        "single weights": Training(
            BF16 | {"moe_grouped_gemm": True}, TWO | SHARDED, {"moe_backend": "local"},
            ours=WEIGHT, grouped=True, exchange="local",
        ),
    },
    "tp2 ep2": {
        "plain": Training({}, TWO),
        "linears overlapped": Training(
            SHARED, REDUCED | {"distributed_optimizer": True}, {"tp_overlap": "on"}, linears=True
        ),
    },
    "etp2": {
        "recomputed, shared beside": Training(
            SPLIT | RECOMPUTED | SHARED_BESIDE, TWO, {"moe_backend": "auto"}, **BEHIND
        ),
    },
    "ep2 etp2": {
        "plain": Training(
            SPLIT, TWO | {"distributed_optimizer": True}, {"moe_backend": "auto"}, **BEHIND
        ),
    },
    "ep4": {
        "shared, deferred": Training(
            SHARED | {"num_moe_experts": 8},
            REDUCED | {"distributed_optimizer": True},
            DEFERRED,
        ),
    },
    "ep2 dp2": {"gathered parameters": Training({}, SHARDED)},
    "ep4 two hosts": {
        "sharded": Training(
            {"num_moe_experts": 8}, SHARDED, {"moe_backend": "auto"}, exchange="hierarchical"
        ),
        "biases, recomputed": Training(
            BIASES | {"glu_linear_offset": 1.0, "num_moe_experts": 8} | RECOMPUTED,
            {},
            {"moe_backend": "hierarchical"},
            exchange="hierarchical",
        ),
    },
}  # fmt: skip
NAMES = [(split, name) for split, cases in CASES.items() for name in cases]


def _world(rank: int, world_size: int) -> dict[str, Any]:
    return compare(CASES)


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    return {n: run_ranks(_world, n) for n in (2, 4)}


@pytest.mark.parametrize(("split", "name"), NAMES)
def test_losses_and_gradient_norms_are_megatrons(
    results: dict[int, list[dict[str, Any]]], split: str, name: str
) -> None:
    case = CASES[split][name]
    for result in results[SPLITS[split].ranks]:
        found = result[split][name]
        assert "error" not in found, found["error"]
        (losses, norms), (ours, our_norms) = found["stock"]["values"], found["values"]
        assert losses[-1] < 0.99 * losses[0], "it must learn, or equal losses say nothing"
        bf16 = case.model.get("bf16", False)
        assert ours == pytest.approx(losses, rel=1e-3 if bf16 else 2e-6, abs=0)
        assert our_norms == pytest.approx(norms, rel=2e-2 if bf16 else 1e-4, abs=0)
        assert found["exchanges"] == {case.exchange}
        counts = found["counts"]
        assert not any(found["stock"]["counts"].values())
        assert {part for part, count in counts.items() if count} == WAYS[case.way]
        assert all(count >= found["least calls"] for count in counts.values() if count)
        if case.way == "fused" and not case.grouped:  # as Megatron's buffers lay parameters out
            sharded = case.options.get("distributed_optimizer", False)
            assert found["descending"] is sharded
        assert found["linears"] == (case.linears,) * 2 and not any(found["stock"]["linears"])
        if case.model.get("gradient_accumulation_fusion"):
            assert found["reported"] == 2 * counts["fused"], "autograd visited experts' parameters"


@on_ranks(2)
def test_the_layer_spec_alone_without_patches(rank: int, world_size: int) -> None:
    """With a configuration, and without one."""
    tiny_gpt.parallel(expert_model_parallel_size=2)
    losses = {}
    for name in ("stock", "config", "no config"):
        with plug_in(False) as counts:
            set_config(FluidConfig(moe_backend="rounds"))
            config = tiny_gpt.config_of(moe_layer_freq=[0, 1])
            spec = None
            if name != "stock":
                spec = get_fluid_custom_layers(*([config] if name == "config" else []))
            model = tiny_gpt.gpt(config, spec)
            kinds = [type(layer.mlp) for layer in model.decoder.layers]
            assert not issubclass(kinds[0], MoELayer)
            assert kinds[1] is (MoELayer if name == "stock" else FluidMoELayer)
            losses[name] = tiny_gpt.train(model, iterations=5).losses
            assert counts["fused"] == (0 if name == "stock" else 5)
    for name in ("config", "no config"):
        assert losses[name] == pytest.approx(losses["stock"], rel=1e-6, abs=0)
