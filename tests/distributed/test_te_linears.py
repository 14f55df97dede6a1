"""The overlap of Transformer Engine's linears, on stand-ins with what the patch reads; real ones: tests/gpu/test_te_linears.py.

A stand-in's own forward marks itself, so that what the patch leaves alone is seen to reach it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fluid.config import FluidConfig, set_config
from tests.launch import run_ranks

pytest.importorskip("megatron.core")

S, B, H, OUT = 8, 2, 6, 10  # the whole sequence, batch, hidden, outputs


class _Linear(nn.Module):
    """What Megatron's TELinear and TELayerNormColumnParallelLinear hold, by Transformer Engine 2.20's names."""

    def __init__(self, mode: str | None, group: dist.ProcessGroup, **changes: Any) -> None:
        super().__init__()
        ranks, self._tp_group, self.parallel_mode = group.size(), group, mode
        shape = (OUT // ranks, H) if mode == "column" else (OUT, H // ranks)
        generator = torch.Generator().manual_seed(group.rank())
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))
        self.bias = nn.Parameter(torch.arange(shape[0], dtype=torch.float32))
        self.layer_norm_weight = nn.Parameter(torch.linspace(0.5, 1.5, H))
        self.layer_norm_bias = nn.Parameter(torch.linspace(-1, 1, H))
        self.config = SimpleNamespace(
            tp_comm_overlap=False, fp8=None, fp4=None, delay_wgrad_compute=False, _cpu_offloading_context=None
        )
        fields = {
            "sequence_parallel": True, "te_quant_params": None, "use_bias": True, "te_return_bias": False, "eps": 1e-5,
            "normalization": "RMSNorm", "zero_centered_gamma": False, "fuse_wgrad_accumulation": False,
            "return_layernorm_output": False, "is_first_microbatch": True, "symmetric_ar_type": None,
        }  # fmt: skip
        for name, value in {**fields, **changes}.items():
            setattr(self.config if hasattr(self.config, name) else self, name, value)


def _own(self: Any, x: Tensor) -> tuple[str, None]:
    return "own", None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _served(rank: int, ranks: int) -> None:
    from megatron_fluid.patches import te_linears

    set_config(FluidConfig(tp_overlap="on"))
    group = dist.group.WORLD
    assert group is not None
    linear, norm_linear = te_linears.linear_forward(_own), te_linears.layer_norm_column_forward(_own)
    x = torch.randn(S // ranks, B, H, generator=torch.Generator().manual_seed(50 + rank))
    whole = _gathered(x, group)

    column = _Linear("column", group)
    out, bias = linear(column, x.requires_grad_())
    torch.testing.assert_close(out, whole @ column.weight.t() + column.bias)
    assert bias is None and column.is_first_microbatch is False
    out.sum().backward()
    assert column.weight.grad is not None and x.grad is not None
    torch.testing.assert_close(column.weight.grad, whole.sum((0, 1)).expand_as(column.weight))
    x.grad = None

    for normalization, centered in (("RMSNorm", False), ("RMSNorm", True), ("LayerNorm", False), ("LayerNorm", True)):
        layer = _Linear("column", group, normalization=normalization, zero_centered_gamma=centered, te_return_bias=True)
        gamma = layer.layer_norm_weight + (1 if centered else 0)
        if normalization == "RMSNorm":
            normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + layer.eps) * gamma
        else:
            normed = F.layer_norm(whole, (H,), gamma, layer.layer_norm_bias, layer.eps)
        out, bias = norm_linear(layer, x)
        torch.testing.assert_close(out, normed @ layer.weight.t())
        assert bias is layer.bias
        out.square().sum().backward()
        assert layer.layer_norm_weight.grad is not None and layer.layer_norm_weight.grad.abs().sum() > 0

    row = _Linear("row", group)
    part = torch.randn(S, B, H // ranks, generator=torch.Generator().manual_seed(70 + rank))
    out, bias = linear(row, part)
    total = part.detach() @ row.weight.detach().t()
    dist.all_reduce(total)
    torch.testing.assert_close(out, total[rank * S // ranks : (rank + 1) * S // ranks] + row.bias)
    assert bias is None

    fused = _Linear("column", group, fuse_wgrad_accumulation=True, use_bias=False)
    fused.weight.main_grad = torch.ones_like(fused.weight)  # type: ignore[attr-defined]
    out, _ = linear(fused, x)
    out.sum().backward()
    torch.testing.assert_close(fused.weight.main_grad, 1 + whole.sum((0, 1)).expand_as(fused.weight))
    assert fused.weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_columns_rows_and_norms_are_served_with_their_gradients() -> None:
    run_ranks(_served, 2)


LEFT_ALONE: dict[str, dict[str, Any]] = {
    "Transformer Engine's own overlap": {"tp_comm_overlap": True},
    "quantised precision": {"fp8": "hybrid"},
    "later": {"delay_wgrad_compute": True},
    "offloaded": {"_cpu_offloading_context": object()},
    "another way": {"symmetric_ar_type": "two_shot"},
    "": {"sequence_parallel": False},
}


def _left(rank: int, ranks: int) -> list[str]:
    from megatron_fluid.patches import startup, te_linears

    set_config(FluidConfig(tp_overlap="on"))
    group = dist.group.WORLD
    assert group is not None
    x = torch.randn(S // ranks, B, H)
    forwards = te_linears.linear_forward(_own), te_linears.layer_norm_column_forward(_own)
    for changes in LEFT_ALONE.values():
        for forward in forwards:
            assert forward(_Linear("column", group, **changes), x) == ("own", None), changes
    assert forwards[0](_Linear(None, group), x) == ("own", None)  # experts, and what is duplicated
    assert forwards[0](_Linear("column", group), x.double()) == ("own", None)
    frozen = _Linear("row", group)
    frozen.weight.requires_grad_(False)
    assert forwards[0](frozen, torch.randn(S, B, H // ranks)) == ("own", None)
    set_config(FluidConfig(tp_overlap="auto"))
    assert forwards[0](_Linear("column", group), x) == ("own", None)  # nothing is faster on gloo
    set_config(FluidConfig(tp_overlap="off"))
    assert forwards[0](_Linear("column", group), x) == ("own", None)
    return [reason for _, on, reason, _ in startup.features() if not on]


def test_what_is_left_to_transformer_engine_is_told_with_the_reason() -> None:
    for reasons in run_ranks(_left, 2):
        for part in (*filter(None, LEFT_ALONE), "frozen", "its input is torch.float64", "nothing faster than NCCL"):
            assert any(part in reason for reason in reasons), (part, reasons)
