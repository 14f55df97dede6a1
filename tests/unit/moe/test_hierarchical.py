"""The two-level plan by itself: what is sent is what is received, on every layout; and the model of
its time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cases.wire_times import hosts_reached, plain_s
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.moe.hierarchical import choice, wire
from megatron_fluid.moe.hierarchical.choice import ExpertCost, ExpertShape, expert_cost, works
from megatron_fluid.moe.hierarchical.model import (
    FORMS,
    Form,
    Wire,
    Work,
    best_form,
    chunks_for,
    two_level_s,
)
from megatron_fluid.moe.hierarchical.plan import HierarchicalPlan, make_plan, rows_between_hosts
from megatron_fluid.moe.hierarchical.rows import TokenRoom
from megatron_fluid.moe.hierarchical.transport import _HierarchicalExchange
from megatron_fluid.plan.machine import REFERENCE
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


def plans_of(hosts: tuple[int, ...], form: Form) -> tuple[list[HierarchicalPlan], torch.Tensor]:
    world = len(hosts)
    ids, counts = draw(world)
    layout = HostLayout(hosts)
    return [make_plan(ids, counts, 2 * world, layout, r, form) for r in range(world)], ids


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_what_is_sent_is_what_is_received(hosts: tuple[int, ...], chunks: int) -> None:
    plans, _ = plans_of(hosts, Form(chunks))
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


@pytest.mark.parametrize("form", [Form(2), Form(1, 1.0), Form(joined=True)], ids=str)
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_choice_is_computed_once_and_every_token_crosses_once_a_host(
    hosts: tuple[int, ...], form: Form
) -> None:
    plans, ids = plans_of(hosts, form)
    rows = sum(batch.groups.num_rows for plan in plans for batch in plan.batches)
    assert rows == int((ids >= 0).sum())
    for plan in plans:
        computed = [index for batch in plan.batches if batch.last for index in batch.pieces]
        assert sorted(computed) == list(range(len(plan.pieces)))
    crossing = rows_between_hosts(ids, 2 * len(hosts), HostLayout(hosts))
    for plan, expected in zip(plans, crossing, strict=True):
        sends = [send for piece in plan.pieces for send in piece.sends]
        assert sum(len(tokens) for _, tokens in sends) == expected
        for host in set(hosts) - {hosts[plan.rank]}:
            tokens = [t for gateway, ts in sends if hosts[gateway] == host for t in ts.tolist()]
            assert len(tokens) == len(set(tokens))


@pytest.mark.parametrize("first", [1.0, 0.5])
def test_experts_compute_own_tokens_before_and_after_those_that_cross(first: float) -> None:
    plans, _ = plans_of((0, 0, 1, 1), Form(2, first))
    for plan in plans:
        own = [batch for batch in plan.batches if batch.pieces == (0,)]
        assert plan.batches[0] is own[0] and plan.batches[-1].last
        assert len(own) == (1 if first == 1.0 else 2)
        assert own[0].begin == 0 and own[-1].end == len(own[0].permutation.row_token)
        for batch in own:
            assert batch.groups.num_rows == batch.end - batch.begin
        if first < 1.0:  # two experts of a rank: one before, one after
            ends = [list(batch.groups.ends or ()) for batch in own]
            assert ends[0][1] == ends[0][0] and ends[1][0] == 0
            assert own[0].end == own[1].begin and not own[0].last


WORK = Work(own_s=0.5, crossing_s=0.5, out_bytes=1e6, back_bytes=1e6)


def test_a_wire_shorter_than_the_computation_is_hidden() -> None:
    fast, slow, slower = Wire(8e6), Wire(2e6), Wire(0.5e6)
    assert plain_s(WORK, fast) == pytest.approx(1.25)
    assert plain_s(WORK, fast, by_turns=1.0) == pytest.approx(1.5)
    # what comes first and last is own tokens
    assert two_level_s(WORK, fast, Form(1)) == pytest.approx(1.0)
    assert two_level_s(WORK, slow, Form(2)) == pytest.approx(1.0)
    assert plain_s(WORK, slow) == pytest.approx(2.0)
    # where the wire takes longer, it is busy from the first moment to the last
    assert two_level_s(WORK, slower, Form(8)) == pytest.approx(4.0)
    assert two_level_s(WORK, slower, Form(joined=True)) == pytest.approx(5.0)
    # what waits for nothing hides the last results
    after = replace(WORK, after_s=4.0)
    assert two_level_s(after, slower, Form(1)) == pytest.approx(2 + 0.5 + 0.25 + 4)


def test_a_piece_is_there_when_the_last_stream_has_brought_its_part() -> None:
    # The wire takes 2 s each way. Of three streams the last one's half of the tokens comes when the
    # others have sent all of theirs, after 5/3 s and not 1; its other half after 2.
    link = Wire(0.5e6, streams=3)
    instant = replace(WORK, own_s=0.0, crossing_s=0.0)
    late = replace(instant, back_bytes=0.0)
    assert two_level_s(replace(late, crossing_s=1.0), link, Form(2)) == pytest.approx(5 / 3 + 1)
    assert two_level_s(late, link, Form(1)) == pytest.approx(2.0)
    # Results that others have sent by then go before it, too; but the wire is never idle.
    assert two_level_s(instant, link, Form(2)) == pytest.approx(4.0)
    after = replace(instant, after_s=3.0)
    assert two_level_s(after, link, Form(2)) == pytest.approx(2 + 2 / 3 + 3)
    for form in (Form(1), Form(4, 0.75), Form(first=1.0, joined=True)):
        times = [two_level_s(WORK, Wire(2e6, streams=streams), form) for streams in (1, 2, 3, 9)]
        assert times == sorted(times)
        if form.chunks == 1:  # nothing overtakes
            assert times[0] == pytest.approx(times[-1])


def test_the_form_is_the_one_that_pays() -> None:
    work = replace(WORK, pass_s=0.05)
    assert best_form([work], Wire(1e12)) == FORMS[0] == Form(first=1.0, joined=True)
    assert best_form([work], Wire(2e6, latency_s=0.5)).chunks == 1
    assert best_form([work], Wire(2e6)).chunks == 2
    assert best_form([work], Wire(0.5e6)) == Form(2, 0.5)  # the wire is never idle
    assert best_form([replace(work, own_s=0.1, crossing_s=0.9)], Wire(2e6)).chunks > 2
    kept_whole = 0
    for rate in (1e5, 1e6, 4e6, 1e7, 3e7, 1e8, 1e9):
        times = {
            form: sum(two_level_s(each, Wire(rate), form) for each in (work, WORK))
            for form in FORMS
        }
        best, least = best_form([work, WORK], Wire(rate)), min(times.values())
        whole = times[FORMS[0]]
        assert times[best] == pytest.approx(least) if least <= 0.95 * whole else best == FORMS[0]
        kept_whole += 0.95 * whole < least < whole
    assert kept_whole  # where cutting would save a little


def test_without_a_backward_the_forward_alone_decides() -> None:
    cost = ExpertCost(row_s=32e-6, pass_s=1.3e-3)
    link = Wire(1.49e6 / 17e-3)
    given = 245.0, 779.0, 724.0, 2048, 2, cost
    forward, backward = works(*given)
    alone, both = (choice._form_for(*given, link, learning) for learning in (False, True))
    assert alone == best_form([forward], link) and both == best_form([forward, backward], link)
    # weight gradients hide the last results of a backward, so that it wants fewer pieces
    assert alone.chunks > both.chunks


def _measured(
    monkeypatch: pytest.MonkeyPatch, domains: list[int], times: list[float], slower: float = 0.0
) -> Wire:
    """The wire that rank 0 measures whose exchanges take such times; another rank's take `slower`
    seconds more."""
    clock = iter([at for took in times for at in (0.0, took)])
    monkeypatch.setattr(wire, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    talk = SimpleNamespace(
        gather=lambda _, value: [value, value + slower], first=lambda _, value: value
    )
    monkeypatch.setattr(wire, "agreement", lambda group: talk)
    pending = SimpleNamespace(wait=lambda: None)
    rounds: Any = SimpleNamespace(domains=domains, rank=0, group=None, exchange=lambda *_: pending)
    return wire._measure(rounds)


def test_the_wire_is_that_of_the_slowest_rank_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [*[0.003] * 6, 0.001, 0.002, 0.02, 0.05, 0.06, 0.07, 0.041, 0.06, 0.06]
    found = _measured(monkeypatch, [0, 1], times)
    assert found.latency_s == 0.001
    assert found.bytes_per_s == pytest.approx(2**18 / 0.04)
    found = _measured(monkeypatch, [0, 1], times, slower=0.01)
    assert found.latency_s == 0.011, "and so long that the first message is long enough"
    assert found.bytes_per_s == pytest.approx(2**17 / (0.041 + 0.01 - 0.011))


def test_the_ranks_of_a_host_share_its_wire_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for domains, streams in (([0, 1], 1), ([0, 1, 2, 3], 3), ([0, 0, 1, 1], 2), ([0, 1, 1, 2], 4)):
        assert _measured(monkeypatch, domains, [0.1] * 20).streams == streams


def test_experts_cost_their_flops_and_one_reading_of_their_matrices() -> None:
    machine = replace(REFERENCE["cpu"], flops_per_s=1e9, bytes_per_s=1e6)
    cost = expert_cost(machine, ExpertShape(10, 40, 20, torch.float32), experts=3)
    assert cost.row_s == pytest.approx(2 * 10 * 60 / 1e9)
    assert cost.pass_s == pytest.approx(3 * 10 * 60 * 4 / 1e6)


def test_rows_of_one_source_are_where_the_next_ones_begin() -> None:
    tokens = [torch.arange(12.0).view(6, 2), torch.arange(6.0).view(6, 1)]
    room = TokenRoom(tokens, [2, 3], together=True)
    room.filled(0, torch.tensor([1, 4]))
    for rows in room.of(1):
        rows.fill_(-1)
    whole = room.give_up()
    assert whole is not None and room.give_up() is None
    assert whole[0].tolist() == [[2, 3], [8, 9], [-1, -1], [-1, -1], [-1, -1]]
    assert whole[1].view(-1).tolist() == [1, 4, -1, -1, -1]
    apart = TokenRoom(tokens, [2, 3], together=False)
    assert [t.shape for t in apart.of(1)] == [(3, 2), (3, 1)] and apart.give_up() is None


def test_a_pass_costs_what_its_rows_and_matrices_do() -> None:
    cost = ExpertCost(row_s=1e-3, pass_s=0.02)
    forward, backward = works(100, 50, 40, 2048, 2, cost)
    assert (forward.own_s, forward.crossing_s) == pytest.approx((0.1, 0.05))
    assert forward.out_bytes == 40 * (2048 + 8) and forward.back_bytes == 40 * 2048
    assert (backward.out_bytes, backward.back_bytes) == (forward.back_bytes, forward.out_bytes)
    assert forward.after_s == 0 and backward.after_s == pytest.approx(0.15)


def test_pieces_follow_from_bytes_where_nothing_is_measured() -> None:
    assert [chunks_for(n * 2**20, "cuda") for n in (0, 1, 8, 30, 1000)] == [1, 1, 2, 4, 8]
    assert [chunks_for(n * 2**20, "cpu") for n in (1.5, 2, 5)] == [1, 2, 4]


def test_hosts_reached_are_those_of_a_draw() -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(1, 20000, 64, generator=g).argsort(2)[..., :8]
    every = ids.expand(16, -1, -1)
    crossing = rows_between_hosts(every, 64, HostLayout(tuple(r // 4 for r in range(16))))
    assert crossing[0] / 20000 == pytest.approx(hosts_reached(4, 64, 8), rel=0.01)
    assert hosts_reached(2, 64, 8) == pytest.approx(1.0, abs=0.01)


def test_all_weight_gradients_run_while_the_last_dx_crosses() -> None:
    scheduler, ran = WeightGradScheduler(), []
    scheduler.enable()
    exchange = object.__new__(_HierarchicalExchange)
    crossing: Any = SimpleNamespace(pending=SimpleNamespace(done=lambda: False))
    exchange._returning = {1: crossing}

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            def submit() -> None:
                for name in ("fc2", "fc1"):
                    scheduler.submit(name, [], lambda name=name: ran.append(name))  # type: ignore[misc]

            exchange.run_queued(scheduler, submit)
            assert ran == ["fc2", "fc1"]
            return grad

    x = torch.ones(1, requires_grad=True)
    Layer.apply(x).backward()  # type: ignore[no-untyped-call]
    assert ran == ["fc2", "fc1"]
