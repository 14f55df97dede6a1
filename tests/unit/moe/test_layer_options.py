"""What MoELayer's settings switch on: bounded mode, recomputation, the fused router. On one
simulated NVLink rank, under the interpreter where there is no GPU."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.errors import FluidError
from megatron_fluid.moe.backends import BACKENDS
from megatron_fluid.moe.layer import MoEBaseline, MoELayer
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.room import graph_room
from megatron_fluid.moe.router import TopKRouter, route
from tests.support.launch import on_ranks
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = NEEDS_INTERPRETER

CONFIG: dict[str, Any] = {
    "hidden_size": 16, "ffn_hidden_size": 8, "num_experts": 4, "top_k": 2, "init_std": 0.4,
}  # fmt: skip
TOKENS = 6


def nvlink_layer(**options: Any) -> MoELayer:
    layer = MoELayer({**CONFIG, **options}, dist.group.WORLD)
    layer._backend = backend = BACKENDS["nvlink"](layer.shape(), layer.rounds)
    space = SimulatedWorkspace(1).rank(0)
    backend.buffers = NvlinkBuffers(space, TOKENS, 16, 2, 4, torch.float32)  # type: ignore[attr-defined]
    return layer


def gradients(layer: MoELayer) -> list[Tensor]:
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@on_ranks(1)
def test_a_layer_whose_row_counts_the_host_reads_is_not_captured(rank: int, world: int) -> None:
    x = torch.randn(TOKENS, 16)
    layers = [
        nvlink_layer(graph=True),
        *(
            kind({**CONFIG, "backend": "rounds"}, dist.group.WORLD)
            for kind in (MoELayer, MoEBaseline)
        ),
    ]
    captures = dict.fromkeys(("is_initialized", "is_current_stream_capturing"), lambda: True)
    with mock.patch.multiple(torch.cuda, **captures):
        for layer in layers:
            with pytest.raises(FluidError, match=r"CUDA graph .* inside graph_room\(\)"):
                layer(x)


@on_ranks(1)
def test_bounded_mode_and_recomputation_of_a_layer(rank: int, world: int) -> None:
    expected = gradients(MoELayer({**CONFIG, "backend": "rounds"}, dist.group.WORLD))
    for options in (
        {"capacity_factor": 2.0},
        {"recompute": ("rows", "hidden")},
        {"recompute": ("hidden",), "capacity_factor": 1.0},
    ):
        torch.testing.assert_close(
            gradients(nvlink_layer(**options)), expected, rtol=1e-4, atol=1e-5
        )
    tight = nvlink_layer(capacity_factor=0.25)
    assert all(value.isfinite().all() for value in gradients(tight))
    with pytest.raises(FluidError, match="more than the capacity"):
        gradients(tight)
    tight.check_overflow()  # it is reported once

    graphed = nvlink_layer(graph=True)
    eager = gradients(graphed)
    with graph_room(), mock.patch("megatron_fluid.moe.room._LEAST", 1):
        torch.testing.assert_close(gradients(graphed), eager, rtol=1e-4, atol=1e-5)
        graphed.check_overflow()
        graphed._backend.shape.captured.most = 4  # type: ignore[union-attr]
        gradients(graphed)
    with pytest.raises(FluidError, match="again outside of graph_room"):
        graphed.check_overflow()
    gradients(graphed)  # outside there is room for all


def test_the_setting_of_recomputation() -> None:
    found = [moe_recompute(FluidConfig(moe_recompute=s)) for s in ("none", "rows", "both")]
    assert found == [(), ("rows",), ("rows", "hidden")]


@pytest.mark.parametrize("deferred", [False, True])
def test_the_fused_router_equals_the_plain_one(deferred: bool) -> None:
    router = TopKRouter(16, 8, 3, scaling=2.0)
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grad = torch.randn(9, 3, generator=torch.Generator().manual_seed(3))
    plain = route(x @ router.weight.t(), 3, scaling=2.0)
    expected = torch.autograd.grad(plain.probs, [x, router.weight], grad)
    scheduler = get_backward_scheduler()
    if deferred:
        scheduler.enable()
    try:
        found = router._fused(x, with_scores=True)
        found.probs.backward(grad)
    finally:
        scheduler.disable()
    assert torch.equal(found.ids.long(), plain.ids) and found.scores is not None
    torch.testing.assert_close(found.probs, plain.probs)
    torch.testing.assert_close(found.scores, plain.scores)
    torch.testing.assert_close([x.grad, router.weight.grad], list(expected), rtol=1e-4, atol=1e-5)
