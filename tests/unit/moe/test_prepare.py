"""What every call goes through before any transport: one preparation, so that autocast, checks and
settings are alike on all of them; and what a layer keeps from an evaluation can be trained."""

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import MoEBaseline, MoEConfig, MoELayer
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe import choose, fp8_experts
from megatron_fluid.moe.autograd import prepare, run_experts
from megatron_fluid.moe.call import ExpertCall
from megatron_fluid.moe.expert_rows import InPlace
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.hierarchical.plan import make_plan
from megatron_fluid.moe.hierarchical.transport import HierarchicalTransport
from megatron_fluid.moe.local.transport import LocalPlan, LocalTransport
from megatron_fluid.moe.nvlink import shared
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.transport import NvlinkTransport
from megatron_fluid.moe.rounds.all_to_all import AllToAllTransport
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.rounds.transport import RoundsTransport
from megatron_fluid.moe.transport import TokenTransport
from megatron_fluid.topology import HostLayout
from tests.support.fp8_emulation import emulate
from tests.support.launch import on_ranks
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.moe_reference import ExpertProblem
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = NEEDS_INTERPRETER

T, K, E, H, F = 6, 2, 4, 16, 8
BF16 = torch.bfloat16


def _rounds() -> Any:
    return shared_rounds(dist.group.WORLD)


def _hierarchical(ids: Tensor) -> TokenTransport:
    plan = make_plan(ids[None], [T], E, HostLayout((0,)), 0, chunks=1)
    return HierarchicalTransport(plan, _rounds(), "moe")


def _nvlink(ids: Tensor) -> TokenTransport:
    space = SimulatedWorkspace(1).rank(0)
    return NvlinkTransport(NvlinkBuffers(space, T, H, K, E, BF16), ids)


# Each with tokens [T, H], or with rows that are sorted by expert [N, H].
TOKENS: dict[str, Callable[[Tensor], TokenTransport]] = {
    "local": lambda ids: LocalTransport(LocalPlan.of(ids, E)),
    "nvlink": _nvlink,
    "hierarchical": _hierarchical,
}
ROWS: dict[str, Callable[[ExactPlan], TokenTransport]] = {
    "rounds": lambda plan: RoundsTransport(plan, _rounds(), "moe"),
    "all-to-all": lambda plan: AllToAllTransport(plan, _rounds(), "moe"),
    "in place": lambda plan: InPlace(plan.send_counts[0]),
}


def _problem() -> ExpertProblem:
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(5)).topk(K, -1).indices
    return ExpertProblem.draw(ids, E, H, F)


def _step(name: str, leaves: list[Tensor], ids: Tensor) -> list[Tensor]:
    """Result and gradients over one transport, with and without biases."""
    x, probs, w1, w2 = leaves
    found = []
    tables = torch.linspace(-1, 1, 2 * F * E).view(E, -1), torch.linspace(-1, 1, H * E).view(E, -1)
    b1, b2 = (table.to(w1.dtype).requires_grad_() for table in tables)
    for biases in (None, (b1, b2)):
        if name in TOKENS:
            rows, scale, transport = x, probs, TOKENS[name](ids)
        else:
            plan = ExactPlan.from_topk(ids, E, _rounds())
            rows, scale, transport = x, probs, ROWS[name](plan)
            if name == "in place":
                rows, scale = plan.enter("rows", x, probs)
        call = ExpertCall(x=rows, probs=scale, w1=w1, w2=w2, num_experts=E, biases=biases)
        y = run_experts(call, transport)
        added = () if biases is None else (b1, b2)
        found += [y, *torch.autograd.grad(y.float().square().sum(), [*leaves, *added])]
    return [value.detach() for value in found]


@on_ranks(1)
def test_under_autocast_every_transport_computes_in_its_dtype(rank: int, world: int) -> None:
    """Weights and tokens of 32 bits: as if they had been cast before, bit for bit."""
    ids, wide, _ = _problem()
    # Probabilities stay in fp32, as under autocast.
    narrow = [leaf.detach().to(leaf.dtype if i == 1 else BF16) for i, leaf in enumerate(wide)]
    for name in (*TOKENS, *ROWS):
        right = _step(name, [leaf.requires_grad_() for leaf in narrow], ids)
        with torch.autocast("cpu", dtype=BF16):
            mine = _step(name, wide, ids)
        assert mine[0].dtype == BF16
        for number, (a, b) in enumerate(zip(mine, right, strict=True)):
            assert torch.equal(a.to(b.dtype), b), (name, number)


def _tensors(of: object) -> Iterator[Tensor]:
    """All tensors that an object holds, over any number of references."""
    seen: dict[int, object] = {}
    todo = [of]
    while todo:
        held = todo.pop()
        skipped = isinstance(held, type | str | bytes) or type(held).__name__ in (
            *("module", "function", "builtin_function_or_method", "ProcessGroup"),
        )
        if id(held) in seen or skipped:
            continue
        seen[id(held)] = held
        if isinstance(held, Tensor):
            yield held
            continue
        todo += gc.get_referents(held)


def _layer(backend: str) -> MoELayer:
    config = {"hidden_size": H, "ffn_hidden_size": F, "num_experts": E, "top_k": K}
    return MoELayer({**config, "backend": backend}, dist.group.WORLD)


@on_ranks(1)
def test_what_a_layer_keeps_of_an_evaluation_is_no_inference_tensor(rank: int, world: int) -> None:
    """Layers of which the first call is one of torch.inference_mode."""
    for backend in ("local", "rounds", "nvlink"):
        layer = _layer(backend)
        space = SimulatedWorkspace(1).rank(0)
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
        with (
            mock.patch.dict(choose.TRANSPORTS, nvlink=lambda case: None),
            mock.patch.object(shared, "SymmetricWorkspace", return_value=space) as made,
        ):
            made.close = lambda space: None
            with torch.inference_mode():
                layer(x)
            assert not [t.shape for t in _tensors(layer) if t.is_inference()], backend
            layer(x).sum().backward()
        assert layer.weight1.grad is not None


@on_ranks(1)
def test_weights_that_move_between_calls_are_read_where_they_lie(rank: int, world: int) -> None:
    layer = _layer("local")
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    for weight in (layer.weight1, layer.weight2):  # the same values with other strides
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        torch.testing.assert_close(layer(x), expected)


def test_parameters_that_are_moved_in_an_evaluation_can_be_trained() -> None:
    pytest.importorskip("megatron.core")
    from megatron_fluid.patches.moe.expert_modules import share_storage

    weights = tuple(torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    with torch.inference_mode():
        share_storage(weights)
    assert weights[0].untyped_storage().data_ptr() == weights[2].untyped_storage().data_ptr()
    x = torch.randn(2, 4, requires_grad=True)
    sum((x @ weight).sum() for weight in weights).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        weights[0].add_(1.0)
    assert weights[0].grad is not None and not any(weight.is_inference() for weight in weights)


def test_a_cast_that_is_made_in_an_evaluation_serves_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch.setattr)
    fc = ExpertWeights(torch.randn(2, 128, 128, dtype=BF16), 2)
    with torch.inference_mode():
        fp8_experts.weight_cast(fc).forward_matrices(fc)
    assert not any(t.is_inference() for t in _tensors(fc.kept.cast))


def test_calls_are_refused_by_name() -> None:
    x, _, probs, w1, w2 = _problem().arguments
    with pytest.raises(ConfigError, match="moe: dimensions of the tokens: found 3, allowed: 2"):
        prepare(ExpertCall(x=x[None], probs=probs, w1=w1, w2=w2, num_experts=E))
    call = ExpertCall(x=x, probs=probs, w1=w1, w2=w2, num_experts=E, recompute=("rows",))
    with pytest.raises(ConfigError, match=r"recompute: found \['rows'\], allowed: some of hidden"):
        run_experts(call, InPlace([T]))


def test_what_fp8_cannot_do_is_named() -> None:
    config = {"hidden_size": 128, "ffn_hidden_size": 128, "num_experts": 2, "top_k": 2}
    layer = MoELayer(config | {"fp8_recipe": "blockwise"}, dtype=torch.bfloat16)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="fp8_recipe.*Hopper GPUs, and tensors are on the cpu"):
        layer(x)
    with pytest.raises(ConfigError, match="bf16 parameters"):
        MoELayer(config | {"fp8_recipe": "blockwise"})(x.float())
    for change, named in (
        ({"activation": "geglu"}, "swiglu"),
        ({"ffn_hidden_size": 64}, "128 columns"),
        ({"backend": "rounds"}, "None over rounds"),
    ):
        layer = MoELayer(config | {"fp8_recipe": "blockwise"} | change, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=named):
            layer(x)
    with pytest.raises(ConfigError, match="found 'delayed', allowed: blockwise, or None"):
        MoEConfig.of(config | {"fp8_recipe": "delayed"})
    with pytest.raises(ConfigError, match="MoEBaseline"):
        MoEBaseline(config | {"fp8_recipe": "blockwise"}, dtype=torch.bfloat16)
