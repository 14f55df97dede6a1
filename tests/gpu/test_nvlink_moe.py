"""The NVLink MoE path on GPUs (torchrun -m pytest). Every test asserts the same on all ranks
(`agree`): one that failed alone would leave the others waiting. The oracle is in fp32.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.errors import FluidError
from megatron_fluid.moe.autograd import run_experts
from megatron_fluid.moe.call import ExpertCall
from megatron_fluid.moe.nvlink import transport
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.transport import NvlinkBackend, NvlinkTransport
from megatron_fluid.moe.transport import LayerShape
from tests.support.expert_calls import nvlink_moe
from tests.support.fp8_reference import cast_rows, restore_rows
from tests.support.nvlink_calls import (
    CANDIDATES,
    KINDS,
    NEEDS_TORCHRUN,
    SHAPES,
    Call,
    buffers_of,
    fluid,
    gaps,
    make_call,
    oracle,
    pooled_gaps,
    results,
    symmetric_memory_of_the_job,
    unequal,
)

HOPPER = torch.cuda.is_available() and is_hopper(0)
pytestmark = NEEDS_TORCHRUN
space = pytest.fixture(symmetric_memory_of_the_job, scope="module")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_every_gradient_agree_with_the_reference(
    space: SymmetricWorkspace, shape: tuple, kind: str
) -> None:
    tokens, hidden, _, experts, top_k = shape
    buffers = NvlinkBuffers(space, tokens, hidden, top_k, experts)
    for seed in range(3):
        calls = [
            make_call(seed, kind, r, space.world_size, *shape) for r in range(space.world_size)
        ]
        found, expected = fluid(buffers, calls[space.rank]), oracle(calls, space.rank)
        torch.cuda.synchronize()
        space.check_errors()
        limits = {"y": 1e-2, "dx": 2e-2, "dprobs": 2e-2, "dw1": 2e-2, "dw2": 1e-2}
        for name, gap in gaps(found, expected).items():
            assert gap < limits[name], f"seed {seed}: {name} differs by {gap}"


def test_buffers_grow_with_token_counts_that_differ_by_rank_and_call(
    space: SymmetricWorkspace,
) -> None:
    """All forwards before all backwards, as in a pipeline; some rank may have no token."""
    _, hidden, ffn, experts, top_k = SHAPES[0]
    world, rank = space.world_size, space.rank
    shape = LayerShape(
        group=dist.group.WORLD, num_experts=experts, top_k=top_k, ffn=ffn, name="moe"
    )
    backend = NvlinkBackend(shape, None)  # type: ignore[arg-type]
    done, sizes = [], set()
    for number, most in enumerate((8, 64, 3, 500, 90, 700, 0)):
        counts = [(most, most // 3, 0)[(r + number) % min(3, world)] for r in range(world)]
        calls = [
            make_call(number, "balanced", r, world, counts[r], hidden, ffn, experts, top_k)
            for r in range(world)
        ]
        mine = calls[rank]
        leaves = [t.clone().requires_grad_() for t in (mine.x, mine.probs, mine.w1, mine.w2)]
        x, probs, w1, w2 = leaves
        make = backend.plan(x, mine.ids, probs, experts=None, again=False)
        call = ExpertCall(x=x, probs=probs, w1=w1, w2=w2, num_experts=experts // world)
        y = run_experts(call, make())
        assert backend.buffers is not None
        sizes.add(backend.buffers.max_tokens)
        done.append((y, leaves, mine.grad, oracle(calls, rank)))
    assert sizes == {8, 64, 500, 700}
    for number, (y, leaves, grad, expected) in enumerate(done):
        found = (y.detach(), *torch.autograd.grad(y, leaves, grad))
        for name, gap in gaps(found, expected).items():
            assert gap < 2e-2, f"call {number}: {name} differs by {gap}"


def test_rows_that_are_sent_are_awaited_and_overwrite_nothing_that_is_still_to_be_read(
    space: SymmetricWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls back to back, forward and backward; each rank in turn sends late, or adds up late what
    came in time."""
    shape = SHAPES[1]
    plain, sent = (buffers_of(space, shape, s) for s in (Schedule(), Schedule(sent_rows=True)))
    turns = itertools.count()

    def late(patch: pytest.MonkeyPatch, name: str) -> None:
        step = getattr(transport, name)

        def delayed(*arguments: Any) -> Any:
            if next(turns) % (space.world_size + 1) == space.rank:
                torch.cuda._sleep(4_000_000)
            return step(*arguments)

        patch.setattr(transport, name, delayed)

    for kind in ("balanced", "uneven"):
        calls = [
            make_call(seed, kind, space.rank, space.world_size, *shape) for seed in (31, 32, 33)
        ]
        expected = [fluid(plain, call) for call in calls]
        with monkeypatch.context() as patch:
            for name in ("begin_combine", "reduce"):
                late(patch, name)
            found = [fluid(sent, call) for call in calls]
        torch.cuda.synchronize()
        space.check_errors()
        for call, right in zip(found, expected, strict=True):
            for name, gap in gaps(call, right).items():
                assert gap < 1e-2, f"{kind}: {name} differs by {gap}"


def test_runs_repeat_bitwise(space: SymmetricWorkspace) -> None:
    shape = (512, 1024, 256, 32, 8)
    buffers = buffers_of(space, shape)
    call = make_call(9, "balanced", space.rank, space.world_size, *shape)
    first = fluid(buffers, call)
    for _ in range(5):
        assert not unequal(fluid(buffers, call), first)


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
def test_bounded_mode_equals_exact_mode_and_reports_overflow(
    space: SymmetricWorkspace, schedule: Schedule
) -> None:
    shape = (128, 512, 128, 16, 4)
    buffers = buffers_of(space, shape, schedule)
    call = make_call(3, "balanced", space.rank, space.world_size, *shape)
    exact, bounded = fluid(buffers, call), fluid(buffers, call, capacity=buffers.most_rows)
    assert not unequal(bounded, exact)
    torch.cuda.synchronize()
    buffers.check_overflow()
    buffers.local("combine", buffers.dtype).fill_(float("nan"))
    assert all(
        bool(value.isfinite().all())
        for value in results(fluid(buffers, call, capacity=64)).values()
    )
    torch.cuda.synchronize()
    with pytest.raises(FluidError, match="more than the capacity"):
        buffers.check_overflow()


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(sent_rows=True)], ids=str)
@pytest.mark.parametrize("layout", ["apart", "neighbours", "apart on odd ranks"])
@pytest.mark.parametrize("kind", ["balanced", "empty", "uneven", "nothing"])
def test_one_matrix_for_each_expert(
    space: SymmetricWorkspace, layout: str, kind: str, schedule: Schedule
) -> None:
    """Megatron's parameters: gradients by autograd, deferred, and fused into main_grad agree with
    the stacked tensors'. Those that lie apart are sent by a kernel of its own, to ranks whose GEMMs
    may send by themselves.
    """
    shape = SHAPES[1]
    buffers = buffers_of(space, shape, schedule)
    together = layout == "neighbours" or (layout == "apart on odd ranks" and space.rank % 2 == 0)
    call = make_call(4, kind, space.rank, space.world_size, *shape)
    expected = fluid(buffers, call)
    scheduler = WeightGradScheduler()
    w1: list[Any]
    w2: list[Any]
    for mode in ("autograd", "deferred", "main_grad", "deferred main_grad"):
        split = [
            list(w.clone().unbind(0)) if together else [m.clone() for m in w]
            for w in (call.w1, call.w2)
        ]
        w1, w2 = ([m.detach().requires_grad_() for m in matrices] for matrices in split)
        if "main_grad" in mode:
            for m in (*w1, *w2):
                m.main_grad = torch.full(m.shape, 0.5, device="cuda")
        if "deferred" in mode:
            scheduler.enable()
        x, probs = call.x.clone().requires_grad_(), call.probs.clone().requires_grad_()
        fused = "main_grad" in mode
        y = nvlink_moe(
            buffers, x, call.ids, probs, w1, w2, scheduler=scheduler, fused_main_grad=fused
        )
        y.backward(call.grad)
        scheduler.disable()
        # Apart, each expert is a cuBLAS product of few rows, which may split K and add its parts in
        # bf16.
        tolerance = 1.5e-2 if layout != "neighbours" else 5e-3 if fused else 0.0
        assert x.grad is not None and probs.grad is not None
        dw = [
            torch.stack([m.main_grad - 0.5 if fused else m.grad for m in matrices])
            for matrices in (w1, w2)
        ]
        for name, gap in gaps((y.detach(), x.grad, probs.grad, *dw), expected).items():
            assert gap <= tolerance, f"{mode}: {name} differs by {gap}"


def random_call(seed: int, rank: int, ranks: int, shape: tuple[int, int, int, int, int]) -> Call:
    """One of very many routings: any token count, some experts hot, some empty, choices dropped."""
    everyone = torch.Generator().manual_seed(seed)  # what ranks agree on
    hot, empty, dropped = (torch.rand(3, generator=everyone) < 0.4).tolist()
    favoured = torch.randn(shape[3], generator=everyone) * 4.0
    closed = torch.rand(shape[3], generator=everyone) < 0.6
    tokens = torch.randint(0, shape[0] + 1, (ranks,), generator=everyone)
    tokens[torch.rand(ranks, generator=everyone) < 0.2] = 0
    call = make_call(seed, "balanced", rank, ranks, *shape)
    g = torch.Generator(device="cuda").manual_seed(77 * seed + rank)
    scores = torch.rand(shape[0], shape[3], generator=g, device="cuda")
    scores += favoured.cuda() * hot - 10.0 * closed.cuda() * empty
    ids = scores.topk(shape[4], -1).indices
    if dropped:
        ids[torch.rand(ids.shape, generator=g, device="cuda") < 0.3] = -1
    n = int(tokens[rank])
    return Call(call.x[:n], ids[:n], call.probs[:n], call.w1, call.w2, call.grad[:n])


ROUTING_SCHEDULES = tuple(CANDIDATES.values())


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_routings(space: SymmetricWorkspace, hundred: int) -> None:
    ranks = space.world_size
    shape = (48, 256, 64, 2 * ranks, 2) if hundred % 2 else (40, 512, 128, 2 * ranks, 4)
    limits = {"y": 1e-2, "dx": 2e-2, "dprobs": 2e-2, "dw1": 2e-2, "dw2": 1e-2}
    all_buffers = [buffers_of(space, shape, s) for s in ROUTING_SCHEDULES]
    worst = dict.fromkeys(limits, 0.0)
    for seed in range(100 * hundred, 100 * hundred + 100):
        calls = [random_call(seed, r, ranks, shape) for r in range(ranks)]
        found = fluid(all_buffers[seed % len(all_buffers)], calls[space.rank])
        for name, gap in pooled_gaps(found, oracle(calls, space.rank)).items():
            worst[name] = max(worst[name], gap)
            assert gap < limits[name], f"seed {seed}: {name} differs by {gap}"
    torch.cuda.synchronize()
    space.check_errors()
    assert all(
        gap > 0.0 for gap in worst.values()
    )  # the comparison has seen rounding, so it saw values


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
@pytest.mark.parametrize("kind", ["balanced", "uneven", "one rank", "nothing"])
def test_overlap_agrees_and_repeats_bitwise(
    space: SymmetricWorkspace, schedule: Schedule, kind: str
) -> None:
    shape = (256, 1024, 256, 4 * space.world_size, 4)
    plain = buffers_of(space, shape)
    overlapped = buffers_of(space, shape, schedule)
    for seed in range(3):
        call = make_call(seed, kind, space.rank, space.world_size, *shape)
        expected, found = fluid(plain, call), fluid(overlapped, call)
        for name, gap in gaps(found, expected).items():
            assert gap < 1e-2, f"seed {seed}: {name} differs by {gap}"
        assert not unequal(fluid(overlapped, call), found)
    torch.cuda.synchronize()
    space.check_errors()


@pytest.mark.skipif(not HOPPER, reason="needs Hopper GPUs")
@pytest.mark.parametrize("recompute", [(), ("rows", "hidden")], ids=str)
@pytest.mark.parametrize("schedule", CANDIDATES)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_tokens_cast_before_they_are_sent_give_the_bits_of_rows_cast_afterwards(
    space: SymmetricWorkspace,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    schedule: str,
    recompute: tuple[str, ...],
) -> None:
    shape = tokens, hidden, _, experts, top_k = 96, 1152, 128, 8 * space.world_size, 3
    chosen = CANDIDATES[schedule]
    buffers = NvlinkBuffers(space, tokens, hidden, top_k, experts, schedule=chosen)
    call = make_call(5, kind, space.rank, space.world_size, *shape)
    # What a cast leaves as it is: dW2 is of dy as it was cast, or of bf16 dy.
    x, grad = (restore_rows(*cast_rows(t)).bfloat16() for t in (call.x, call.grad))
    call = dataclasses.replace(call, x=x, grad=grad)
    found = []
    for packs in (True, False, True):
        monkeypatch.setattr(NvlinkTransport, "carries_packed_rows", packs)
        found.append(fluid(buffers, call, fp8=True, recompute=recompute))
    torch.cuda.synchronize()
    space.check_errors()
    for other in found[1:]:
        assert not unequal(found[0], other)
