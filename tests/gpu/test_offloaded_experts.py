"""Megatron's fine-grained activation offloading of experts that are ours, on a GPU: a GPT of
Transformer Engine's modules has the bits that it has without, and takes less memory by as much."""

import gc
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import run_ranks
from tests.support.machine import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
]
SEQUENCE, BATCH, STEPS = 512, 2, 3
MODEL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 2048, "moe_ffn_hidden_size": 2048,
    "transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "bf16": True,
    "params_dtype": torch.bfloat16, "add_bias_linear": True, "gated_linear_unit": False,
    "activation_func": F.gelu, "recompute_granularity": "selective",
    "recompute_modules": ["layernorm", "moe_act"],
}  # fmt: skip
# In a fused layer, and behind Megatron's dispatcher.
BACKENDS = ("local", "experts")
MODULES = (
    ["expert_fc1"], ["moe_act"], ["expert_fc1", "moe_act"], ["core_attn", "expert_fc1", "moe_act"],
)  # fmt: skip


def _steps(modules: Sequence[str], backend: str) -> dict[str, Any]:
    """Losses and gradients of every step, without an optimizer; bytes at the peak of the last one,
    and offloaded."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Offloading,
    )
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )
    from megatron.core.transformer.enums import AttnBackend

    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    settings = {**MODEL, "attention_backend": AttnBackend.unfused}
    if modules:
        settings |= {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}
        settings |= {"min_offloaded_tensor_size": 1024}
    generator = torch.Generator().manual_seed(7)
    size = BATCH, SEQUENCE
    tokens = torch.randint(0, tiny_gpt.VOCABULARY, size, generator=generator).cuda()
    positions = torch.arange(SEQUENCE, device="cuda").expand(*size)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    Offloading.reset_instance()
    with tiny_gpt.plug_in(True, moe_backend=backend) as fused:
        model = tiny_gpt.gpt(tiny_gpt.config_of(**settings))
        for _ in range(STEPS):
            Offloading.reset()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss = model(tokens, positions, mask, labels=(tokens * 5 + 1) % 64).float().mean()
            loss.backward()
            torch.cuda.synchronize()
            found["peak"] = torch.cuda.max_memory_allocated()
            found["losses"].append(loss.item())
            named = model.named_parameters()
            found["gradients"].append({k: p.grad.cpu() for k, p in named if p.grad is not None})
        reasons = {moe_layer.experts_reason_of(block.mlp) for block in model.decoder.layers}
        found["ours"] = reasons == {None} and bool(fused) == (backend == "local")
        if modules:
            found["bytes"] = dict(PipelineOffloadManager.get_instance().offload_summary_bytes)
    del model, loss
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _body(rank: int, world: int) -> dict[str, Any]:
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    results: dict[str, Any] = {}
    for backend in BACKENDS:
        plain = _steps([], backend)
        again = _steps([], backend)
        results[backend, "repeatable"] = _differing(again, plain)
        for modules in MODULES:
            found = tiny_gpt.guarded(lambda: _steps(modules, backend))  # noqa: B023 (at once)
            if "error" not in found:
                found["differing"] = _differing(found, plain)
                found["saved"] = again["peak"] - found["peak"]
                del found["gradients"]
            results[backend, "+".join(modules)] = found
    return results


def _differing(found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What has other bits, by step and name."""
    names = [] if found["losses"] == plain["losses"] else ["losses"]
    for step, (mine, theirs) in enumerate(zip(found["gradients"], plain["gradients"], strict=True)):
        assert mine.keys() == theirs.keys() and len(mine) > 10
        names += [f"{step} {k}" for k, v in mine.items() if not torch.equal(v, theirs[k])]
    return names


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    pytest.importorskip("megatron.core")
    (found,) = run_ranks(_body, 1, timeout_s=400, backend="nccl")
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("modules", MODULES, ids="+".join)
def test_offloaded_experts_are_ours_and_have_the_same_bits(
    results: dict[str, Any], backend: str, modules: list[str]
) -> None:
    assert not results[backend, "repeatable"], "the model itself does not repeat its bits"
    found = results[backend, "+".join(modules)]
    assert "error" not in found, found["error"]
    assert found["ours"] and not found["differing"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("modules", MODULES[:-1], ids="+".join)
def test_the_peak_is_lower_by_what_is_offloaded(
    results: dict[str, Any], backend: str, modules: list[str]
) -> None:
    found = results[backend, "+".join(modules)]
    assert "error" not in found, found["error"]
    rows = SEQUENCE * BATCH * 2
    each = {"expert_fc1": 2 * rows * 512, "moe_act": 2 * rows * 2048}
    # The last layer's stay.
    assert found["bytes"] == {name: 3 * each[name] for name in modules}
    offloaded = sum(found["bytes"].values())
    assert 0.6 * offloaded < found["saved"] < 1.2 * offloaded, (found["saved"], offloaded)
