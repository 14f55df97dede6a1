"""The model builders of mcore-bridge (ms-swift's), of Megatron-Bridge and of verl, where they are
installed, on two gloo ranks: with the package and without. They name Transformer Engine, which
needs a GPU: empty classes take the place of its own, and Megatron's local layer spec of its spec.
"""

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

_PARTS = ("", ".pytorch", *(f".pytorch.{name}" for name in ("attention", "distributed", "ops")))
_PARTS += (".pytorch.float8_tensor",)
LOCAL = {
    "transformer_impl": "local", "moe_grouped_gemm": False, "use_cpu_initialization": True,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
    "perform_initialization": True,
}  # fmt: skip
SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64,
    "num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2, "vocab_size": 64,
    "seq_length": 16, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "add_bias_linear": False, "gated_linear_unit": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall", "share_embeddings_and_output_weights": False,
}  # fmt: skip


def _name_transformer_engine() -> None:
    """Let `import transformer_engine` find modules of empty classes, after Megatron has looked."""
    from megatron.core.extensions import transformer_engine as extension

    def empty(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})

    for part in _PARTS:
        module: Any = types.ModuleType(f"transformer_engine{part}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__, module.__version__, module.__getattr__ = [], "2.9.0", empty
        sys.modules[module.__name__] = module
        if part:
            above, _, name = module.__name__.rpartition(".")
            setattr(sys.modules[above], name, module)
    for name, value in list(vars(extension).items()):
        if name.startswith("TE") and not isinstance(value, type):
            setattr(extension, name, empty(name))


def _of_mcore_bridge(rank: int, world_size: int) -> Any:
    _name_transformer_engine()
    from mcore_bridge import ModelConfig, hf_to_mcore_config
    from mcore_bridge.model import register
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import Qwen3MoeConfig

    from tests.frameworks.stand_ins import MODEL

    def local_spec(config: Any, use_transformer_engine: bool, **rest: Any) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, **rest)

    register.get_gpt_decoder_block_spec = local_spec
    settings = hf_to_mcore_config(Qwen3MoeConfig(**MODEL)) | LOCAL
    settings |= {"params_dtype": torch.float32, "expert_model_parallel_size": world_size}
    (model,) = register.get_mcore_model(ModelConfig(**settings))
    return model


def _of_megatron_bridge(rank: int, world_size: int) -> Any:
    _name_transformer_engine()
    from megatron.bridge.models import gpt_provider
    from megatron.core.process_groups_config import ProcessGroupCollection

    spec = {"transformer_layer_spec": gpt_provider.local_layer_spec, "activation_func": F.silu}
    settings = {**SIZES, **LOCAL, **spec, "expert_model_parallel_size": world_size}
    provider = gpt_provider.GPTModelProvider(**settings)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(pre_process=True, post_process=True)


def _of_verl(rank: int, world_size: int, replay: bool = False) -> Any:
    """replay: of a rollout's experts."""
    from transformers import Qwen3MoeConfig
    from verl.models.mcore import model_initializer, registry
    from verl.utils.megatron import router_replay_patch as verls

    from tests.frameworks.stand_ins import MODEL

    if replay:
        verls.apply_router_replay_patch()
    real = model_initializer.get_gpt_decoder_block_spec

    def local_spec(config: Any, use_transformer_engine: bool, **rest: Any) -> Any:
        return real(config, use_transformer_engine=False, **rest)

    hf_config = Qwen3MoeConfig(**MODEL)
    settings = LOCAL | {"enable_routing_replay": True} if replay else LOCAL
    config = registry.hf_to_mcore_config(hf_config, torch.float32, **settings)
    assert config.variable_seq_lengths
    if replay:
        config.enable_routing_replay = True
    with mock.patch.object(model_initializer, "get_gpt_decoder_block_spec", local_spec):
        model = registry.init_mcore_model(config, hf_config, freeze_moe_router=False)
    if replay:
        chosen = torch.rand(16, 4, generator=torch.Generator().manual_seed(rank)).topk(2).indices
        verls.RouterReplay.set_replay_data([chosen] * len(verls.RouterReplay.router_instances))
        verls.RouterReplay.set_global_router_replay_action(verls.RouterReplayAction.REPLAY_FORWARD)
    return model


BUILDERS: dict[str, tuple[str, Callable[[int, int], Any]]] = {
    "mcore-bridge": ("mcore_bridge", _of_mcore_bridge),
    "Megatron-Bridge": ("megatron.bridge", _of_megatron_bridge),
    "verl": ("verl", _of_verl),
    "verl, replayed": ("verl", functools.partial(_of_verl, replay=True)),
}


def _built(rank: int, world_size: int, builder: str) -> dict[str, Any]:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid.patches.moe import layer as seam
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on) as calls:
            tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            torch.manual_seed(1)
            model = BUILDERS[builder][1](rank, world_size)
            tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
            mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
            output = model(tokens, torch.arange(8).expand(2, -1), mask)
            output.square().mean().backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found[f"{on}"] = {"output": output.detach(), **grads}
            found["calls"] = len(calls)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    found["backends"] = [seam.backend_of(layer) for layer in layers]
    return found


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_model_that_a_framework_builds_gives_megatrons_results(builder: str) -> None:
    package, _ = BUILDERS[builder]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for found in run_ranks(_built, 2, builder):
        assert found["backends"] == [("rounds", None)] * 2
        assert found["calls"] == 2
        torch.testing.assert_close(found["True"], found["False"], rtol=1e-4, atol=1e-6)
