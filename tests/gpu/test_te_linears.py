"""Transformer Engine's real linears through Megatron's wrappers, with and without the overlap:
outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_ranks
from tests.support.machine import GPUS

pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine.pytorch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs at least 2 GPUs of one host, found {GPUS}"),
]

SEQUENCE, BATCH, HIDDEN, FFN = 512, 2, 512, 1024


def _build(kind: str, bias: bool, skip_bias_add: bool) -> Any:
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        ffn_hidden_size=FFN,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=True,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        add_bias_linear=bias,
    )
    common: dict[str, Any] = {
        "config": config, "init_method": config.init_method, "bias": bias,
        "skip_bias_add": skip_bias_add, "is_expert": False,
    }  # fmt: skip
    if kind == "row":
        return te.TERowParallelLinear(FFN, HIDDEN, input_is_parallel=True, **common)
    cls = te.TEColumnParallelLinear if kind == "column" else te.TELayerNormColumnParallelLinear
    return cls(HIDDEN, FFN, gather_output=False, **common)


def _parity(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_fluid import close_group, patches
    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.patches import linears

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    names = ("te-linear", "te-layer-norm-linear")
    patches.revert(*names)
    calls: list[str] = []
    real = linears.all_gather_matmul, linears.matmul_reduce_scatter
    linears.all_gather_matmul = lambda *a, **k: (calls.append("ag"), real[0](*a, **k))[1]  # type: ignore[assignment]
    linears.matmul_reduce_scatter = lambda *a, **k: (calls.append("rs"), real[1](*a, **k))[1]  # type: ignore[assignment]
    for kind in ("column", "norm", "row"):
        for bias, skip in ((False, False), (True, False), (True, True)):
            layer = _build(kind, bias, skip).cuda()
            rows, width = (SEQUENCE, FFN // ranks) if kind == "row" else (SEQUENCE // ranks, HIDDEN)
            x = torch.randn(rows, BATCH, width, device="cuda", dtype=torch.bfloat16)
            grad, found = None, []
            for served in (False, True):
                set_config(FluidConfig(tp_overlap="on" if served else "off"))
                before = len(calls)
                with patches.patched(*names):
                    inp = x.clone().requires_grad_()
                    out, returned = layer(inp)
                    grad = torch.randn_like(out) if grad is None else grad
                    out.backward(grad)
                assert (len(calls) > before) == served, (
                    f"{kind}: served {served}, calls {calls[before:]}"
                )
                assert (returned is None) == (not skip)
                grads = {
                    n: p.grad.float() for n, p in layer.named_parameters() if p.grad is not None
                }
                found.append({"out": out.float(), "dx": inp.grad.float(), **grads})
                layer.zero_grad(set_to_none=True)
            assert found[0].keys() == found[1].keys(), (found[0].keys(), found[1].keys())
            for name, own in found[0].items():
                error = (found[1][name] - own).norm() / own.norm()
                assert error < 1e-2, (
                    f"{kind} bias {bias} skip {skip}: {name} differs by {error:.1e}"
                )
    group = parallel_state.get_tensor_model_parallel_group()
    close_group(group)


def test_outputs_and_gradients_equal_transformer_engines() -> None:
    run_ranks(_parity, min(GPUS, 4), backend="nccl", timeout_s=200)
