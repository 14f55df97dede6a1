"""verl's own model builder, where it is installed, on two gloo ranks: with the package and without.

verl names Transformer Engine in its layer specs, which needs a GPU; the local spec takes its place.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")
pytest.importorskip("verl", reason="verl is not installed")


def _built(rank: int, world_size: int, replay: bool) -> dict[str, Any]:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from transformers import Qwen3MoeConfig
    from verl.models.mcore import model_initializer, registry
    from verl.utils.megatron import router_replay_patch as verls

    from megatron_fluid.patches.moe import layer as seam
    from tests.frameworks.stand_ins import MODEL
    from tests.support import tiny_gpt

    local = functools.partial(model_initializer.get_gpt_decoder_block_spec)
    model_initializer.get_gpt_decoder_block_spec = lambda config, use_transformer_engine, **rest: (
        local(config, use_transformer_engine=False, **rest)
    )
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on) as calls:
            if replay:
                verls.apply_router_replay_patch()
            tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            torch.manual_seed(1)
            hf_config = Qwen3MoeConfig(**MODEL)
            settings = {"moe_grouped_gemm": False, "persist_layer_norm": False}
            settings |= {"use_cpu_initialization": True, "bias_activation_fusion": False}
            settings |= {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
            settings |= {"transformer_impl": "local", "bias_dropout_fusion": False}
            if replay:
                settings["enable_routing_replay"] = True
            config = registry.hf_to_mcore_config(hf_config, torch.float32, **settings)
            if replay:
                config.enable_routing_replay = True
            model = registry.init_mcore_model(config, hf_config, freeze_moe_router=False)
            generator = torch.Generator().manual_seed(rank)
            tokens = torch.randint(0, 64, (2, 8), generator=generator)
            if replay:
                chosen = torch.rand(16, 4, generator=generator).topk(2).indices
                verls.RouterReplay.set_replay_data(
                    [chosen] * len(verls.RouterReplay.router_instances)
                )
                action = verls.RouterReplayAction.REPLAY_FORWARD
                verls.RouterReplay.set_global_router_replay_action(action)
            mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
            output = model(tokens, torch.arange(8).expand(2, -1), mask)
            output.square().mean().backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found[f"{on}"] = {"output": output.detach(), **grads}
            found["calls"] = len(calls)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    found["backends"] = [seam.backend_of(layer) for layer in layers]
    found["lengths vary"] = config.variable_seq_lengths
    return found


@pytest.mark.parametrize("replay", [False, True])
def test_a_model_that_verl_builds_gives_megatrons_results(replay: bool) -> None:
    """With verl's replay of a rollout's experts, too."""
    for found in run_ranks(_built, 2, replay, timeout_s=300):
        assert found["lengths vary"]
        assert found["backends"] == [("rounds", None)] * 2
        assert found["calls"] == 2
        for name, value in found["False"].items():
            torch.testing.assert_close(found["True"][name], value, rtol=1e-4, atol=1e-6, msg=name)
