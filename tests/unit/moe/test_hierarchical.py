"""The two-level plan by itself: what is sent is what is received, on every layout."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.moe.hierarchical.plan import HierarchicalPlan, chunks_for, make_plan
from megatron_fluid.moe.hierarchical.transport import _HierarchicalExchange
from megatron_fluid.topology import HostLayout

LAYOUTS = [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 2), (0, 0, 1, 1, 2, 2, 2, 3)]
LAYOUTS += [(0, 1, 2, 3), (1, 0, 2)]  # a rank a host


def draw(world: int, top_k: int = 3) -> tuple[torch.Tensor, list[int]]:
    g = torch.Generator().manual_seed(world)
    counts = [(7 * rank) % 11 for rank in range(world)]
    ids = torch.rand(world, max(counts), 2 * world, generator=g).argsort(2)[..., :top_k]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -1, ids)
    for rank, count in enumerate(counts):
        ids[rank, count:] = -1
    return ids, counts


def plans_of(hosts: tuple[int, ...], chunks: int) -> list[HierarchicalPlan]:
    world = len(hosts)
    ids, counts = draw(world)
    layout = HostLayout(hosts)
    return [make_plan(ids, counts, 2 * world, layout, r, chunks) for r in range(world)]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_what_is_sent_is_what_is_received(hosts: tuple[int, ...], chunks: int) -> None:
    plans = plans_of(hosts, chunks)
    layout = HostLayout(hosts)
    for step in range(chunks + 1):
        for plan in plans:
            piece = plan.pieces[step]
            assert piece.crosses == (step > 0)
            for gateway, tokens in piece.sends:
                assert layout.local_index(gateway) == layout.local_index(plan.rank) % len(
                    layout.members[layout.hosts[gateway]]
                )
                assert dict(plans[gateway].pieces[step].receives)[plan.rank] == len(tokens)
            for member, positions in piece.hands:
                assert dict(plans[member].pieces[step].arrivals)[plan.rank] == len(positions)
                assert positions.tolist() == sorted(set(positions.tolist()))
                assert all(0 <= place < piece.num_held for place in positions.tolist())
        sent = sum(len(tokens) for plan in plans for _, tokens in plan.pieces[step].sends)
        received = sum(n for plan in plans for _, n in plan.pieces[step].receives)
        assert sent == received
    for plan, host in itertools.product(plans, set(hosts)):
        sends = [send for piece in plan.pieces if piece.crosses for send in piece.sends]
        tokens = [t for gateway, ts in sends if hosts[gateway] == host for t in ts.tolist()]
        assert len(tokens) == len(set(tokens)), "a token crosses once to each host"


def test_experts_compute_own_tokens_before_and_after_those_that_cross() -> None:
    for plan in plans_of((0, 0, 1, 1), 2):
        assert [batch.piece for batch in plan.batches] == [0, 1, 2, 0]
        before, after = plan.batches[0], plan.batches[-1]
        assert before.rows.stop == after.rows.start and not before.last and after.last
        assert after.rows.stop == len(before.permutation.row_token)
        ends = [list(batch.groups.ends or ()) for batch in (before, after)]
        assert ends[0][1] == ends[0][0] and ends[1][0] == 0, "two experts: one before, one after"


def test_pieces_follow_from_bytes() -> None:
    assert [chunks_for(n * 2**20, "cuda") for n in (0, 1, 8, 30, 1000)] == [1, 1, 2, 4, 8]
    assert [chunks_for(n * 2**20, "cpu") for n in (1.5, 2, 5)] == [1, 2, 4]


def test_all_weight_gradients_run_while_the_last_dx_crosses() -> None:
    scheduler, ran = WeightGradScheduler(), []
    scheduler.enable()
    exchange = object.__new__(_HierarchicalExchange)
    crossing: Any = SimpleNamespace(pending=SimpleNamespace(done=lambda: False))
    exchange._returning = {1: crossing}

    def submit() -> None:
        for name in ("fc2", "fc1"):
            scheduler.submit(name, [], lambda name=name: ran.append(name))  # type: ignore[misc]

    def backward(grad: torch.Tensor) -> None:
        exchange.run_queued(scheduler, submit)
        assert ran == ["fc2", "fc1"]

    x = torch.ones(1, requires_grad=True)
    x.register_hook(backward)
    x.sum().backward()
    assert ran == ["fc2", "fc1"]
