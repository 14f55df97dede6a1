"""Dispatch and combine as two functions, with experts in plain torch between them, on one rank: by
torch's index operations and by the kernels (interpreted on a CPU)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_fluid.moe.local.transport import LocalPlan, LocalTransport
from megatron_fluid.moe.nvlink import transport
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.transport import NvlinkTransport
from megatron_fluid.moe.open_exchange import DispatchedRows, OpenExchange
from megatron_fluid.moe.transport import TokenTransport
from tests.support.moe_reference import ExpertProblem, routing
from tests.support.simulated_workspace import SimulatedWorkspace

T, K, E, H, F = 11, 2, 5, 16, 8
KINDS = ["random", "dropped", "one expert", "nothing"]


def _torch(ids: Tensor) -> TokenTransport:
    return LocalTransport(LocalPlan.of(ids, E))


def _kernels(sent_rows: bool) -> Callable[[Tensor], TokenTransport]:
    def make(ids: Tensor) -> TokenTransport:
        workspace, schedule = SimulatedWorkspace(1).rank(0), Schedule(sent_rows=sent_rows)
        buffers = NvlinkBuffers(workspace, T, H, K, E, torch.float32, schedule)
        return NvlinkTransport(buffers, ids.int())

    return make


WAYS = [
    pytest.param(_torch, id="torch"),
    pytest.param(_kernels(False), id="kernels", marks=pytest.mark.interpreter),
    pytest.param(_kernels(True), id="kernels, rows sent", marks=pytest.mark.interpreter),
]


each_way = pytest.mark.parametrize("way", WAYS)


def _problem(kind: str = "random") -> ExpertProblem:
    ids = routing(kind, T, E, K, torch.Generator().manual_seed(4))
    return ExpertProblem.draw(ids, E, H, F, activation="gelu", biased=True)


def _experts(rows: DispatchedRows, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    """With biases, which no transport knows of."""
    parts = zip(rows.tokens.split(rows.counts), rows.probs.split(rows.counts), strict=True)
    made = [
        (torch.nn.functional.gelu(x @ w1[e].t() + b1[e]) @ w2[e].t() + b2[e]) * p.unsqueeze(1)
        for e, (x, p) in enumerate(parts)
    ]
    return torch.cat(made)


@pytest.mark.parametrize("kind", KINDS)
@each_way
def test_outputs_and_every_gradient_agree_with_plain_torch(
    way: Callable[[Tensor], TokenTransport], kind: str
) -> None:
    problem = _problem(kind)
    ids, leaves, grad = problem
    opened = OpenExchange(way(ids))
    rows = opened.dispatch(leaves[0], leaves[1])
    assert rows.counts == [int((ids == e).sum()) for e in range(E)]
    y = opened.combine(_experts(rows, *leaves[2:]))
    again = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    found, expected = problem.gradients(y), problem.expected("gelu")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(list(again), found[1:], rtol=0, atol=0)


@each_way
def test_a_gradient_of_the_rows_alone_needs_no_result(
    way: Callable[[Tensor], TokenTransport],
) -> None:
    """A loss on what the experts see, whose combined output nobody asks for a gradient."""
    ids, (x, probs, *weights), _ = _problem()
    opened = OpenExchange(way(ids))
    rows = opened.dispatch(x, probs)
    opened.combine(_experts(rows, *weights))
    dx, dprobs = torch.autograd.grad((3 * rows.tokens).sum() + rows.probs.sum(), [x, probs])
    torch.testing.assert_close(dx, torch.full((T, H), 3.0 * K))
    torch.testing.assert_close(dprobs, torch.ones(T, K))


def test_inputs_without_gradients_leave_the_experts_theirs() -> None:
    problem = _problem()
    ids, (x, probs, *weights), grad = problem
    opened = OpenExchange(_torch(ids))
    y = opened.combine(_experts(opened.dispatch(x.detach(), probs.detach()), *weights))
    found = torch.autograd.grad(y, weights, grad)
    torch.testing.assert_close(list(found), problem.expected("gelu")[3:], rtol=1e-5, atol=1e-6)


@pytest.mark.interpreter
def test_moves_of_a_kind_in_a_row_are_kept_apart_by_a_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = NvlinkBuffers(SimulatedWorkspace(2).rank(0), 4, H, K, 4, torch.float32)
    barriers: list[str] = []
    move = ""
    monkeypatch.setattr(transport, "barrier", lambda _: barriers.append(move))
    for move in ("plan", "dispatch", "combine", "dispatch", "combine", "plan", "dispatch"):
        transport.take_turn(buffers, move)
    assert barriers == []
    for move in ("dispatch", "plan", "plan", "dispatch", "combine", "combine"):
        transport.take_turn(buffers, move)
    assert barriers == ["dispatch", "plan", "plan", "combine"]
