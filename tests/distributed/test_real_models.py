"""Public models, cut down in width and depth: trained with the package and without, the losses are
the same and the start-up table says what is ours. And Megatron's default configuration."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations

from tests.support.exchanged_layers import guarded

ITERATIONS = 10
RMS = {"normalization": "RMSNorm", "num_query_groups": 2}
QWEN3 = RMS | {
    "num_moe_experts": 16,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 24,
    "kv_channels": 16,
    "qk_layernorm": True,
    "moe_router_dtype": "fp32",
    "moe_aux_loss_coeff": 1e-3,
}
# TransformerConfig's fields of each model, at widths of tiny_gpt.
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral 8x7B": RMS | {"num_moe_experts": 8},
    "Qwen3-30B-A3B": QWEN3,
    "Qwen3-235B-A22B": QWEN3
    | {
        "num_layers": 3,
        "num_attention_heads": 8,
        "num_query_groups": 1,
        "moe_router_load_balancing_type": "global_aux_loss",
    },
    "DeepSeek-V3": {
        "normalization": "RMSNorm",
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "mtp_num_layers": 1,
        "num_layers": 3,
        "moe_layer_freq": [0, 1, 1],
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
    },
    "gpt-oss-20b": RMS
    | {
        "num_moe_experts": 8,
        "moe_router_topk": 4,
        "kv_channels": 16,
        "add_bias_linear": True,
        "activation_func": activations.quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "window_size": (7, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "moe_router_dtype": "fp32",
    },
    "OLMoE-1B-7B": RMS
    | {
        "num_moe_experts": 16,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 24,
        "qk_layernorm": True,
        "moe_router_pre_softmax": True,
        "moe_z_loss_coeff": 1e-3,
    },
}


def _train(settings: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid.patches import overlap_decision
    from tests.support import tiny_gpt

    found: dict[str, Any] = {}
    for on in (False, True):
        overlap_decision._features.clear()
        with tiny_gpt.plug_in(on) as calls:
            model = tiny_gpt.gpt(tiny_gpt.config_of(**settings))
            layers = sum(isinstance(module, MoELayer) for module in model.modules())
            found["features"] = overlap_decision.features()
            run = tiny_gpt.train(model, iterations=ITERATIONS, learning_rate=2e-3)
            found[on] = run.losses, run.gradient_norms
            found["calls"] = len(calls), ITERATIONS * layers
    return found


def _world(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    return {name: guarded(lambda m=model: _train(m)) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def ep2() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradient_norms_are_megatrons(ep2: list[dict[str, Any]], name: str) -> None:
    for result in ep2:
        case = result[name]
        assert "error" not in case, case["error"]
        (stock, norms), (ours, our_norms) = case[False], case[True]
        assert stock[-1] < 0.98 * stock[0]
        assert ours == pytest.approx(stock, rel=1e-6, abs=0)
        assert our_norms == pytest.approx(norms, rel=1e-4, abs=0)
        calls, layers = case["calls"]
        assert calls == layers > 0
        rows = [row[1:3] for row in case["features"] if row[0] == "overlapped MoE layer"]
        assert rows == [(True, "rounds, 2 expert-parallel ranks")]


def _default_config(rank: int, world_size: int) -> list[tuple[str, bool, str, int]]:
    """The seed's words on Megatron's default configuration: what the start-up table says."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_fluid import get_fluid_custom_layers
    from megatron_fluid.patches import startup_report
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=8, moe_router_topk=2,
        expert_model_parallel_size=2, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTModel(
        config, transformer_layer_spec=get_fluid_custom_layers(), vocab_size=64,
        max_sequence_length=16,
    )  # fmt: skip
    tokens, positions = torch.zeros(1, 16, dtype=torch.long), torch.arange(16)[None]
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    model(tokens, positions, mask).sum().backward()
    layers = [layer.mlp for layer in model.decoder.layers]
    assert all(tiny_gpt.expert_order(layer) is not None for layer in layers), "Megatron's path"
    assert all(moe_layer.experts_reason_of(layer) is None for layer in layers)
    return startup_report.features()


def test_megatrons_default_configuration_is_overlapped() -> None:
    for features in run_ranks(_default_config, 2):
        rows = [row for row in features if row[0] == "overlapped MoE layer"]
        assert rows == [("overlapped MoE layer", True, "rounds, 2 expert-parallel ranks", 2)]
