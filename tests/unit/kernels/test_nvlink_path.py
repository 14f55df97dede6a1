"""Plan, dispatch and combine kernels against their references: all ranks in one process, the
interpreter on a CPU, random routings.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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


def padded(parts: list[Tensor], capacity: int, fill: float) -> Tensor:
    """[W, C, ...] from one [T_r, ...] per rank."""
    out = torch.full((len(parts), capacity, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        out[rank, : part.shape[0]] = part.cpu()
    return out


class Ranks:
    """A drawn routing on all ranks: ids and probs of each (lists of [T_r, K]), their buffers, and
    after `plan` their handles. Each step runs for all ranks."""

    def __init__(
        self, kind: str, seed: int = 1, count: int = 3, local_experts: int = 3, top_k: int = 2,
        capacity: int = 16, *, hidden: int = 24, schedule: Schedule = NO_OVERLAP,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.count, self.local_experts = count, local_experts
        self.top_k, self.capacity, self.hidden = top_k, capacity, hidden
        self.ids, self.probs = list[Tensor](), list[Tensor]()
        experts = count * local_experts
        for rank in range(count):
            chosen = spread_routing(kind, capacity, experts, top_k, rank, count, g)
            self.ids.append(chosen.to(DEVICE))
            self.probs.append(torch.rand(chosen.shape, generator=g).to(DEVICE))
        self.world = SimulatedWorkspace(count, DEVICE)
        shape = (capacity, hidden, top_k, experts, torch.float32)
        spaces = map(self.world.rank, range(count))
        self.buffers = [NvlinkBuffers(space, *shape, schedule=schedule) for space in spaces]

    def publish(self, capacity: int | None = None) -> list[RoutingHandle]:
        triples = zip(self.buffers, self.ids, self.probs, strict=True)
        self.handles = [publish(*triple, capacity=capacity) for triple in triples]
        self.synchronize("plan_flags")
        return self.handles

    def each(self) -> list[tuple[NvlinkBuffers, RoutingHandle]]:
        return list(zip(self.buffers, self.handles, strict=True))

    def plan(self, capacity: int | None = None) -> None:
        self.publish(capacity)
        for buffers, handle in self.each():
            make_plan(buffers, handle)

    def reference(self, rank: int) -> PlanReference:
        ids, probs = padded(self.ids, self.capacity, -1), padded(self.probs, self.capacity, 0)
        return plan_reference(ids, probs, rank, self.local_experts)

    def check_plan(self, rank: int) -> None:
        plan, handle = self.reference(rank), self.handles[rank]
        assert self.buffers[rank].read_offsets() == plan.offsets.tolist()
        assert torch.equal(handle.offsets.cpu(), plan.offsets)
        assert torch.equal(handle.inverse.cpu(), plan.inverse)
        assert torch.equal(handle.row_prob[: plan.row_prob.numel()].cpu(), plan.row_prob)
        self.world.rank(rank).check_errors()

    def tokens(self, seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        return [torch.randn(len(ids), self.hidden, generator=g).to(DEVICE) for ids in self.ids]

    def dispatched(self, rank: int, xs: list[Tensor], streamed: bool = False) -> Tensor:
        """The rows of this rank's experts, as they should be."""
        plan = self.reference(rank)
        out = torch.full((plan.row_entry.numel(), xs[rank].shape[1]), float("nan"), device=DEVICE)
        scatter(self.buffers[rank], self.handles[rank], xs[rank], out, streamed=streamed)
        assert torch.equal(out.cpu(), dispatch_reference(padded(xs, self.capacity, 0), plan))
        self.world.rank(rank).check_errors()
        return out

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
        plans = [self.reference(r) for r in range(self.count)]
        capacity, top_k = self.capacity, self.top_k
        for r, (buffers, handle) in enumerate(self.each()):
            tokens = len(self.ids[r])
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
    ranks = Ranks("balanced")
    (ids, probs), more = (ranks.ids, ranks.probs), ranks.capacity + 5
    for late in (None, 1, 2):
        ranks.ids, ranks.probs = list(ids), list(probs)
        if late is not None:
            ranks.ids[late] = ids[late].new_zeros(more, 2)
            ranks.probs[late] = probs[late].new_ones(more, 2)
        ranks.publish()
        if late is not None:
            ranks.ids[late], ranks.probs[late] = ids[late][:0], probs[late][:0]
        for r, (buffers, handle) in enumerate(ranks.each()):
            make_plan(buffers, handle)
            ranks.check_plan(r)
            assert buffers.most_wanted() == (None if late is None else more)


@pytest.mark.parametrize(
    ("kind", "count", "capacity"), [*((kind, 3, 16) for kind in KINDS), ("uneven", 9, 7)]
)
def test_plan_dispatch_and_combine_equal_their_references(
    kind: str, count: int, capacity: int
) -> None:
    """Sums of nine ranks are added up in two turns."""
    seed = KINDS.index(kind)
    ranks = Ranks(kind, seed, count, capacity=capacity)
    xs = ranks.tokens(seed)
    for turn in range(1, 3 if kind == "hot" else 2):  # the second round runs on used buffers
        ranks.plan()
        for r, (buffers, handle) in enumerate(ranks.each()):
            sent_to = publish_reference(ranks.ids[r].cpu(), count, 3)
            assert torch.equal(handle.destinations[: len(xs[r])].cpu(), sent_to)
            ranks.check_plan(r)
            push(buffers, handle, xs[r])
            assert buffers.dispatch_flags.counter.item() == turn, "each dispatch counts once"
        ranks.synchronize("dispatch_flags")
        ys = []
        for r in range(count):
            with ranks.signals("dispatch_flags", r, turn):
                ys.append(ranks.dispatched(r, xs) * (r + 2.0))
        g = torch.Generator().manual_seed(seed)
        row_grads = [torch.rand(y.shape[0], generator=g).to(DEVICE) for y in ys]
        for each, y, row_grad in zip(ranks.each(), ys, row_grads, strict=True):
            reduce_push(*each, y, row_grad)
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
    ranks = Ranks("dropped", 17, count, local_experts, top_k, capacity, hidden=8)
    for ids in ranks.ids:
        ids[::3, -1] = ids[::3, 0]
    make_plan(ranks.buffers[-1], ranks.publish()[-1])
    ranks.check_plan(count - 1)


@pytest.mark.parametrize(
    ("kind", "top_k"), [*((kind, 2) for kind in KINDS), ("dropped", 9), ("uneven", 9)]
)
def test_rows_that_are_sent_one_by_one_add_up_to_their_reference(kind: str, top_k: int) -> None:
    """With the probabilities' gradients, into combine buffers full of what is not to be read; nine
    are added up in two turns."""
    ranks = Ranks(kind, KINDS.index(kind), 3, 9, top_k, schedule=SENT)
    ranks.plan()
    g = torch.Generator().manual_seed(1)
    ys, row_grads = [], []
    for buffers, handle in ranks.each():
        handle.ends = buffers.read_offsets()
        for name in ("combine", "prob grads"):
            buffers.local(name, torch.float32).fill_(float("nan"))
        ys.append(torch.randn(handle.buffer_rows, 24, generator=g).to(DEVICE))
        row_grads.append(torch.rand(handle.buffer_rows, generator=g).to(DEVICE))
    for (buffers, handle), y, row_grad in zip(ranks.each(), ys, row_grads, strict=True):
        begin_combine(buffers, handle, row_grad)
        assert buffers.combine_flags.counter.item() == 1, "each rank counts each combine once"
        send_rows(buffers, handle, y)
    ranks.check_combined(ys, row_grads, 1, 1e-6)


def test_origins_say_which_choice_a_row_is_of() -> None:
    """Of so many ranks that the last one's are beyond 31 bits; the capacity is no power of two."""
    ranks = Ranks("balanced", 5, 17, 1, 3, 5, hidden=8)
    ranks.buffers[0].shift = 27
    handle, plan = ranks.publish()[0], ranks.reference(0)
    make_plan(ranks.buffers[0], handle)
    origins = handle.origins[: plan.row_entry.numel()].cpu().long() & 0xFFFFFFFF
    assert origins.max() >= 1 << 31
    assert torch.equal((origins >> 27) * 15 + (origins & (1 << 27) - 1), plan.row_entry.long())


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("kind", ["balanced", "uneven"])
def test_streamed_and_narrow_rows_arrive_alike(kind: str, streamed: bool) -> None:
    """In the buffers of wider rows, as packed fp8 tokens are."""
    ranks = Ranks(kind, 11)
    ranks.plan()
    for turn, width in enumerate((24, 8)):
        xs = [x[:, :width].contiguous() for x in ranks.tokens(turn)]
        for each, x in zip(ranks.each(), xs, strict=True):
            push(*each, x, streamed=streamed)
        if not streamed:
            ranks.synchronize("dispatch_flags")
        for r in range(ranks.count):
            ranks.dispatched(r, xs, streamed)


@pytest.mark.parametrize("schedule", [NO_OVERLAP, SENT], ids=str)
def test_rows_over_capacity_are_counted_and_leave_zeros(schedule: Schedule) -> None:
    limit, ranks = 5, Ranks("one rank", 3, 2, capacity=8, hidden=16, schedule=schedule)
    xs = ranks.tokens(3)
    ranks.plan(limit)
    for (buffers, handle), x in zip(ranks.each(), xs, strict=True):
        push(buffers, handle, x)
        for name in ("combine", "prob grads"):
            buffers.local(name, torch.float32).fill_(float("nan"))
    with pytest.raises(FluidError, match=r"wanted 32 expert rows"):
        ranks.buffers[0].check_overflow()
    ranks.buffers[1].check_overflow()
    assert ranks.handles[0].offsets.max().item() == limit
    ranks.synchronize("dispatch_flags")
    for (buffers, handle), x in zip(ranks.each(), xs, strict=True):
        rows = scatter(buffers, handle, x, torch.empty(limit, 16, device=DEVICE))
        row_grads = torch.ones(limit, device=DEVICE)
        if schedule.sent_rows:
            begin_combine(buffers, handle, row_grads)
            send_rows(buffers, handle, rows)
        else:
            reduce_push(buffers, handle, rows, row_grads)
    ranks.synchronize("combine_flags")
    inverse = ranks.reference(0).inverse
    kept = torch.where((inverse >= 0) & (inverse < limit), 1.0, 0.0).view(2, 8, 2)
    for r, x in enumerate(xs):
        out, grads = torch.empty_like(x), torch.empty_like(ranks.probs[r])
        reduce(ranks.buffers[r], ranks.handles[r], out, grads)
        assert torch.allclose(out.cpu(), x.cpu() * kept[r].sum(1)[:, None])
        assert torch.equal(grads.cpu(), kept[r])
