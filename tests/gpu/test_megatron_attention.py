"""Megatron's attention with the plug-in on GPUs, against the exchanged core attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from benchmarks.cases.attention import (
    AttentionCase,
    MegatronAttention,
    megatron_attention,
    start_megatron,
)
from megatron_fluid.attention.exchange import symmetric
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]
WORLD = max(min(RANKS, 4), 1)


@dataclasses.dataclass(frozen=True)
class MegatronCase:
    """Megatron's SelfAttention: of Transformer Engine's spec in bf16, or of the local one in
    float32."""

    te: bool
    kv_heads: int = 8
    norms: bool = False
    interleaved: bool = False
    bias: bool = False
    fused: bool = False
    recompute: bool = False
    deferred: bool = False
    engine: bool = False  # copy engines and several head groups, as for long sequences


MEGATRON_CASES = [
    MegatronCase(te=False, norms=True, bias=True),
    MegatronCase(te=False, kv_heads=1, interleaved=True),
    MegatronCase(te=False, kv_heads=16, engine=True, recompute=True, norms=True),
    MegatronCase(te=False, engine=True, deferred=True),
    MegatronCase(te=True, norms=True, bias=True),
    MegatronCase(te=True, kv_heads=1),
    MegatronCase(te=True, kv_heads=16, engine=True, fused=True),
    MegatronCase(te=True, engine=True, recompute=True, norms=True),
    MegatronCase(te=True, fused=True, deferred=True, bias=True),
]


def _steps(
    module: MegatronAttention, case: MegatronCase, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and every gradient of two microbatches, with gradients in main_grad where the case
    fuses them."""
    from megatron.core.tensor_parallel.random import checkpoint

    if case.fused:
        for linear in (module.module.linear_qkv, module.module.linear_proj):
            linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
            linear.weight.grad_added_to_main_grad = False
    found = {}
    for microbatch in range(2):
        mine = (x * (1 + microbatch)).requires_grad_()
        y = checkpoint(module, False, mine) if case.recompute else module(mine)
        y.backward(y.detach() + x)
        assert mine.grad is not None
        found |= {f"y {microbatch}": y.detach(), f"dx {microbatch}": mine.grad}
    for name, parameter in module.named_parameters():
        fused = getattr(parameter, "grad_added_to_main_grad", False)
        assert fused == (
            case.fused and name in ("module.linear_qkv.weight", "module.linear_proj.weight")
        ), name
        gradient = parameter.main_grad if fused else parameter.grad
        if gradient is not None:
            found[name] = gradient
    return found


def _overlapped_megatron(rank: int, world: int, cases: list[MegatronCase]) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_fluid import patches
    from megatron_fluid.backward.weight_grads import get_backward_scheduler
    from megatron_fluid.patches.attention.self_attention import overlapped

    patches.apply_all()
    device, limit = torch.device("cuda", torch.cuda.current_device()), symmetric._COPY_ENGINE_BYTES
    reason = start_megatron(te=cases[0].te, context_parallel_size=world)
    assert reason is None, reason
    for case in cases:
        symmetric._COPY_ENGINE_BYTES = 1 << 10 if case.engine else limit
        shape = AttentionCase(256, 16, case.kv_heads, 128 * world, 64)
        dtype = torch.bfloat16 if case.te else torch.float32
        rotations = RotaryEmbedding(64, 0.5 if case.norms else 1.0, case.interleaved)(shape.length)
        assert len(rotations) == 128
        results = []
        modules: list[MegatronAttention] = []
        for overlap in (False, True):
            module = megatron_attention(
                shape,
                device,
                "nvlink",
                case.te,
                overlap,
                dtype,
                rotations,
                qk_layernorm=case.norms,
                rotary_interleaved=case.interleaved,
                add_bias_linear=case.bias,
                gradient_accumulation_fusion=case.te and case.fused,
            )
            assert overlapped(module.module) == ("nvlink" if overlap else None)
            if modules:
                module.load_state_dict(modules[0].state_dict())
            else:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.05)
                        dist.broadcast(parameter, 0)
            modules.append(module)
            x = torch.randn(
                128,
                2,
                256,
                device=device,
                dtype=dtype,
                generator=torch.Generator(device).manual_seed(rank),
            )
            get_backward_scheduler().enabled = case.deferred and overlap
            results.append(_steps(module, case, x))
            get_backward_scheduler().disable()
        assert results[0].keys() == results[1].keys() and len(results[0]) >= 7
        for name, theirs in results[0].items():
            expected, found = theirs.double(), results[1][name].double()
            if name[:2] not in (
                "y ",
                "dx",
            ):  # a rank's share is of its rows, of norms of queries and keys of its heads
                dist.all_reduce(expected)
                dist.all_reduce(found)
            error = (found - expected).norm() / expected.norm()
            assert error < (2e-2 if case.te else 1e-4), f"{case} {name}: {error:.2e}"
    symmetric._COPY_ENGINE_BYTES = limit


@pytest.mark.skipif(GPUS < WORLD or WORLD < 2, reason="needs 2 GPUs, one for each rank")
@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
def test_megatrons_projections_beside_the_exchanges_change_nothing(te: bool) -> None:
    pytest.importorskip("megatron.core")
    if te:
        pytest.importorskip("transformer_engine.pytorch")
    cases = [case for case in MEGATRON_CASES if case.te == te]
    run_ranks(_overlapped_megatron, WORLD, cases, backend="nccl", timeout_s=240)
