"""The compact routing against Megatron's dense one, and the NVLink path of a Megatron layer over
it: one rank on a CPU."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.patches.moe import exchange
from megatron_fluid.patches.moe import layer as seam
from megatron_fluid.patches.moe.expert_modules import share_storage
from megatron_fluid.patches.moe.layer import compact_route as route
from megatron_fluid.patches.moe.own_experts import ExpertParameters
from tests.support import tiny_gpt
from tests.support.launch import on_ranks, run_ranks
from tests.support.simulated_workspace import SimulatedWorkspace

EXPERTS, TOP_K, TOKENS = 8, 3, 10
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "no loss": {"moe_router_load_balancing_type": "none"},
    "softmax before, scaled": {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "z-loss, losses of sequences": {
        "moe_z_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "sigmoid, expert bias": BIAS,
    "groups": {**BIAS, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "bf16": {"params_dtype": torch.bfloat16, "bf16": True},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
}


def _layer(settings: dict[str, Any]) -> Any:
    shape = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_router_dtype": "fp32"}
    return tiny_gpt.moe_layer(tiny_gpt.config_of(**{**shape, **settings}))


def _routed(layer: Any, columns: torch.Tensor | None, gradient: torch.Tensor) -> dict[str, Any]:
    """What the NVLink path gets by expert; what `gradient` [T, E] of probabilities becomes."""
    path = seam.OverlappedLayer.__new__(seam.OverlappedLayer)
    path.columns = columns
    path.transports = SimpleNamespace(ascending=False)
    path._indices = None if columns is None else columns.argsort()
    generator = torch.Generator().manual_seed(1)
    hidden = (
        torch.randn(TOKENS // 2, 2, 32, generator=generator)
        .to(layer.config.params_dtype)
        .requires_grad_()
    )
    ids, probs = path.choices(layer, hidden, None)
    expert = ids if columns is None else torch.where(ids < 0, ids, columns[ids.long()])
    found = torch.full((TOKENS, EXPERTS), -1.0).scatter(
        1, expert.long().clamp(min=0), probs.detach()
    )
    (probs * gradient.gather(1, expert.long().clamp(min=0)) * (ids >= 0)).sum().backward()
    result = {
        "probs": found, "dx": hidden.grad, "dw": layer.router.weight.grad, "dtype": probs.dtype,
    }  # fmt: skip
    layer.router.weight.grad = None
    if layer.router.enable_expert_bias:
        result["counts"] = layer.router.local_tokens_per_expert.clone()
        layer.router.local_tokens_per_expert.zero_()
    return {**result, "chosen": (ids >= 0).sum().item()}


def _compare(rank: int, world_size: int) -> dict[str, Any]:
    tiny_gpt.parallel()
    gradient = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2))
    turned = torch.tensor([0, 1, 2, 3, 7, 6, 5, 4])
    patches.revert("moe-router-topk")
    report: dict[str, Any] = {}
    for name, settings in CASES.items():
        layer = _layer(settings)
        dense = _routed(layer, None, gradient)
        with patches.patched("moe-router-topk"):
            report[name] = (dense, _routed(layer, None, gradient), _routed(layer, turned, gradient))
    layer = _layer({})
    with patches.patched("moe-router-topk"):
        hidden = torch.randn(TOKENS, 1, 32)
        with torch.no_grad():
            unlearned = route(layer, hidden, None)
        report["order"] = [*route(layer, hidden, None)[:2], *unlearned[:2]]
    return report


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    (found,) = run_ranks(_compare, 1)
    return found


@pytest.mark.parametrize("name", CASES)
def test_compact_routing_is_megatrons_bit_for_bit(report: dict[str, Any], name: str) -> None:
    dense, *compact = report[name]
    assert dense["probs"].gt(0).any() and dense["dx"].any()
    for found in compact:
        for what in ("probs", "dx", "dw", "counts"):
            assert what not in dense or torch.equal(found[what], dense[what]), what
        assert (found["dtype"], found["chosen"]) == (torch.float32, dense["chosen"])


def test_choices_come_best_first_with_gradients_and_without(report: dict[str, Any]) -> None:
    probs, ids, unlearned_probs, unlearned_ids = report["order"]
    assert torch.equal(ids, unlearned_ids) and torch.equal(probs, unlearned_probs)
    assert probs.diff().le(0).all() and ids.diff().lt(0).any() and ids.diff().gt(0).any()
    assert probs.requires_grad and not unlearned_probs.requires_grad


def test_batch_invariant_choices_have_the_order_of_their_numbers_in_any_storage() -> None:
    """By storage the order would depend on ranks, which may keep experts in descending order."""
    chosen = torch.tensor([[True, False, True, False], [False, True, False, False]])
    probs = torch.arange(8.0).view(2, 4)
    config = SimpleNamespace(moe_router_topk=2, moe_pad_expert_input_to_capacity=False)
    layer = SimpleNamespace(
        route=lambda x, mask: (probs, chosen), router=SimpleNamespace(topk=2), config=config
    )
    path = seam.OverlappedLayer.__new__(seam.OverlappedLayer)
    path.batch_invariant = True
    path.transports = SimpleNamespace(ascending=False)
    for columns in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        path.columns = torch.tensor(columns)
        path._indices = path.columns.argsort()
        with mock.patch.object(exchange, "routes_as_megatron", return_value=True):
            ids, found = path.choices(layer, probs, None)
        numbers = torch.where(ids < 0, ids, path.columns[ids])
        assert numbers.tolist() == [[0, 2], [1, -1]]
        assert found[numbers >= 0].tolist() == [0.0, 2.0, 5.0]


@contextlib.contextmanager
def over_nvlink(layer: Any, tokens: int) -> Iterator[Any]:
    """The layer's NVLink path on one rank of a simulated workspace, in fp32."""
    space = SimulatedWorkspace(1).rank(0)
    c = layer.config
    shape = c.hidden_size, c.moe_router_topk, c.num_moe_experts
    buffers = NvlinkBuffers(space, tokens, *shape, torch.float32)
    rounds = SimpleNamespace(device=torch.device("cpu"))
    with mock.patch.object(exchange, "shared_rounds", return_value=rounds):
        config = FluidConfig(moe_backend="nvlink")
        path = seam.OverlappedLayer(layer, config, "nvlink")
        path.start([path.weights.order[0] != 0])
    path.transports.buffers = buffers
    yield path


def _step(layer: Any, forward: Any = None) -> dict[str, torch.Tensor]:
    x = torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(3))
    return tiny_gpt.layer_step(layer, x, forward)


@pytest.mark.parametrize("kind", ["separate", "one storage", "reversed"])
@on_ranks(1)
def test_a_layer_over_nvlink_is_megatrons_and_notices_parameters_that_change_in_place(
    rank: int, world: int, kind: str
) -> None:
    tiny_gpt.parallel()
    patches.revert("moe-router-topk", "moe-layer", "moe-layer-init")
    shape = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K}
    layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**shape), grouped=True)
    for projection in ExpertParameters(layer.experts).current():
        if kind != "separate":
            share_storage(projection if kind == "one storage" else tuple(reversed(projection)))
    stock = _step(layer)
    with over_nvlink(layer, TOKENS) as path, patches.patched("moe-router-topk"):

        def forward(x: torch.Tensor) -> torch.Tensor:
            return path.forward(layer, x, None)[0]  # type: ignore[no-any-return]

        ours = _step(layer, forward)
        assert len(stock) == 2 + 1 + 2 * EXPERTS
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
        assert kind != "reversed" or path.columns.tolist() == [*reversed(range(EXPERTS))]
        y = forward(torch.randn(TOKENS, 1, 32))
        with torch.no_grad():
            layer.experts.linear_fc2.weight3.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
            y.sum().backward()
