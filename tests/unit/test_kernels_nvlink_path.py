"""Plan, dispatch and combine kernels against their oracles: all ranks in one process, the interpreter on a CPU,
random routings.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import SimulatedWorkspace
from megatron_fluid.errors import FluidError
from megatron_fluid.kernels.oracles import dispatch_oracle, plan_oracle, publish_oracle, reduce_oracle
from megatron_fluid.moe.nvlink_domain import NvlinkDomain, RoutingHandle
from megatron_fluid.moe.nvlink_path import (
    make_plan,
    meet,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
    send_staged,
    stream_combine,
    stream_push,
    stream_scatter,
)
from megatron_fluid.moe.nvlink_schedule import Schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Case:
    """One routing: ids and probs of every rank (lists of [T_r, K]), tokens a rank, and the shape."""

    ids: list[Tensor]
    probs: list[Tensor]
    experts: int
    capacity: int


def make_case(seed: int, kind: str, ranks: int = 3, local_experts: int = 3, top_k: int = 2, capacity: int = 16) -> Case:
    g = torch.Generator().manual_seed(seed)
    experts = ranks * local_experts
    ids, probs = [], []
    for rank in range(ranks):
        tokens = capacity
        if kind == "uneven":
            tokens = [0, capacity, 7][rank % 3]
        scores = torch.rand(tokens, experts, generator=g)
        if kind == "hot":
            scores[:, 1] += 10.0
        if kind == "empty":
            scores[:, ::2] -= 10.0
        chosen = scores.topk(top_k, -1).indices
        if kind == "dropped":
            chosen[torch.rand(chosen.shape, generator=g) < 0.5] = -1
        if kind == "one rank":
            chosen = chosen % local_experts
        ids.append(chosen.to(DEVICE))
        probs.append(torch.rand(tokens, top_k, generator=g).to(DEVICE))
    return Case(ids, probs, experts, capacity)


def padded(parts: list[Tensor], capacity: int, fill: float) -> Tensor:
    """[W, C, ...] from one [T_r, ...] per rank."""
    out = torch.full((len(parts), capacity, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        out[rank, : part.shape[0]] = part.cpu()
    return out


KINDS = ["balanced", "hot", "empty", "dropped", "uneven", "one rank"]


@pytest.mark.parametrize("kind", KINDS)
def test_plan_dispatch_and_combine_equal_their_oracles(kind: str) -> None:
    seed = KINDS.index(kind)
    hidden, ranks, top_k = 24, 3, 2
    case = make_case(seed, kind)
    world = SimulatedWorkspace(ranks, DEVICE)
    domains = [
        NvlinkDomain(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32) for r in range(ranks)
    ]
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(case.ids[r].shape[0], hidden, generator=g).to(DEVICE) for r in range(ranks)]
    for _ in range(2 if kind == "hot" else 1):  # the second round runs on used buffers
        handles: list[RoutingHandle] = [publish(domains[r], case.ids[r], case.probs[r]) for r in range(ranks)]
        _meet(domains, "plan_flags")
        for r in range(ranks):
            make_plan(domains[r], handles[r])
        plans = [
            plan_oracle(padded(case.ids, case.capacity, -1), padded(case.probs, case.capacity, 0), r, 3)
            for r in range(ranks)
        ]
        for r, plan in enumerate(plans):
            n = plan.row_entry.numel()
            assert torch.equal(
                handles[r].destinations[0, : xs[r].shape[0]].cpu(), publish_oracle(case.ids[r].cpu(), ranks, 3)
            )
            assert torch.equal(handles[r].offsets.cpu(), plan.offsets)
            assert domains[r].read_offsets() == plan.offsets.tolist()
            assert torch.equal(handles[r].row_prob[:n].cpu(), plan.row_prob)
            assert torch.equal(handles[r].inverse.cpu(), plan.inverse)
        for r in range(ranks):
            push(domains[r], handles[r], xs[r])
        _meet(domains, "dispatch_flags")
        rows = []
        for r in range(ranks):
            out = torch.full((plans[r].row_entry.numel(), hidden), float("nan"), device=DEVICE)
            rows.append(scatter(domains[r], handles[r], xs[r], out))
            assert torch.equal(rows[r].cpu(), dispatch_oracle(padded(xs, case.capacity, 0), plans[r]))
        ys = [row * (r + 2.0) for r, row in enumerate(rows)]
        row_grads = [torch.rand(y.shape[0], generator=g).to(DEVICE) for y in ys]
        for r in range(ranks):
            reduce_push(domains[r], handles[r], ys[r], row_grads[r])
        _meet(domains, "combine_flags")
        sums = [reduce_oracle(ys[r].cpu(), plans[r]).view(ranks, case.capacity, hidden) for r in range(ranks)]
        for r in range(ranks):
            grads = torch.full(case.probs[r].shape, float("nan"), device=DEVICE)
            out = reduce(domains[r], handles[r], grads=grads)
            expected = torch.zeros(xs[r].shape)
            for d in range(ranks):
                expected += sums[d][r, : xs[r].shape[0]]
            assert torch.equal(out.cpu(), expected)
            expected_grads = torch.zeros(grads.shape)
            for d in range(ranks):
                inverse = plans[d].inverse.view(ranks, case.capacity, top_k)[r, : xs[r].shape[0]].long()
                if row_grads[d].numel():
                    expected_grads += torch.where(inverse >= 0, row_grads[d].cpu()[inverse.clamp(min=0)], 0.0)
            assert torch.equal(grads.cpu(), expected_grads)
        for r in range(ranks):
            world.rank(r).check_errors()


@pytest.mark.parametrize(
    ("ranks", "local_experts", "top_k", "capacity"),
    [(8, 1, 2, 5), (2, 2, 4, 48), (8, 2, 16, 3), (3, 3, 7, 33), (2, 5, 1, 1), (2, 256, 3, 300)],
)
def test_plans_of_any_number_of_local_experts_equal_their_oracle(
    ranks: int, local_experts: int, top_k: int, capacity: int
) -> None:
    """One rank's plan; (2, 256, 3, 300) adds up the counts in more than one step. Some tokens name an expert twice."""
    case = make_case(17, "dropped", ranks, local_experts, top_k, capacity)
    for ids in case.ids:
        ids[::3, -1] = ids[::3, 0]
    world = SimulatedWorkspace(ranks, DEVICE)
    domains = [NvlinkDomain(world.rank(r), capacity, 8, top_k, case.experts, torch.float32) for r in range(ranks)]
    handles = [publish(domains[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _meet(domains, "plan_flags")
    last = ranks - 1
    make_plan(domains[last], handles[last])
    plan = plan_oracle(padded(case.ids, capacity, -1), padded(case.probs, capacity, 0), last, local_experts)
    assert torch.equal(handles[last].offsets.cpu(), plan.offsets)
    assert torch.equal(handles[last].inverse.cpu(), plan.inverse)
    assert torch.equal(handles[last].row_prob[: plan.row_prob.numel()].cpu(), plan.row_prob)
    world.rank(last).check_errors()


def test_pieces_give_what_the_whole_gives() -> None:
    """Dispatch in blocks of experts and combine in pieces of columns: the same tables, rows and sums."""
    hidden, ranks, top_k = 32, 3, 3
    case = make_case(7, "balanced", ranks=ranks, local_experts=4, top_k=top_k, capacity=20)
    world = SimulatedWorkspace(ranks, DEVICE)
    shape = (case.capacity, hidden, top_k, case.experts, torch.float32)
    domains = [NvlinkDomain(world.rank(r), *shape, schedule=Schedule((1, 2, 1), 2, 2)) for r in range(ranks)]
    xs = [torch.randn(case.capacity, hidden, device=DEVICE) for _ in range(ranks)]
    handles = [publish(domains[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _meet(domains, "plan_flags")
    for r in range(ranks):
        make_plan(domains[r], handles[r])
    plans = [plan_oracle(padded(case.ids, 20, -1), padded(case.probs, 20, 0), r, 4) for r in range(ranks)]
    outs = [torch.full((plan.row_entry.numel(), hidden), float("nan"), device=DEVICE) for plan in plans]
    for r, plan in enumerate(plans):
        assert torch.equal(handles[r].destinations.sum(0).cpu(), publish_oracle(case.ids[r].cpu(), ranks, 4))
        ends = [0, *plan.offsets.tolist()]
        assert handles[r].block_offsets.tolist() == [ends[1], ends[2] - ends[1], ends[3] - ends[1], ends[4] - ends[3]]
    for block in range(3):
        for r in range(ranks):
            push(domains[r], handles[r], xs[r], block, programs=2)
        _meet(domains, "dispatch_flags", block)
        for r in range(ranks):
            meet(domains[r], domains[r].dispatch_flags, block)
            scatter(domains[r], handles[r], xs[r], outs[r], block, programs=2)
            end = plans[r].offsets[(0, 2, 3)[block]].item()
            assert torch.equal(outs[r][:end].cpu(), dispatch_oracle(padded(xs, 20, 0), plans[r])[:end])
            assert outs[r][end:].isnan().all()
    results = [torch.full((20, hidden), float("nan"), device=DEVICE) for _ in range(ranks)]
    for piece, column in enumerate((0, 16)):
        for r in range(ranks):
            reduce_push(
                domains[r], handles[r], outs[r][:, column : column + 16].contiguous(), column=column, programs=2
            )
        _meet(domains, "combine_flags", piece)
        for r in range(ranks):
            meet(domains[r], domains[r].combine_flags, piece)
            reduce(domains[r], handles[r], out=results[r], column=column, width=16, meeting=False, programs=2)
    for r in range(ranks):
        assert torch.allclose(results[r].cpu(), xs[r].cpu() * top_k)
        world.rank(r).check_errors()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [8, 24])
def test_staged_sums_arrive_as_those_that_are_pushed(kind: str, ahead: int) -> None:
    """Of columns that go ahead of the others, and of all; with the probabilities' gradients, which are not staged."""
    hidden, ranks, top_k = 24, 3, 2
    case = make_case(KINDS.index(kind), kind)
    world = SimulatedWorkspace(ranks, DEVICE)
    shape = (case.capacity, hidden, top_k, case.experts, torch.float32)
    domains = [NvlinkDomain(world.rank(r), *shape, schedule=Schedule(staged_backward=True)) for r in range(ranks)]
    handles = [publish(domains[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _meet(domains, "plan_flags")
    for r in range(ranks):
        make_plan(domains[r], handles[r])
    ys = [torch.randn(domain.read_offsets()[-1], hidden, device=DEVICE) for domain in domains]
    row_grads = [torch.rand(y.shape[0], device=DEVICE) for y in ys]
    found = []
    for staged in (False, True):
        for domain in domains:
            domain.local("inbox", torch.float32).fill_(float("nan"))
        for r, domain in enumerate(domains):
            grads = None if ahead < hidden else row_grads[r]
            for first, last in ((0, ahead), (ahead, hidden)):
                if first < last:
                    part = ys[r][:, first:last].contiguous()
                    reduce_push(domain, handles[r], part, grads, column=first, staged=staged and first == 0)
            if staged:
                domain.fork()
                send_staged(domain, ahead)
        for domain in domains:  # all ranks' copies go into this one's inbox, too
            domain.join()
        _meet(domains, "combine_flags")
        results = []
        for r in range(ranks):
            grads = None if ahead < hidden else torch.full(case.probs[r].shape, float("nan"), device=DEVICE)
            results += [reduce(domains[r], handles[r], grads=grads), grads]
            world.rank(r).check_errors()
        found.append(results)
    for pushed, staged_one in zip(*found, strict=True):
        if pushed is not None:
            assert pushed.isfinite().all() and torch.equal(staged_one, pushed)


def _meet(domains: list[NvlinkDomain], region: str, piece: int = 0) -> None:
    """Signal for every rank before any waits: what concurrency does on real ranks, a sequential test does by hand."""
    for domain in domains:
        flags = getattr(domain, region)
        for peer in domains:
            getattr(peer, region).flags[piece * len(domains) + domain.rank] = flags.counter[0]


@pytest.mark.parametrize("kind", ["balanced", "uneven"])
def test_streamed_dispatch_gives_the_same_rows(kind: str) -> None:
    hidden, ranks, top_k = 24, 3, 2
    case = make_case(11, kind)
    world = SimulatedWorkspace(ranks, DEVICE)
    domains = [
        NvlinkDomain(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32) for r in range(ranks)
    ]
    handles = [publish(domains[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _meet(domains, "plan_flags")
    for r in range(ranks):
        make_plan(domains[r], handles[r])
    for _ in range(2):
        xs = [torch.randn(case.ids[r].shape[0], hidden).to(DEVICE) for r in range(ranks)]
        for r in range(ranks):
            stream_push(domains[r], handles[r], xs[r])
        for r in range(ranks):
            plan = plan_oracle(padded(case.ids, case.capacity, -1), padded(case.probs, case.capacity, 0), r, 3)
            out = torch.full((plan.row_entry.numel(), hidden), float("nan"), device=DEVICE)
            stream_scatter(domains[r], handles[r], xs[r], out)
            assert torch.equal(out.cpu(), dispatch_oracle(padded(xs, case.capacity, 0), plan))
            world.rank(r).check_errors()


@pytest.mark.parametrize("kind", ["balanced", "dropped", "uneven"])
def test_streamed_combine_gives_the_same_sums(kind: str) -> None:
    """Two launches of it in a row: generations. One rank's sums are read when every rank has sent, so all go twice."""
    hidden, ranks, top_k = 24, 3, 2
    case = make_case(13, kind)
    world = SimulatedWorkspace(ranks, DEVICE)
    domains = [
        NvlinkDomain(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32) for r in range(ranks)
    ]
    handles = [publish(domains[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _meet(domains, "plan_flags")
    for r in range(ranks):
        make_plan(domains[r], handles[r])
    for repeat in range(2):
        ys = [torch.randn(h.ends[-1] if h.ends else int(h.offsets[-1]), hidden, device=DEVICE) for h in handles]
        row_grads = [torch.rand(y.shape[0], device=DEVICE) for y in ys]
        expected, expected_grads = [], []
        for r in range(ranks):
            reduce_push(domains[r], handles[r], ys[r], row_grads[r])
        _meet(domains, "combine_flags")
        for r in range(ranks):
            expected_grads.append(torch.empty_like(case.probs[r]))
            expected.append(reduce(domains[r], handles[r], grads=expected_grads[r]))
        for region in ("inbox", "prob grads"):
            for r in range(ranks):
                domains[r].local(region, torch.float32).fill_(float("nan"))
        # Every rank's pushers before any rank's reducers, which on real ranks run at the same time.
        pushers = 1  # of two programs
        for peer in domains:
            words = peer.chunk_flags.flags.view(-1, ranks)
            words[: peer.stream_chunks] = (repeat + 1) * pushers
        grads = [torch.full_like(p, float("nan")) for p in case.probs]
        for _ in range(2):
            outs = []
            for r in range(ranks):
                before = domains[r].chunk_flags.counter.clone()
                flags = [d.chunk_flags.flags.clone() for d in domains]
                outs.append(stream_combine(domains[r], handles[r], ys[r], row_grads[r], grads=grads[r], programs=2))
                for d, words in zip(domains, flags, strict=True):  # what a rank announces came above
                    grown = d.chunk_flags.flags - words
                    assert grown.view(-1, ranks)[: d.stream_chunks, r].eq(pushers).all()
                    assert grown.sum() == pushers * d.stream_chunks
                    d.chunk_flags.flags.copy_(words)
                assert domains[r].chunk_flags.counter.tolist() == [(repeat + 1) * pushers, 0]
                domains[r].chunk_flags.counter.copy_(before)
        for r in range(ranks):
            domains[r].chunk_flags.counter[0] = (repeat + 1) * pushers
            assert torch.equal(outs[r], expected[r])
            assert torch.equal(grads[r], expected_grads[r])
            world.rank(r).check_errors()


def test_rows_over_capacity_are_counted_and_leave_zeros() -> None:
    hidden, ranks, top_k, limit = 16, 2, 2, 5
    case = make_case(3, "one rank", ranks=ranks, capacity=8)
    world = SimulatedWorkspace(ranks, DEVICE)
    domains = [
        NvlinkDomain(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32) for r in range(ranks)
    ]
    xs = [torch.randn(8, hidden, device=DEVICE) for _ in range(ranks)]
    handles = [publish(domains[r], case.ids[r], case.probs[r], capacity=limit) for r in range(ranks)]
    _meet(domains, "plan_flags")
    for r in range(ranks):
        make_plan(domains[r], handles[r])
        push(domains[r], handles[r], xs[r])
    with pytest.raises(FluidError, match=r"wanted 32 expert rows"):
        domains[0].check_overflow()
    domains[1].check_overflow()
    assert handles[0].offsets.max().item() == limit
    _meet(domains, "dispatch_flags")
    for r in range(ranks):
        out = torch.empty(limit, hidden, device=DEVICE)
        reduce_push(domains[r], handles[r], scatter(domains[r], handles[r], xs[r], out))
    _meet(domains, "combine_flags")
    plan = plan_oracle(padded(case.ids, 8, -1), padded(case.probs, 8, 0), 0, 3)
    kept = torch.where((plan.inverse >= 0) & (plan.inverse < limit), 1.0, 0.0).sum(1).view(ranks, 8)
    for r in range(ranks):
        out = reduce(domains[r], handles[r])
        assert torch.allclose(out.cpu(), xs[r].cpu() * kept[r][:, None])
