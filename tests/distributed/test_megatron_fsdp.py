"""Models under Megatron-FSDP, whose weights have gradient buffers only for moments: their experts
are left to Megatron by name, and train as without this package."""

import contextlib
import io
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
from megatron.core.extensions import transformer_engine as extension
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fluid.patches.moe import layer as moe_layer
from tests.support import tiny_gpt
from tests.support.launch import on_ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="stands in for Transformer Engine"
)


def _train(on: bool, fused: bool) -> tuple[list[float], list[Any], int]:
    with tiny_gpt.plug_in(on, moe_backend="auto", defer_weight_grads=on) as calls:
        settings = {"gradient_accumulation_fusion": fused, "calculate_per_token_loss": True}
        config = tiny_gpt.config_of(**settings)
        model = tiny_gpt.gpt(config)
        wrapped = adapter.FullyShardedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                use_megatron_fsdp=True,
                data_parallel_sharding_strategy="optim_grads_params",
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                bucket_size=None,
                grad_reduce_in_fp32=False,
            ),
            model,
            fsdp_unit_modules=[TransformerLayer],
            device=torch.device("cpu"),
        )
        length = tiny_gpt.SEQUENCE
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        wrapped.train()
        losses = []
        for iteration in range(2):
            wrapped.zero_grad_buffer()
            tokens, labels, positions = tiny_gpt.batch(torch.distributed.get_rank(), iteration, 0)
            loss = wrapped(tokens, positions, mask, labels=labels).float().mean()
            loss.backward()
            losses.append(loss.item())
        found = [moe_layer.experts_reason_of(m) for m in model.modules() if isinstance(m, MoELayer)]
        return losses, found, len(calls)


def _mesh(data_group: Any, tensor_group: Any, ep_size: int = 1) -> torch.Tensor:
    """As Megatron's own, which wants einops: this rank's part of the ranks, in the order (dp, ep,
    tp)."""
    shape = data_group.size(), ep_size, tensor_group.size()
    meshes = torch.arange(torch.distributed.get_world_size()).view(shape).transpose(0, 1)
    rank = torch.distributed.get_rank()
    return next(mesh for mesh in meshes if rank in mesh.flatten().tolist())


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_experts_under_megatron_fsdp_are_left_to_megatron_by_name(
    rank: int, world_size: int, fused: bool
) -> None:
    adapter.is_te_min_version = lambda *_, **__: True
    adapter._get_dp_tp_mesh = _mesh
    if fused:
        extension.te_general_gemm = None
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        (stock, *_), (losses, reasons, calls) = _train(False, fused), _train(True, fused)
    assert losses == pytest.approx(stock, rel=1e-6)
    assert calls == 0 and len(reasons) == 2
    assert all("Megatron-FSDP" in str(reason) for reason in reasons)
    told = printed.getvalue().count("Megatron's experts: ")
    assert told == (0 if rank else 1), printed.getvalue()
