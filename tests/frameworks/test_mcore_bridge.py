"""mcore-bridge's own model builder (ms-swift's), where it is installed, on two gloo ranks: with the
package and without.

It cannot be imported without Transformer Engine, which needs a GPU: empty classes take the place of
those that it names, and Megatron's local layer spec that of its own.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")
if importlib.util.find_spec("mcore_bridge") is None:
    pytest.skip("mcore_bridge is not installed", allow_module_level=True)

_MODULES = ("", ".pytorch", ".pytorch.attention", ".pytorch.distributed", ".pytorch.float8_tensor")
LOCAL = {
    "transformer_impl": "local", "moe_grouped_gemm": False, "use_cpu_initialization": True,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
    "perform_initialization": True,
}  # fmt: skip


def _name_transformer_engine() -> None:
    """Let `import transformer_engine` find modules of empty classes, after Megatron has looked."""
    from megatron.core.extensions import transformer_engine as extension

    def empty(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})

    for part in _MODULES:
        module: Any = types.ModuleType(f"transformer_engine{part}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__, module.__version__, module.__getattr__ = [], "2.9.0", empty
        sys.modules[module.__name__] = module
    for name, value in list(vars(extension).items()):
        if name.startswith("TE") and not isinstance(value, type):
            setattr(extension, name, empty(name))


def _built(rank: int, world_size: int) -> dict[str, Any]:
    _name_transformer_engine()
    from mcore_bridge import ModelConfig, hf_to_mcore_config
    from mcore_bridge.model import register
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from transformers import Qwen3MoeConfig

    from megatron_fluid.patches.moe import layer as seam
    from tests.frameworks.stand_ins import MODEL
    from tests.support import tiny_gpt

    stock = register.get_gpt_decoder_block_spec
    register.get_gpt_decoder_block_spec = lambda config, use_transformer_engine, **rest: stock(
        config, use_transformer_engine=False, **rest
    )
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    settings = hf_to_mcore_config(Qwen3MoeConfig(**MODEL)) | LOCAL
    settings |= {"params_dtype": torch.float32, "expert_model_parallel_size": world_size}
    found: dict[str, Any] = {}
    for on in (False, True):
        with tiny_gpt.plug_in(on) as calls:
            tensor_parallel.random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            torch.manual_seed(1)
            (model,) = register.get_mcore_model(ModelConfig(**settings))
            tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
            mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
            output = model(tokens, torch.arange(8).expand(2, -1), mask)
            output.square().mean().backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found[f"{on}"] = {"output": output.detach(), **grads}
            found["calls"] = len(calls)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    found["backends"] = [seam.backend_of(layer) for layer in layers]
    found["routers"] = {type(layer.router).__module__ for layer in layers}
    return found


def test_a_model_that_mcore_bridge_builds_gives_megatrons_results() -> None:
    for found in run_ranks(_built, 2, timeout_s=300):
        assert found["backends"] == [("rounds", None)] * 2
        assert found["routers"] == {"mcore_bridge.model.modules.topk_router"}
        assert found["calls"] == 2
        for name, value in found["False"].items():
            torch.testing.assert_close(found["True"][name], value, rtol=1e-4, atol=1e-6, msg=name)
