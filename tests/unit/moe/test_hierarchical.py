"""The two-level plan by itself: what is sent is what is received, on every layout; and the model of
its time."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.moe.hierarchical.model import (
    Link,
    Work,
    best_chunks,
    chunks_for,
    hosts_reached,
    plain_s,
    two_level_s,
)
from megatron_fluid.moe.hierarchical.plan import HierarchicalPlan, make_plan, rows_between_hosts
from megatron_fluid.topology import HostLayout

LAYOUTS = [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 2), (0, 0, 1, 1, 2, 2, 2, 3)]


def draw(world: int, top_k: int = 3) -> tuple[torch.Tensor, list[int]]:
    g = torch.Generator().manual_seed(world)
    counts = [(7 * rank) % 11 for rank in range(world)]
    ids = torch.rand(world, max(counts), 2 * world, generator=g).argsort(2)[..., :top_k]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -1, ids)
    for rank, count in enumerate(counts):
        ids[rank, count:] = -1
    return ids, counts


def plans_of(hosts: tuple[int, ...], chunks: int) -> tuple[list[HierarchicalPlan], torch.Tensor]:
    world = len(hosts)
    ids, counts = draw(world)
    layout = HostLayout(hosts)
    return [make_plan(ids, counts, 2 * world, layout, r, chunks) for r in range(world)], ids


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_what_is_sent_is_what_is_received(hosts: tuple[int, ...], chunks: int) -> None:
    plans, _ = plans_of(hosts, chunks)
    layout = HostLayout(hosts)
    for step in range(2 * chunks + 1):
        for plan in plans:
            piece = plan.pieces[step]
            assert piece.crosses == (step % 2 == 1)
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


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_choice_is_computed_once_and_every_token_crosses_once_a_host(
    hosts: tuple[int, ...],
) -> None:
    plans, ids = plans_of(hosts, 2)
    rows = sum(piece.groups.num_rows for plan in plans for piece in plan.pieces)
    assert rows == int((ids >= 0).sum())
    crossing = rows_between_hosts(ids, 2 * len(hosts), HostLayout(hosts))
    for plan, expected in zip(plans, crossing, strict=True):
        sends = [send for piece in plan.pieces for send in piece.sends]
        assert sum(len(tokens) for _, tokens in sends) == expected
        for host in set(hosts) - {hosts[plan.rank]}:
            tokens = [t for gateway, ts in sends if hosts[gateway] == host for t in ts.tolist()]
            assert len(tokens) == len(set(tokens))


def test_a_wire_shorter_than_the_computation_is_hidden() -> None:
    work = Work(own_s=0.5, crossing_s=0.5, out_bytes=1e6, back_bytes=1e6)
    fast, slow = Link(8e6), Link(2e6)
    assert plain_s(work, fast) == pytest.approx(1.25)
    # 8 pieces: what is left in the open is at most a piece
    assert two_level_s(work, fast, 8) == pytest.approx(1.0)
    # Twice 0.5 s of wire beside 1 s of computation: the last piece's way back
    assert two_level_s(work, slow, 8) < 1.15
    assert plain_s(work, slow) == pytest.approx(2.0)
    # where the wire takes longer, it is busy from the first moment to the last
    assert two_level_s(work, Link(0.5e6), 8) == pytest.approx(4.0, rel=0.02)


def test_pieces_are_as_many_as_pay() -> None:
    work = Work(own_s=0.5, crossing_s=0.5, out_bytes=1e6, back_bytes=1e6)
    assert best_chunks(work, Link(2e6)) == 8
    assert best_chunks(work, Link(2e6, latency_s=0.5)) == 1
    assert [chunks_for(n * 2**20, "cuda") for n in (0, 1, 8, 30, 1000)] == [1, 1, 2, 4, 8]
    assert chunks_for(1.6e6, "cpu") == 4


def test_hosts_reached_are_those_of_a_draw() -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(1, 20000, 64, generator=g).argsort(2)[..., :8]
    every = ids.expand(16, -1, -1)
    crossing = rows_between_hosts(every, 64, HostLayout(tuple(r // 4 for r in range(16))))
    assert crossing[0] / 20000 == pytest.approx(hosts_reached(4, 64, 8), rel=0.01)
    assert hosts_reached(2, 64, 8) == pytest.approx(1.0, abs=0.01)
