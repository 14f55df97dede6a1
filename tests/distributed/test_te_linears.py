"""The overlap of Transformer Engine's linears, on stand-ins with what the patch reads; real ones:
tests/gpu/test_te_linears.py.

A stand-in's own forward marks itself, so that what the patch leaves alone is seen to reach it.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches import linears
from megatron_fluid.patches import startup_report as startup
from tests.support.launch import on_ranks, world_group
from tests.support.te_attention import normed
from tests.support.whole_linear import whole_linear

S, B, H, OUT = 8, 2, 6, 10  # the whole sequence, batch, hidden, outputs


class _Linear(nn.Module):
    """What TELinear and TELayerNormColumnParallelLinear hold, as Transformer Engine 2.20."""

    def __init__(self, mode: str | None, group: dist.ProcessGroup, **changes: Any) -> None:
        super().__init__()
        ranks, self._tp_group, self.parallel_mode = group.size(), group, mode
        shape = (OUT // ranks, H) if mode == "column" else (OUT, H // ranks)
        generator = torch.Generator().manual_seed(group.rank())
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))
        self.bias = nn.Parameter(torch.arange(shape[0], dtype=torch.float32))
        self.layer_norm_weight = nn.Parameter(torch.linspace(0.5, 1.5, H))
        self.layer_norm_bias = nn.Parameter(torch.linspace(-1, 1, H))
        self.config = SimpleNamespace(fp8=None, fp4=None, _cpu_offloading_context=None)
        for name in ("tp_comm_overlap", "delay_wgrad_compute", "batch_invariant_mode"):
            setattr(self.config, name, False)
        self.sequence_parallel = self.use_bias = self.is_first_microbatch = True
        self.te_return_bias = self.zero_centered_gamma = self.fuse_wgrad_accumulation = False
        self.te_quant_params = self.symmetric_ar_type = None
        self.eps, self.normalization, self.return_layernorm_output = 1e-5, "RMSNorm", False
        for name, value in changes.items():
            setattr(self.config if hasattr(self.config, name) else self, name, value)


# As classes from elsewhere are not served.
_Linear.__module__ = "megatron.core.extensions.transformer_engine"


class _Quantiser:
    """What ModelOpt puts before the class of a linear that it quantises."""


def _own(self: Any, x: Tensor) -> tuple[str, None]:
    return "own", None


LAYER_NORM = {"normalization": "LayerNorm"}
# mode, whether a norm comes first, changes
SERVED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "column": ("column", False, {}), "column without bias": ("column", False, {"use_bias": False}),
    "column, bias returned": ("column", False, {"te_return_bias": True}),
    "column, fused": ("column", False, {"fuse_wgrad_accumulation": True}),
    "RMSNorm": ("column", True, {}),
    "RMSNorm, centered": ("column", True, {"zero_centered_gamma": True, "te_return_bias": True}),
    "LayerNorm": ("column", True, LAYER_NORM | {"use_bias": False}),
    "LayerNorm, centered": ("column", True, LAYER_NORM | {"zero_centered_gamma": True}),
    "LayerNorm, fused": ("column", True, LAYER_NORM | {"fuse_wgrad_accumulation": True}),
    "row": ("row", False, {}), "row without bias": ("row", False, {"use_bias": False}),
    "row, bias returned": ("row", False, {"te_return_bias": True}),
    "row, fused": ("row", False, {"fuse_wgrad_accumulation": True}),
}  # fmt: skip


@on_ranks(2)
def test_columns_rows_and_norms_are_served_with_every_gradient(rank: int, ranks: int) -> None:
    set_config(FluidConfig(tp_overlap="on"))
    group = world_group()
    for case, (mode, has_norm, changes) in SERVED.items():
        linear = _Linear(mode, group, **changes)
        generator = torch.Generator().manual_seed(50 + rank)
        shape = (S // ranks, B, H) if mode == "column" else (S, B, H // ranks)
        x = torch.randn(shape, generator=generator).requires_grad_()
        if linear.fuse_wgrad_accumulation:
            linear.weight.main_grad = torch.ones_like(linear.weight)  # type: ignore[attr-defined]
            linear.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        forward = linears.te_layer_norm_column_forward if has_norm else linears.te_linear_forward
        out, bias = forward(_own)(linear, x)
        upstream = torch.randn(out.shape, generator=generator)
        out.backward(upstream)
        assert bias is (linear.bias if linear.te_return_bias else None), case
        assert linear.is_first_microbatch is False, case

        tensors = {"x": x, "weight": linear.weight}
        if linear.use_bias and not linear.te_return_bias:
            tensors["bias"] = linear.bias
        if has_norm:
            tensors["gamma"] = linear.layer_norm_weight
            if linear.normalization == "LayerNorm":
                tensors["beta"] = linear.layer_norm_bias
        norm = functools.partial(normed, eps=linear.eps, centered=linear.zero_centered_gamma)
        expected = whole_linear(mode, group, tensors, upstream, norm if has_norm else None)
        found = {"out": out.detach(), **{name: tensor.grad for name, tensor in tensors.items()}}
        if linear.fuse_wgrad_accumulation:
            assert linear.weight.grad_added_to_main_grad, case  # type: ignore[attr-defined]
            found["weight"] = linear.weight.main_grad - 1  # type: ignore[attr-defined]
        for name, value in expected.items():
            assert found[name] is not None, f"{case}: {name} has no gradient"
            told = functools.partial("{}: {}: {}".format, case, name)
            torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=2e-5, msg=told)
        used = {id(tensor) for tensor in tensors.values()}
        for name, parameter in linear.named_parameters():
            assert id(parameter) in used or parameter.grad is None, f"{case}: {name} has a gradient"


# Settings, and what is told of them.
LEFT_ALONE: dict[str, dict[str, Any]] = {
    "Transformer Engine's own overlap": {"tp_comm_overlap": True},
    "quantised precision": {"fp8": "hybrid"},
    "--batch-invariant-mode": {"batch_invariant_mode": True},
    "later": {"delay_wgrad_compute": True}, "offloaded": {"_cpu_offloading_context": object()},
    "another way": {"symmetric_ar_type": "two_shot"}, "": {"sequence_parallel": False},
}  # fmt: skip
TOLD = (
    *("frozen", "its input is torch.float64", "nothing faster than NCCL", "2 dimensions"),
    *("output of its norm", f"its class comes from {__name__}"),
)


@on_ranks(2)
def test_what_is_left_to_transformer_engine_is_told_with_the_reason(rank: int, ranks: int) -> None:
    set_config(FluidConfig(tp_overlap="on"))
    group = world_group()
    x = torch.randn(S // ranks, B, H)
    forwards = linears.te_linear_forward(_own), linears.te_layer_norm_column_forward(_own)
    quantised = type("QuantTELinear", (_Quantiser, _Linear), {"__module__": _Linear.__module__})
    for forward in forwards:
        assert forward(quantised("column", group), x) == ("own", None)
        for changes in LEFT_ALONE.values():
            assert forward(_Linear("column", group, **changes), x) == ("own", None), changes
    assert forwards[0](_Linear(None, group), x) == ("own", None)  # experts, and what is duplicated
    assert forwards[0](_Linear("column", group), x.double()) == ("own", None)
    assert forwards[0](_Linear("column", group), x[0]) == ("own", None)
    assert forwards[1](_Linear("column", group, return_layernorm_output=True), x) == ("own", None)
    frozen = _Linear("row", group)
    frozen.weight.requires_grad_(False)
    assert forwards[0](frozen, torch.randn(S, B, H // ranks)) == ("own", None)
    for overlap in ("auto", "off"):  # nothing is faster on gloo
        set_config(FluidConfig(tp_overlap=overlap))
        assert forwards[0](_Linear("column", group), x) == ("own", None)
    reasons = [reason for _, on, reason, _ in startup.features() if not on]
    for part in (*filter(None, LEFT_ALONE), *TOLD):
        assert any(part in reason for reason in reasons), (part, reasons)
