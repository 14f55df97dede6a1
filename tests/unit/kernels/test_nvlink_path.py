"""Plan, dispatch and combine kernels against their references: all ranks in one process, the
interpreter on a CPU, random routings.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_fluid.comm import failed_waits
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from megatron_fluid.moe.nvlink.steps import (
    begin_combine,
    make_plan,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
    send_rows,
    stream_push,
    stream_scatter,
)
from tests.support.kernel_references import (
    dispatch_reference,
    plan_reference,
    publish_reference,
    reduce_reference,
)
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = pytest.mark.interpreter

SENT = Schedule(sent_rows=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Case:
    """One routing: ids and probs of every rank (lists of [T_r, K]), tokens a rank, and the
    shape."""

    ids: list[Tensor]
    probs: list[Tensor]
    experts: int
    capacity: int


def make_case(
    seed: int, kind: str, ranks: int = 3, local_experts: int = 3, top_k: int = 2, capacity: int = 16
) -> Case:
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


def test_every_rank_learns_from_the_plan_that_the_tokens_of_one_do_not_fit() -> None:
    """That rank takes part with no token, and what the others sent arrives as ever."""
    ranks, hidden, top_k = 3, 24, 2
    case = make_case(1, "balanced", ranks)
    world = SimulatedWorkspace(ranks, DEVICE)
    all_buffers = [
        NvlinkBuffers(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32)
        for r in range(ranks)
    ]
    more = case.capacity + 5
    for late in (None, 1, 2):
        ids, probs = list(case.ids), list(case.probs)
        if late is not None:
            ids[late] = ids[late].new_zeros(more, top_k)
            probs[late] = probs[late].new_ones(more, top_k)
        handles = [publish(all_buffers[r], ids[r], probs[r]) for r in range(ranks)]
        _synchronize(all_buffers, "plan_flags")
        if late is not None:
            ids[late], probs[late] = ids[late][:0], probs[late][:0]
        padded_ids, padded_probs = padded(ids, case.capacity, -1), padded(probs, case.capacity, 0)
        for r, buffers in enumerate(all_buffers):
            make_plan(buffers, handles[r])
            plan = plan_reference(padded_ids, padded_probs, r, 3)
            assert buffers.read_offsets() == plan.offsets.tolist()
            assert torch.equal(handles[r].inverse.cpu(), plan.inverse)
            assert buffers.most_wanted() == (None if late is None else more)


KINDS = ["balanced", "hot", "empty", "dropped", "uneven", "one rank"]


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 3) for kind in KINDS), ("uneven", 9)])
def test_plan_dispatch_and_combine_equal_their_references(kind: str, ranks: int) -> None:
    """Sums of nine ranks are added up in two turns."""
    seed = KINDS.index(kind)
    hidden, top_k = 24, 2
    case = make_case(seed, kind, ranks)
    world = SimulatedWorkspace(ranks, DEVICE)
    all_buffers = [
        NvlinkBuffers(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32)
        for r in range(ranks)
    ]
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(case.ids[r].shape[0], hidden, generator=g).to(DEVICE) for r in range(ranks)]
    for turn in range(1, 3 if kind == "hot" else 2):  # the second round runs on used buffers
        handles: list[RoutingHandle] = [
            publish(all_buffers[r], case.ids[r], case.probs[r]) for r in range(ranks)
        ]
        _synchronize(all_buffers, "plan_flags")
        for r in range(ranks):
            make_plan(all_buffers[r], handles[r])
        plans = [
            plan_reference(
                padded(case.ids, case.capacity, -1), padded(case.probs, case.capacity, 0), r, 3
            )
            for r in range(ranks)
        ]
        for r, plan in enumerate(plans):
            n = plan.row_entry.numel()
            assert torch.equal(
                handles[r].destinations[: xs[r].shape[0]].cpu(),
                publish_reference(case.ids[r].cpu(), ranks, 3),
            )
            assert torch.equal(handles[r].offsets.cpu(), plan.offsets)
            assert all_buffers[r].read_offsets() == plan.offsets.tolist()
            assert torch.equal(handles[r].row_prob[:n].cpu(), plan.row_prob)
            assert torch.equal(handles[r].inverse.cpu(), plan.inverse)
        for r in range(ranks):
            push(all_buffers[r], handles[r], xs[r])
            assert all_buffers[r].dispatch_flags.counter.item() == turn, (
                "each rank counts each dispatch once"
            )
        _synchronize(all_buffers, "dispatch_flags")
        rows = []
        for r in range(ranks):
            out = torch.full((plans[r].row_entry.numel(), hidden), float("nan"), device=DEVICE)
            _forget(all_buffers, "dispatch_flags", r)
            rows.append(scatter(all_buffers[r], handles[r], xs[r], out))
            assert _signalled(all_buffers, "dispatch_flags", r) == [turn] * ranks
            assert torch.equal(
                rows[r].cpu(), dispatch_reference(padded(xs, case.capacity, 0), plans[r])
            )
        ys = [row * (r + 2.0) for r, row in enumerate(rows)]
        row_grads = [torch.rand(y.shape[0], generator=g).to(DEVICE) for y in ys]
        for r in range(ranks):
            reduce_push(all_buffers[r], handles[r], ys[r], row_grads[r])
        _synchronize(all_buffers, "combine_flags")
        sums = [
            reduce_reference(ys[r].cpu(), plans[r]).view(ranks, case.capacity, hidden)
            for r in range(ranks)
        ]
        for r in range(ranks):
            grads = torch.full(case.probs[r].shape, float("nan"), device=DEVICE)
            _forget(all_buffers, "combine_flags", r)
            out = reduce(all_buffers[r], handles[r], grads=grads)
            assert _signalled(all_buffers, "combine_flags", r) == [turn] * ranks
            expected = torch.zeros(xs[r].shape)
            for d in range(ranks):
                expected += sums[d][r, : xs[r].shape[0]]
            assert torch.equal(out.cpu(), expected)
            expected_grads = torch.zeros(grads.shape)
            for d in range(ranks):
                inverse = (
                    plans[d].inverse.view(ranks, case.capacity, top_k)[r, : xs[r].shape[0]].long()
                )
                if row_grads[d].numel():
                    expected_grads += torch.where(
                        inverse >= 0, row_grads[d].cpu()[inverse.clamp(min=0)], 0.0
                    )
            assert torch.equal(grads.cpu(), expected_grads)
        for r in range(ranks):
            world.rank(r).check_errors()


@pytest.mark.parametrize(
    ("ranks", "local_experts", "top_k", "capacity"),
    [(8, 1, 2, 5), (2, 2, 4, 48), (8, 2, 16, 3), (3, 3, 7, 33), (2, 5, 1, 1), (2, 256, 3, 300)],
)
def test_plans_of_any_number_of_local_experts_equal_their_reference(
    ranks: int, local_experts: int, top_k: int, capacity: int
) -> None:
    """One rank's plan; (2, 256, 3, 300) adds up the counts in more than one step. Some tokens name
    an expert twice."""
    case = make_case(17, "dropped", ranks, local_experts, top_k, capacity)
    for ids in case.ids:
        ids[::3, -1] = ids[::3, 0]
    world = SimulatedWorkspace(ranks, DEVICE)
    all_buffers = [
        NvlinkBuffers(world.rank(r), capacity, 8, top_k, case.experts, torch.float32)
        for r in range(ranks)
    ]
    handles = [publish(all_buffers[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _synchronize(all_buffers, "plan_flags")
    last = ranks - 1
    make_plan(all_buffers[last], handles[last])
    plan = plan_reference(
        padded(case.ids, capacity, -1), padded(case.probs, capacity, 0), last, local_experts
    )
    assert torch.equal(handles[last].offsets.cpu(), plan.offsets)
    assert torch.equal(handles[last].inverse.cpu(), plan.inverse)
    assert torch.equal(handles[last].row_prob[: plan.row_prob.numel()].cpu(), plan.row_prob)
    world.rank(last).check_errors()


@pytest.mark.parametrize("top_k", [2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_sent_one_by_one_add_up_to_their_reference(kind: str, top_k: int) -> None:
    """With the probabilities' gradients, into combine buffers full of what is not to be read; nine
    are added up in two turns."""
    hidden, ranks = 24, 3
    case = make_case(KINDS.index(kind), kind, ranks, 9, top_k)
    world = SimulatedWorkspace(ranks, DEVICE)
    shape = (case.capacity, hidden, top_k, case.experts, torch.float32)
    all_buffers = [NvlinkBuffers(world.rank(r), *shape, schedule=SENT) for r in range(ranks)]
    handles = [publish(all_buffers[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _synchronize(all_buffers, "plan_flags")
    for buffers, handle in zip(all_buffers, handles, strict=True):
        make_plan(buffers, handle)
        handle.ends = buffers.read_offsets()
        for name in ("combine", "prob grads"):
            buffers.local(name, torch.float32).fill_(float("nan"))
    g = torch.Generator().manual_seed(1)
    ys = [torch.randn(handle.buffer_rows, hidden, generator=g).to(DEVICE) for handle in handles]
    row_grads = [torch.rand(handle.buffer_rows, generator=g).to(DEVICE) for handle in handles]
    for r, buffers in enumerate(all_buffers):
        begin_combine(buffers, handles[r], row_grads[r])
        assert buffers.combine_flags.counter.item() == 1, "each rank counts each combine once"
        send_rows(buffers, handles[r], ys[r])
    _synchronize(all_buffers, "combine_flags")
    ids, probs = padded(case.ids, case.capacity, -1), padded(case.probs, case.capacity, 0)
    plans = [plan_reference(ids, probs, r, 9) for r in range(ranks)]
    sums = [
        reduce_reference(ys[r].cpu(), plans[r]).view(ranks, case.capacity, hidden)
        for r in range(ranks)
    ]
    for r, buffers in enumerate(all_buffers):
        tokens = case.ids[r].shape[0]
        out, grads = (
            torch.full((tokens, hidden), float("nan"), device=DEVICE),
            torch.full_like(case.probs[r], float("nan")),
        )
        _forget(all_buffers, "combine_flags", r)
        reduce(buffers, handles[r], out, grads)
        assert _signalled(all_buffers, "combine_flags", r) == [1] * ranks
        expected, expected_grads = torch.zeros(tokens, hidden), torch.zeros(tokens, top_k)
        for d in range(ranks):
            expected += sums[d][r, :tokens]
            inverse = plans[d].inverse.view(ranks, case.capacity, top_k)[r, :tokens].long()
            if row_grads[d].numel():
                expected_grads += torch.where(
                    inverse >= 0, row_grads[d].cpu()[inverse.clamp(min=0)], 0.0
                )
        assert torch.allclose(out.cpu(), expected, atol=1e-6)
        assert torch.equal(grads.cpu(), expected_grads)
        world.rank(r).check_errors()


def test_origins_say_which_choice_a_row_is_of() -> None:
    """Of the most ranks that there may be and a capacity that is no power of two: the last rank's
    are beyond 31 bits."""
    ranks, top_k, capacity = 31, 3, 5
    case = make_case(5, "balanced", ranks, 1, top_k, capacity)
    world = SimulatedWorkspace(ranks, DEVICE)
    all_buffers = [
        NvlinkBuffers(world.rank(r), capacity, 8, top_k, ranks, torch.float32) for r in range(ranks)
    ]
    all_buffers[0].shift = 27
    handles = [publish(all_buffers[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _synchronize(all_buffers, "plan_flags")
    make_plan(all_buffers[0], handles[0])
    plan = plan_reference(padded(case.ids, capacity, -1), padded(case.probs, capacity, 0), 0, 1)
    origins = handles[0].origins[: plan.row_entry.numel()].cpu().long() & 0xFFFFFFFF
    assert origins.max() >= 1 << 31
    assert torch.equal(
        (origins >> 27) * capacity * top_k + (origins & (1 << 27) - 1), plan.row_entry.long()
    )


def _forget(all_buffers: list[NvlinkBuffers], region: str, rank: int) -> None:
    """The other ranks have not heard from `rank` yet."""
    for buffers in all_buffers:
        if buffers.rank != rank:
            getattr(buffers, region).flags[rank] = 0


def _signalled(all_buffers: list[NvlinkBuffers], region: str, rank: int) -> list[int]:
    """What every rank has heard from `rank`: the generation of its last message."""
    return [getattr(buffers, region).flags[rank].item() for buffers in all_buffers]


def _synchronize(all_buffers: list[NvlinkBuffers], region: str) -> None:
    """Signal for every rank before any waits: what concurrency does on real ranks, a sequential
    test does by hand."""
    for buffers in all_buffers:
        flags = getattr(buffers, region)
        for peer in all_buffers:
            getattr(peer, region).flags[buffers.rank] = flags.counter[0]


@pytest.mark.parametrize("kind", ["balanced", "uneven"])
def test_streamed_dispatch_gives_the_same_rows(kind: str) -> None:
    hidden, ranks, top_k = 24, 3, 2
    case = make_case(11, kind)
    world = SimulatedWorkspace(ranks, DEVICE)
    all_buffers = [
        NvlinkBuffers(world.rank(r), case.capacity, hidden, top_k, case.experts, torch.float32)
        for r in range(ranks)
    ]
    handles = [publish(all_buffers[r], case.ids[r], case.probs[r]) for r in range(ranks)]
    _synchronize(all_buffers, "plan_flags")
    for r in range(ranks):
        make_plan(all_buffers[r], handles[r])
    for _ in range(2):
        xs = [torch.randn(case.ids[r].shape[0], hidden).to(DEVICE) for r in range(ranks)]
        for r in range(ranks):
            stream_push(all_buffers[r], handles[r], xs[r])
        for r in range(ranks):
            plan = plan_reference(
                padded(case.ids, case.capacity, -1), padded(case.probs, case.capacity, 0), r, 3
            )
            out = torch.full((plan.row_entry.numel(), hidden), float("nan"), device=DEVICE)
            stream_scatter(all_buffers[r], handles[r], xs[r], out)
            assert torch.equal(out.cpu(), dispatch_reference(padded(xs, case.capacity, 0), plan))
            world.rank(r).check_errors()


@pytest.mark.parametrize("schedule", [NO_OVERLAP, SENT], ids=str)
def test_rows_over_capacity_are_counted_and_leave_zeros(schedule: Schedule) -> None:
    hidden, ranks, top_k, limit = 16, 2, 2, 5
    case = make_case(3, "one rank", ranks=ranks, capacity=8)
    world = SimulatedWorkspace(ranks, DEVICE)
    shape = (case.capacity, hidden, top_k, case.experts, torch.float32)
    all_buffers = [NvlinkBuffers(world.rank(r), *shape, schedule=schedule) for r in range(ranks)]
    xs = [torch.randn(8, hidden, device=DEVICE) for _ in range(ranks)]
    handles = [
        publish(all_buffers[r], case.ids[r], case.probs[r], capacity=limit) for r in range(ranks)
    ]
    _synchronize(all_buffers, "plan_flags")
    for r in range(ranks):
        make_plan(all_buffers[r], handles[r])
        push(all_buffers[r], handles[r], xs[r])
        for name in ("combine", "prob grads"):
            all_buffers[r].local(name, torch.float32).fill_(float("nan"))
    with pytest.raises(FluidError, match=r"wanted 32 expert rows"):
        all_buffers[0].check_overflow()
    all_buffers[1].check_overflow()
    assert handles[0].offsets.max().item() == limit
    _synchronize(all_buffers, "dispatch_flags")
    for r in range(ranks):
        rows = scatter(all_buffers[r], handles[r], xs[r], torch.empty(limit, hidden, device=DEVICE))
        row_grads = torch.ones(limit, device=DEVICE)
        if schedule.sent_rows:
            begin_combine(all_buffers[r], handles[r], row_grads)
            send_rows(all_buffers[r], handles[r], rows)
        else:
            reduce_push(all_buffers[r], handles[r], rows, row_grads)
    _synchronize(all_buffers, "combine_flags")
    plan = plan_reference(padded(case.ids, 8, -1), padded(case.probs, 8, 0), 0, 3)
    kept = torch.where((plan.inverse >= 0) & (plan.inverse < limit), 1.0, 0.0).view(ranks, 8, top_k)
    for r in range(ranks):
        out, grads = torch.empty_like(xs[r]), torch.empty_like(case.probs[r])
        reduce(all_buffers[r], handles[r], out, grads)
        assert torch.allclose(out.cpu(), xs[r].cpu() * kept[r].sum(1)[:, None])
        assert torch.equal(grads.cpu(), kept[r])


@contextmanager
def planned(case: Case, factors: tuple[float, ...]) -> Iterator[list[NvlinkBuffers]]:
    """The buffers of all ranks after one plan with room of the first factor, which `raise_overflow`
    has been told, and the others."""
    ranks = len(case.ids)
    world = SimulatedWorkspace(ranks, DEVICE, watched=True)
    shape = (case.capacity, 16, 2, case.experts, torch.float32)
    all_buffers = [NvlinkBuffers(world.rank(r), *shape) for r in range(ranks)]
    handles = []
    for buffers, ids, probs in zip(all_buffers, case.ids, case.probs, strict=True):
        for factor in (*factors, *factors):  # of two calls
            buffers.raise_overflow(factor, "moe_capacity_factor")
        handles.append(publish(buffers, ids, probs, buffers.bounded_rows(factors[0])))
    _synchronize(all_buffers, "plan_flags")
    for buffers, handle in zip(all_buffers, handles, strict=True):
        make_plan(buffers, handle)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    yield all_buffers
    for rank in range(ranks):
        failed_waits.forget(world.rank(rank).errors)


@pytest.fixture
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_waits, "look", lambda now: None)


@pytest.mark.usefixtures("_no_thread")
def test_more_rows_than_the_factor_allows_are_an_error_on_the_rank_that_is_short_of_room() -> None:
    """All of 2 ranks' 8 tokens go to the first rank, twice: 32 rows, where 16 are balanced."""
    case = make_case(3, "one rank", ranks=2, capacity=8)
    with planned(case, (1.25,)) as (first, second):
        words = (
            r"^moe_capacity_factor: found 1.25, allowed: at least 2, since rank 0 of its group had "
            r"room for 20 expert rows and the routing sent it 32, "
        )
        second.workspace.check_errors()
        # A layer on plain torch that shares the buffers says it, too, and takes nothing away.
        with pytest.raises(FluidError, match="wanted 32 expert rows"):
            first.check_overflow()
        for raises in (first.workspace.check_errors, failed_waits.check_for_failed_waits):
            with pytest.raises(ConfigError, match=words):
                raises()


@pytest.mark.usefixtures("_no_thread")
@pytest.mark.parametrize("factor", [2.0, 7.5, 1e308])
def test_a_routing_that_fits_the_factor_is_no_error(factor: float) -> None:
    case = make_case(3, "one rank", ranks=2, capacity=8)
    with planned(case, (factor,)) as (first, _):
        assert first.bounded_rows(factor) == first.most_rows == 32
        failed_waits.check_for_failed_waits()


@pytest.mark.usefixtures("_no_thread")
def test_an_overflow_is_registered_once_for_each_factor_and_names_one_that_was_too_small() -> None:
    case = make_case(3, "one rank", ranks=2, capacity=8)
    with planned(case, (1.25, 2.0, 1.5)) as (first, _):
        further = first.workspace.errors.further
        for factor in (2.0, 1.25, 1.5):
            first.raise_overflow(factor, "moe_capacity_factor")
        assert len(further) == 3
        found = [look() for look in further]
        assert [error is None for error in found] == [False, True, False]


@pytest.mark.usefixtures("_no_thread")
def test_an_overflow_is_told_when_the_buffers_and_their_workspace_are_gone() -> None:
    case = make_case(3, "one rank", ranks=2, capacity=8)
    with planned(case, (1.0,)) as all_buffers:
        errors = [buffers.workspace.errors for buffers in all_buffers]
        gone = [weakref.ref(thing) for b in all_buffers for thing in (b, b.workspace)]
    world = SimulatedWorkspace(2, DEVICE, watched=True)
    gone.append(weakref.ref(world.rank(0)))
    del all_buffers, world
    gc.collect()
    assert [thing() for thing in gone] == [None] * 5
    assert isinstance(errors[0].error(), ConfigError) and errors[1].error() is None
