"""Plan, dispatch and combine kernels against their references: all ranks in one process, the
interpreter on a CPU, random routings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import FluidError
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle
from megatron_fluid.moe.nvlink.buffers import (
    NvlinkBuffers,
    make_plan,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
)
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from megatron_fluid.moe.nvlink.sent_rows import begin_combine, send_rows
from tests.support.kernel_references import (
    PlanReference,
    dispatch_reference,
    plan_reference,
    publish_reference,
    reduce_reference,
)
from tests.support.nvlink_calls import KINDS, spread_routing
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
        chosen = spread_routing(kind, capacity, experts, top_k, rank, ranks, g)
        ids.append(chosen.to(DEVICE))
        probs.append(torch.rand(chosen.shape, generator=g).to(DEVICE))
    return Case(ids, probs, experts, capacity)


def padded(parts: list[Tensor], capacity: int, fill: float) -> Tensor:
    """[W, C, ...] from one [T_r, ...] per rank."""
    out = torch.full((len(parts), capacity, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        out[rank, : part.shape[0]] = part.cpu()
    return out


def plan_of(case: Case, rank: int) -> PlanReference:
    ids, probs = padded(case.ids, case.capacity, -1), padded(case.probs, case.capacity, 0)
    return plan_reference(ids, probs, rank, case.experts // len(case.ids))


class Ranks:
    """The buffers of all ranks, and after `plan` their handles: each step runs for all ranks."""

    def __init__(self, case: Case, hidden: int, schedule: Schedule = NO_OVERLAP) -> None:
        self.case, self.count, self.hidden = case, len(case.ids), hidden
        self.world = SimulatedWorkspace(self.count, DEVICE)
        shape = (case.capacity, hidden, case.probs[0].shape[1], case.experts, torch.float32)
        self.buffers = [
            NvlinkBuffers(self.world.rank(r), *shape, schedule=schedule) for r in range(self.count)
        ]

    def publish(self, capacity: int | None = None) -> list[RoutingHandle]:
        triples = zip(self.buffers, self.case.ids, self.case.probs, strict=True)
        self.handles = [publish(*triple, capacity=capacity) for triple in triples]
        self.synchronize("plan_flags")
        return self.handles

    def plan(self, capacity: int | None = None) -> None:
        self.publish(capacity)
        for buffers, handle in zip(self.buffers, self.handles, strict=True):
            make_plan(buffers, handle)

    def tokens(self, seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        return [torch.randn(len(ids), self.hidden, generator=g).to(DEVICE) for ids in self.case.ids]

    def synchronize(self, region: str) -> None:
        """Signal for every rank before any waits: what concurrency does on real ranks, a sequential
        test does by hand."""
        for buffers in self.buffers:
            flags = getattr(buffers, region)
            for peer in self.buffers:
                getattr(peer, region).flags[buffers.rank] = flags.counter[0]

    @contextmanager
    def signals(self, region: str, rank: int, generation: int) -> Iterator[None]:
        """`rank` tells every rank of this generation inside."""
        for buffers in self.buffers:
            if buffers.rank != rank:
                getattr(buffers, region).flags[rank] = 0
        yield
        heard = [getattr(buffers, region).flags[rank].item() for buffers in self.buffers]
        assert heard == [generation] * self.count

    def check_combined(
        self, ys: list[Tensor], row_grads: list[Tensor], generation: int, atol: float
    ) -> None:
        """What `reduce` gives each rank: its tokens' rows summed over all ranks, and the gradients
        of its probabilities."""
        self.synchronize("combine_flags")
        plans = [plan_of(self.case, r) for r in range(self.count)]
        capacity, top_k = self.case.capacity, self.case.probs[0].shape[1]
        for r, (buffers, handle) in enumerate(zip(self.buffers, self.handles, strict=True)):
            tokens = len(self.case.ids[r])
            out = torch.full((tokens, self.hidden), float("nan"), device=DEVICE)
            grads = torch.full((tokens, top_k), float("nan"), device=DEVICE)
            with self.signals("combine_flags", r, generation):
                reduce(buffers, handle, out, grads)
            expected, expected_grads = torch.zeros(out.shape), torch.zeros(grads.shape)
            for plan, y, row_grad in zip(plans, ys, row_grads, strict=True):
                sums = reduce_reference(y.cpu(), plan).view(self.count, capacity, self.hidden)
                expected += sums[r, :tokens]
                inverse = plan.inverse.view(self.count, capacity, top_k)[r, :tokens].long()
                if row_grad.numel():
                    found = row_grad.cpu()[inverse.clamp(min=0)]
                    expected_grads += torch.where(inverse >= 0, found, 0.0)
            torch.testing.assert_close(out.cpu(), expected, rtol=10 * atol, atol=atol)
            assert torch.equal(grads.cpu(), expected_grads)
            self.world.rank(r).check_errors()


def test_every_rank_learns_from_the_plan_that_the_tokens_of_one_do_not_fit() -> None:
    """That rank takes part with no token, and what the others sent arrives as ever."""
    case = make_case(1, "balanced")
    ranks, ids, probs = Ranks(case, 24), case.ids, case.probs
    more = case.capacity + 5
    for late in (None, 1, 2):
        case.ids, case.probs = list(ids), list(probs)
        if late is not None:
            case.ids[late] = ids[late].new_zeros(more, 2)
            case.probs[late] = probs[late].new_ones(more, 2)
        handles = ranks.publish()
        if late is not None:
            case.ids[late], case.probs[late] = ids[late][:0], probs[late][:0]
        for r, buffers in enumerate(ranks.buffers):
            make_plan(buffers, handles[r])
            plan = plan_of(case, r)
            assert buffers.read_offsets() == plan.offsets.tolist()
            assert torch.equal(handles[r].inverse.cpu(), plan.inverse)
            assert buffers.most_wanted() == (None if late is None else more)


@pytest.mark.parametrize(("kind", "count"), [*((kind, 3) for kind in KINDS), ("uneven", 9)])
def test_plan_dispatch_and_combine_equal_their_references(kind: str, count: int) -> None:
    """Sums of nine ranks are added up in two turns."""
    seed = KINDS.index(kind)
    case = make_case(seed, kind, count)
    ranks = Ranks(case, 24)
    xs = ranks.tokens(seed)
    plans = [plan_of(case, r) for r in range(count)]
    for turn in range(1, 3 if kind == "hot" else 2):  # the second round runs on used buffers
        ranks.plan()
        for r, (buffers, handle) in enumerate(zip(ranks.buffers, ranks.handles, strict=True)):
            plan, tokens = plans[r], len(xs[r])
            sent_to = publish_reference(case.ids[r].cpu(), count, 3)
            assert torch.equal(handle.destinations[:tokens].cpu(), sent_to)
            assert torch.equal(handle.offsets.cpu(), plan.offsets)
            assert buffers.read_offsets() == plan.offsets.tolist()
            assert torch.equal(handle.row_prob[: plan.row_entry.numel()].cpu(), plan.row_prob)
            assert torch.equal(handle.inverse.cpu(), plan.inverse)
            push(buffers, handle, xs[r])
            assert buffers.dispatch_flags.counter.item() == turn, "each dispatch counts once"
        ranks.synchronize("dispatch_flags")
        ys = []
        for r, (buffers, handle) in enumerate(zip(ranks.buffers, ranks.handles, strict=True)):
            out = torch.full((plans[r].row_entry.numel(), 24), float("nan"), device=DEVICE)
            with ranks.signals("dispatch_flags", r, turn):
                rows = scatter(buffers, handle, xs[r], out)
            expected = dispatch_reference(padded(xs, case.capacity, 0), plans[r])
            assert torch.equal(rows.cpu(), expected)
            ys.append(rows * (r + 2.0))
        g = torch.Generator().manual_seed(seed)
        row_grads = [torch.rand(y.shape[0], generator=g).to(DEVICE) for y in ys]
        for r in range(count):
            reduce_push(ranks.buffers[r], ranks.handles[r], ys[r], row_grads[r])
        ranks.check_combined(ys, row_grads, turn, 0.0)


@pytest.mark.parametrize(
    ("count", "local_experts", "top_k", "capacity"),
    [(8, 1, 2, 5), (2, 2, 4, 48), (8, 2, 16, 3), (3, 3, 7, 33), (2, 5, 1, 1), (2, 256, 3, 300)],
)
def test_plans_of_any_number_of_local_experts_equal_their_reference(
    count: int, local_experts: int, top_k: int, capacity: int
) -> None:
    """One rank's plan; (2, 256, 3, 300) adds up the counts in more than one step. Some tokens name
    an expert twice."""
    case = make_case(17, "dropped", count, local_experts, top_k, capacity)
    for ids in case.ids:
        ids[::3, -1] = ids[::3, 0]
    ranks, last = Ranks(case, 8), count - 1
    handle = ranks.publish()[last]
    make_plan(ranks.buffers[last], handle)
    plan = plan_of(case, last)
    assert torch.equal(handle.offsets.cpu(), plan.offsets)
    assert torch.equal(handle.inverse.cpu(), plan.inverse)
    assert torch.equal(handle.row_prob[: plan.row_prob.numel()].cpu(), plan.row_prob)
    ranks.world.rank(last).check_errors()


@pytest.mark.parametrize("top_k", [2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_sent_one_by_one_add_up_to_their_reference(kind: str, top_k: int) -> None:
    """With the probabilities' gradients, into combine buffers full of what is not to be read; nine
    are added up in two turns."""
    ranks = Ranks(make_case(KINDS.index(kind), kind, 3, 9, top_k), 24, SENT)
    ranks.plan()
    g = torch.Generator().manual_seed(1)
    ys, row_grads = [], []
    for buffers, handle in zip(ranks.buffers, ranks.handles, strict=True):
        handle.ends = buffers.read_offsets()
        for name in ("combine", "prob grads"):
            buffers.local(name, torch.float32).fill_(float("nan"))
        ys.append(torch.randn(handle.buffer_rows, 24, generator=g).to(DEVICE))
        row_grads.append(torch.rand(handle.buffer_rows, generator=g).to(DEVICE))
    for r, (buffers, handle) in enumerate(zip(ranks.buffers, ranks.handles, strict=True)):
        begin_combine(buffers, handle, row_grads[r])
        assert buffers.combine_flags.counter.item() == 1, "each rank counts each combine once"
        send_rows(buffers, handle, ys[r])
    ranks.check_combined(ys, row_grads, 1, 1e-6)


def test_origins_say_which_choice_a_row_is_of() -> None:
    """Of the most ranks that there may be and a capacity that is no power of two: the last rank's
    are beyond 31 bits."""
    case = make_case(5, "balanced", 31, 1, 3, 5)
    ranks = Ranks(case, 8)
    ranks.buffers[0].shift = 27
    handle = ranks.publish()[0]
    make_plan(ranks.buffers[0], handle)
    plan = plan_of(case, 0)
    origins = handle.origins[: plan.row_entry.numel()].cpu().long() & 0xFFFFFFFF
    assert origins.max() >= 1 << 31
    assert torch.equal((origins >> 27) * 15 + (origins & (1 << 27) - 1), plan.row_entry.long())


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("kind", ["balanced", "uneven"])
def test_streamed_and_narrow_rows_arrive_alike(kind: str, streamed: bool) -> None:
    """In the buffers of wider rows, as packed fp8 tokens are."""
    case = make_case(11, kind)
    ranks = Ranks(case, 24)
    ranks.plan()
    for turn, width in enumerate((24, 8)):
        xs = [x[:, :width].contiguous() for x in ranks.tokens(turn)]
        for buffers, handle, x in zip(ranks.buffers, ranks.handles, xs, strict=True):
            push(buffers, handle, x, streamed=streamed)
        if not streamed:
            ranks.synchronize("dispatch_flags")
        for r, (buffers, handle) in enumerate(zip(ranks.buffers, ranks.handles, strict=True)):
            plan = plan_of(case, r)
            out = torch.full((plan.row_entry.numel(), width), float("nan"), device=DEVICE)
            scatter(buffers, handle, xs[r], out, streamed=streamed)
            assert torch.equal(out.cpu(), dispatch_reference(padded(xs, case.capacity, 0), plan))
            ranks.world.rank(r).check_errors()


@pytest.mark.parametrize("schedule", [NO_OVERLAP, SENT], ids=str)
def test_rows_over_capacity_are_counted_and_leave_zeros(schedule: Schedule) -> None:
    limit, case = 5, make_case(3, "one rank", ranks=2, capacity=8)
    ranks = Ranks(case, 16, schedule)
    xs = ranks.tokens(3)
    ranks.plan(limit)
    for buffers, handle, x in zip(ranks.buffers, ranks.handles, xs, strict=True):
        push(buffers, handle, x)
        for name in ("combine", "prob grads"):
            buffers.local(name, torch.float32).fill_(float("nan"))
    with pytest.raises(FluidError, match=r"wanted 32 expert rows"):
        ranks.buffers[0].check_overflow()
    ranks.buffers[1].check_overflow()
    assert ranks.handles[0].offsets.max().item() == limit
    ranks.synchronize("dispatch_flags")
    for buffers, handle, x in zip(ranks.buffers, ranks.handles, xs, strict=True):
        rows = scatter(buffers, handle, x, torch.empty(limit, 16, device=DEVICE))
        row_grads = torch.ones(limit, device=DEVICE)
        if schedule.sent_rows:
            begin_combine(buffers, handle, row_grads)
            send_rows(buffers, handle, rows)
        else:
            reduce_push(buffers, handle, rows, row_grads)
    ranks.synchronize("combine_flags")
    inverse = plan_of(case, 0).inverse
    kept = torch.where((inverse >= 0) & (inverse < limit), 1.0, 0.0).view(2, 8, 2)
    for r, x in enumerate(xs):
        out, grads = torch.empty_like(x), torch.empty_like(case.probs[r])
        reduce(ranks.buffers[r], ranks.handles[r], out, grads)
        assert torch.allclose(out.cpu(), x.cpu() * kept[r].sum(1)[:, None])
        assert torch.equal(grads.cpu(), kept[r])
