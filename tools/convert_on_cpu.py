"""Convert a small random Qwen3-MoE by Megatron-Bridge on a CPU, and compare its logits.

    python tools/convert_on_cpu.py

Needs an environment of its own with megatron-core 0.19 and megatron-bridge. Megatron-Bridge imports
Transformer Engine, which has no build for CPUs: a stand-in takes its place in the import, and the
model is made of Megatron's local layers. Its MoE layers are those that megatron_fluid patches.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["main"]

ABSENT = ("transformer_engine", "transformer_engine_torch")
TOLERANCE = 1e-5
MODEL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# Without a GPU, in fp32: what Megatron-Bridge sets for training on GPUs.
ON_CPU: dict[str, Any] = {
    **dict.fromkeys(("apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion"), False),
    **dict.fromkeys(("cross_entropy_loss_fusion", "gradient_accumulation_fusion"), False),
    **dict.fromkeys(("masked_softmax_fusion", "persist_layer_norm", "bf16", "fp16"), False),
    "attention_softmax_in_fp32": True,
    "autocast_dtype": None,
    "params_dtype": torch.float32,
    "transformer_impl": "local",
    "use_cpu_initialization": True,
}


class _AnyClass(type):
    """A class all of whose attributes are classes like it, so that it can be named in code."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (torch.nn.Module,), {})


class _AnyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "2.20.2"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (torch.nn.Module,), {})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _auto_bridge() -> Any:
    """Megatron-Bridge's AutoBridge. Megatron itself is imported first, and finds no Transformer
    Engine."""
    import megatron.core.extensions
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.training  # noqa: F401

    stand_in = _StandIn()
    sys.meta_path.insert(0, stand_in)
    try:
        from megatron.bridge import AutoBridge
    finally:
        sys.meta_path.remove(stand_in)
    return AutoBridge


def main() -> int:
    """Exit status 0 if the logits agree."""
    os.environ.setdefault("MEGATRON_FLUID_CPU", "1")
    import megatron_fluid  # noqa: F401

    AutoBridge = _auto_bridge()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        bridge = AutoBridge.from_hf_pretrained(folder, dtype=torch.float32)
        provider = bridge.to_megatron_provider()
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for name, value in ON_CPU.items():
            setattr(provider, name, value)
        # The norm before attention is one with Transformer Engine's linear there, and a module of
        # its own here, for which Megatron-Bridge has no mapping: it stays 1, as HuggingFace's is.
        provider.transformer_layer_spec = get_gpt_layer_local_spec(
            MODEL["num_experts"], moe_grouped_gemm=True, qk_layernorm=True, normalization="RMSNorm"
        )
        provider.finalize()
        [ours] = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, bf16=False
        )
    ours.eval()
    tokens = torch.randint(0, 256, (1, 64))
    causal = torch.triu(torch.ones(1, 1, 64, 64, dtype=torch.bool), 1)
    with torch.no_grad():
        found = ours(tokens, torch.arange(64)[None], causal).float()[..., :256]
        wanted = theirs(tokens).logits
    difference = (found - wanted).abs().max().item()
    print(f"logits: differ by at most {difference:.1e}, of {wanted.abs().max().item():.2f}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
