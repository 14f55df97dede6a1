"""The NVLink MoE path on real GPUs: torchrun --nproc_per_node 4 -m pytest
tests/gpu/test_nvlink_moe.py

Every test runs on all ranks, and what it asserts is the same on all of them (`agree`): a rank that
failed alone would leave the others waiting in the tests that follow. The oracle gathers all tokens
and all weights and computes the layer in fp32 with autograd.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.errors import FluidError
from megatron_fluid.moe.nvlink import steps
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import CANDIDATES, Schedule
from megatron_fluid.moe.nvlink.transport import nvlink_moe, plan_nvlink
from tests.support.kernel_references import activation_reference
from tests.support.launch import take_gpu
from tests.support.machine import RANKS

pytestmark = [
    pytest.mark.skipif(RANKS < 2, reason="needs two or more ranks on GPUs"),
    pytest.mark.skipif(
        "RANK" not in os.environ, reason="start with torchrun --nproc_per_node N -m pytest"
    ),
]

KINDS = ["balanced", "hot", "empty", "dropped", "uneven", "one rank", "nothing"]


@pytest.fixture(scope="module")
def space() -> Iterator[SymmetricWorkspace]:
    rank = int(os.environ["RANK"])
    backend = take_gpu(int(os.environ.get("LOCAL_RANK", rank)), int(os.environ["WORLD_SIZE"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    group = dist.group.WORLD
    assert group is not None
    workspace = SymmetricWorkspace(group, timeout_s=20.0)
    yield workspace
    workspace.close()
    dist.destroy_process_group()


@dataclass
class Call:
    """One rank's arguments: x [T, H], ids [T, K], probs [T, K], w1 [El, F1, H], w2 [El, H, F], grad
    [T, H]."""

    x: Tensor
    ids: Tensor
    probs: Tensor
    w1: Tensor
    w2: Tensor
    grad: Tensor


def make_call(
    seed: int,
    kind: str,
    rank: int,
    ranks: int,
    tokens: int,
    hidden: int,
    ffn: int,
    experts: int,
    top_k: int,
    gated: bool = True,
) -> Call:
    g = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    if kind == "uneven":
        tokens = [0, tokens, 7, tokens // 2][rank % 4]
    scores = torch.rand(tokens, experts, generator=g, device="cuda")
    if kind == "hot":
        scores[:, 1] += 10.0
    if kind == "empty":
        scores[:, ::2] -= 10.0
    ids = scores.topk(top_k, -1).indices
    if kind == "dropped":
        ids[torch.rand(ids.shape, generator=g, device="cuda") < 0.5] = -1
    if kind == "one rank":
        ids = scores[:, : max(top_k, experts // ranks)].topk(top_k, -1).indices
    if kind == "nothing":
        ids = torch.full_like(ids, -1)
    bf16 = torch.bfloat16
    local = experts // ranks

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device="cuda") * scale).to(bf16)

    return Call(
        normal(tokens, hidden),
        ids,
        torch.rand(tokens, top_k, generator=g, device="cuda"),
        normal(local, 2 * ffn if gated else ffn, hidden, scale=hidden**-0.5),
        normal(local, hidden, ffn, scale=ffn**-0.5),
        normal(tokens, hidden),
    )


@dataclass
class Result:
    """y [T, H], dx [T, H], dprobs [T, K], dw1 [El, F1, H], dw2 [El, H, F] of one rank."""

    y: Tensor
    dx: Tensor
    dprobs: Tensor
    dw1: Tensor
    dw2: Tensor


def fluid(
    buffers: NvlinkBuffers, call: Call, activation: str = "swiglu", capacity: int | None = None
) -> Result:
    leaves = [t.detach().clone().requires_grad_() for t in (call.x, call.probs, call.w1, call.w2)]
    x, probs, w1, w2 = leaves
    y = nvlink_moe(buffers, x, call.ids, probs, w1, w2, activation, capacity)
    dx, dprobs, dw1, dw2 = torch.autograd.grad(y, leaves, call.grad)
    return Result(y.detach(), dx, dprobs, dw1, dw2)


def oracle(calls: list[Call], rank: int, activation: str = "swiglu") -> Result:
    """The same in fp32 from every rank's arguments."""
    x, probs, w1, w2 = (
        torch.cat([getattr(c, n) for c in calls]).float().requires_grad_()
        for n in ("x", "probs", "w1", "w2")
    )
    ids = torch.cat([c.ids for c in calls])
    y = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        h = activation_reference(x[token] @ w1[expert].t(), probs[token, k], activation)
        y = y.index_add(0, token, h @ w2[expert].t())
    total = (y * torch.cat([c.grad for c in calls]).float()).sum()
    grads = torch.autograd.grad(total, (x, probs, w1, w2))
    sizes = [c.x.shape[0] for c in calls]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    local = slice(rank * calls[0].w1.shape[0], (rank + 1) * calls[0].w1.shape[0])
    return Result(
        y[mine].detach(), grads[0][mine], grads[1][mine], grads[2][local], grads[3][local]
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius difference; an expected zero demands zero; NaN is never small."""
    norm = expected.double().norm().item()
    gap = (found.double() - expected.double()).norm().item()
    return gap / norm if norm else gap


def agree(*figures: float) -> list[float]:
    """The largest of each over all ranks, NaN as infinity. Collective."""
    mine = [math.inf if math.isnan(figure) else float(figure) for figure in figures]
    largest = torch.tensor(mine, dtype=torch.float64, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def results(found: Any) -> dict[str, Tensor]:
    """The tensors of a Result, or a Result's tensors in a row, by name."""
    names = [field.name for field in fields(Result)]
    values = [getattr(found, name) for name in names] if isinstance(found, Result) else list(found)
    return dict(zip(names, values, strict=True))


def gaps(found: Any, expected: Any) -> dict[str, float]:
    """`difference` of every result, on the rank where it is largest. Collective."""
    right = results(expected)
    return dict(
        zip(
            right, agree(*(difference(v, right[n]) for n, v in results(found).items())), strict=True
        )
    )


def unequal(found: Any, expected: Any) -> list[str]:
    """The results that are not bitwise equal on every rank. Collective."""
    right = results(expected)
    flags = agree(*(not torch.equal(v, right[n]) for n, v in results(found).items()))
    return [name for name, flag in zip(right, flags, strict=True) if flag]


def pooled_gaps(found: Result, expected: Result) -> dict[str, float]:
    """The relative Frobenius difference of each result over all ranks together. Collective.

    A probability's gradient is one inner product, which a few live (token, k) can make as small as
    one likes beside its own rounding. So it is held against its typical size, too: that of sqrt(H)
    elements of an expert's output, about 0.5 each here.
    """
    right, sums = results(expected), []
    for name, value in results(found).items():
        sums += [
            (value.double() - right[name].double()).square().sum(),
            right[name].double().square().sum(),
        ]
    live = (expected.dprobs != 0).sum().double()
    total = torch.stack([*sums, live])
    dist.all_reduce(total)
    *both, live_pairs = total.tolist()
    least = {"dprobs": 0.25 * expected.y.shape[-1] * live_pairs}
    found_gaps = {}
    for name, gap, norm in zip(right, both[::2], both[1::2], strict=True):
        size = max(norm, least.get(name, 0.0))
        found_gaps[name] = math.sqrt(gap / size) if size else math.sqrt(gap)
    return found_gaps


SENT = Schedule(stream=True, sent_rows=True)
SHAPES = [  # tokens, hidden, ffn, experts, top_k
    (96, 256, 128, 8, 2),
    (64, 512, 192, 32, 8),
    (33, 1152, 64, 16, 3),
]


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


def test_rows_that_are_sent_are_awaited_and_overwrite_nothing_that_is_still_to_be_read(
    space: SymmetricWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls back to back, forward and backward; each rank in turn sends late, or adds up late what
    came in time."""
    shape = SHAPES[1]
    plain, sent = (
        NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=s)
        for s in (Schedule(), Schedule(sent_rows=True))
    )
    turns = itertools.count()

    def late(patch: pytest.MonkeyPatch, name: str) -> None:
        step = getattr(steps, name)

        def delayed(*arguments: Any) -> Any:
            if next(turns) % (space.world_size + 1) == space.rank:
                torch.cuda._sleep(4_000_000)
            return step(*arguments)

        patch.setattr(steps, name, delayed)

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


def test_a_kept_graph_gives_its_gradients_again(space: SymmetricWorkspace) -> None:
    shape = SHAPES[1]
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3])
    call = make_call(12, "uneven", space.rank, space.world_size, *shape)
    leaves = [t.detach().clone().requires_grad_() for t in (call.x, call.probs, call.w1, call.w2)]
    y = nvlink_moe(buffers, leaves[0], call.ids, *leaves[1:])
    kept = [
        (y.detach(), *torch.autograd.grad(y, leaves, call.grad, retain_graph=True))
        for _ in range(2)
    ]
    last = (y.detach(), *torch.autograd.grad(y, leaves, call.grad))
    expected = fluid(buffers, call)
    assert (
        not unequal(kept[0], expected)
        and not unequal(kept[1], expected)
        and not unequal(last, expected)
    )


@pytest.mark.parametrize("kind", ["balanced", "dropped", "uneven"])
@pytest.mark.parametrize("local", [1, 2, 3])
def test_few_experts_on_a_rank(space: SymmetricWorkspace, local: int, kind: str) -> None:
    shape = (160, 256, 128, local * space.world_size, 2)
    buffers = NvlinkBuffers(
        space, shape[0], shape[1], shape[4], shape[3], schedule=Schedule(stream=True)
    )
    calls = [make_call(local, kind, r, space.world_size, *shape) for r in range(space.world_size)]
    found, expected = fluid(buffers, calls[space.rank]), oracle(calls, space.rank)
    for name, gap in gaps(found, expected).items():
        assert gap < 2e-2, f"{name} differs by {gap}"
    torch.cuda.synchronize()
    space.check_errors()


@pytest.mark.parametrize("activation", ["geglu", "relu2", "gelu"])
def test_activations(space: SymmetricWorkspace, activation: str) -> None:
    shape = SHAPES[0]
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3])
    calls = [
        make_call(5, "balanced", r, space.world_size, *shape, activation == "geglu")
        for r in range(space.world_size)
    ]
    found, expected = (
        fluid(buffers, calls[space.rank], activation),
        oracle(calls, space.rank, activation),
    )
    for name, gap in gaps(found, expected).items():
        assert gap < 2e-2, name


def test_runs_repeat_bitwise(space: SymmetricWorkspace) -> None:
    shape = (512, 1024, 256, 32, 8)
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3])
    call = make_call(9, "balanced", space.rank, space.world_size, *shape)
    first = fluid(buffers, call)
    for _ in range(5):
        assert not unequal(fluid(buffers, call), first)


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
def test_bounded_mode_equals_exact_mode_and_reports_overflow(
    space: SymmetricWorkspace, schedule: Schedule
) -> None:
    shape = (128, 512, 128, 16, 4)
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=schedule)
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
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=schedule)
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


def test_a_recomputation_replays_its_plan(space: SymmetricWorkspace) -> None:
    shape = SHAPES[0]
    buffers = NvlinkBuffers(
        space, shape[0], shape[1], shape[4], shape[3], schedule=Schedule(stream=True)
    )
    call = make_call(6, "balanced", space.rank, space.world_size, *shape)
    expected = fluid(buffers, call)
    handle = plan_nvlink(buffers, call.ids, call.probs)
    leaves = [t.detach().clone().requires_grad_() for t in (call.x, call.probs, call.w1, call.w2)]

    def layer(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return nvlink_moe(buffers, x, call.ids, probs, w1, w2, handle=handle)

    y = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
    assert not unequal((y.detach(), *torch.autograd.grad(y, leaves, call.grad)), expected)


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
def test_what_is_not_kept_is_made_again(space: SymmetricWorkspace, schedule: Schedule) -> None:
    shape = (256, 1024, 256, 4 * space.world_size, 4)
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=schedule)
    for seed in range(5):
        call = make_call(seed, "uneven", space.rank, space.world_size, *shape)
        expected = fluid(buffers, call)
        leaves = [
            t.detach().clone().requires_grad_() for t in (call.x, call.probs, call.w1, call.w2)
        ]
        x, probs, w1, w2 = leaves
        y = nvlink_moe(buffers, x, call.ids, probs, w1, w2, recompute=("rows", "hidden"))
        found = (y.detach(), *torch.autograd.grad(y, leaves, call.grad))
        for name, gap in gaps(found, expected).items():
            assert gap < 1e-2, f"seed {seed}: {name} differs by {gap}"
    torch.cuda.synchronize()
    space.check_errors()


def changes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What is not bitwise equal on this rank: name, relative difference, elements that differ of
    all."""
    return [
        f"{name}: {difference(value, right):.2g} in {int((value != right).sum())} of "
        f"{right.numel()}"
        for (name, value), right in zip(found.items(), expected.values(), strict=True)
        if not torch.equal(value, right)
    ]


def test_layers_microbatches_and_accumulation_do_not_mix(space: SymmetricWorkspace) -> None:
    """12 layers share one buffers; two forwards run before their backwards; gradients add up over
    both."""
    tokens, hidden, ffn, experts, top_k = 64, 256, 64, 8, 2
    buffers = NvlinkBuffers(space, tokens, hidden, top_k, experts, schedule=SENT)
    batches = [
        [
            make_call(
                100 * layer + b,
                "balanced",
                space.rank,
                space.world_size,
                tokens,
                hidden,
                ffn,
                experts,
                top_k,
            )
            for b in (0, 1)
        ]
        for layer in range(12)
    ]
    # Swiglu is quadratic in its input: without a norm between them, layers of full weights would
    # square x up to infinity.
    weights = [
        [t.clone().requires_grad_() for t in (layer[0].w1, layer[0].w2 * 0.25)] for layer in batches
    ]
    leaves = {f"start {b}": batches[0][b].x.clone().requires_grad_() for b in (0, 1)}
    starts = list(leaves.values())
    leaves |= {
        f"layer {n} w{i}": w for n, pair in enumerate(weights) for i, w in enumerate(pair, 1)
    }

    def run(b: int) -> Tensor:
        x = starts[b]
        for layer, (w1, w2) in zip(batches, weights, strict=True):
            x = x + nvlink_moe(buffers, x, layer[b].ids, layer[b].probs, w1, w2)
        return x

    def gradients(forwards_first: bool) -> dict[str, Tensor]:
        outputs = [run(b) for b in (0, 1)] if forwards_first else []
        for b in (0, 1):
            (outputs[b] if outputs else run(b)).backward(batches[0][b].grad)
        found = {name: t.grad.clone() for name, t in leaves.items() if t.grad is not None}
        for t in leaves.values():
            t.grad = None
        return found

    one_by_one, once_more, interleaved = gradients(False), gradients(False), gradients(True)
    torch.cuda.synchronize()
    space.check_errors()
    # Without these, an infinity would differ from itself and a zero would equal what was never
    # written.
    sound = len(one_by_one) == len(leaves) and all(
        bool(g.isfinite().all() and g.any()) for g in one_by_one.values()
    )
    repeated, mixed = changes(once_more, one_by_one), changes(interleaved, one_by_one)
    assert agree(not sound, len(repeated), len(mixed)) == [0.0, 0.0, 0.0], (
        f"rank {space.rank}: finite: {sound}; the same order again: {repeated}; two forwards "
        f"first: {mixed}"
    )


def random_call(seed: int, rank: int, ranks: int, shape: tuple[int, int, int, int, int]) -> Call:
    """One of very many routings: any number of tokens, some experts hot, some empty, some choices
    dropped."""
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
    all_buffers = [
        NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=s)
        for s in ROUTING_SCHEDULES
    ]
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


@pytest.mark.parametrize("kind", ["balanced", "empty", "uneven"])
def test_bounded_mode_adds_to_main_grad(space: SymmetricWorkspace, kind: str) -> None:
    shape = SHAPES[1]
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3])
    call = make_call(8, kind, space.rank, space.world_size, *shape)
    expected = fluid(buffers, call)
    w1, w2 = (w.detach().clone().requires_grad_() for w in (call.w1, call.w2))
    for w in (w1, w2):
        w.main_grad = torch.full(w.shape, 0.5, device="cuda")  # type: ignore[attr-defined]
    for repeat in (1, 2):
        y = nvlink_moe(
            buffers,
            call.x,
            call.ids,
            call.probs,
            w1,
            w2,
            capacity=buffers.most_rows,
            fused_main_grad=True,
        )
        y.backward(call.grad)
        both = ((w1, expected.dw1), (w2, expected.dw2))
        gap = agree(*(difference(w.main_grad - 0.5, repeat * right.float()) for w, right in both))  # type: ignore[attr-defined]
        assert max(gap) < 5e-3


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
@pytest.mark.parametrize("kind", ["balanced", "uneven", "one rank", "nothing"])
def test_overlap_agrees_and_repeats_bitwise(
    space: SymmetricWorkspace, schedule: Schedule, kind: str
) -> None:
    shape = (256, 1024, 256, 4 * space.world_size, 4)
    plain = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3])
    overlapped = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=schedule)
    for seed in range(3):
        call = make_call(seed, kind, space.rank, space.world_size, *shape)
        expected, found = fluid(plain, call), fluid(overlapped, call)
        for name, gap in gaps(found, expected).items():
            assert gap < 1e-2, f"seed {seed}: {name} differs by {gap}"
        assert not unequal(fluid(overlapped, call), found)
    torch.cuda.synchronize()
    space.check_errors()


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
def test_a_captured_layer_equals_the_eager_one(
    space: SymmetricWorkspace, schedule: Schedule
) -> None:
    shape = (128, 512, 128, 16, 4)
    buffers = NvlinkBuffers(space, shape[0], shape[1], shape[4], shape[3], schedule=schedule)
    static = make_call(11, "balanced", space.rank, space.world_size, *shape)
    leaves = [
        t.detach().clone().requires_grad_() for t in (static.x, static.probs, static.w1, static.w2)
    ]

    def step() -> tuple[Tensor, ...]:
        y = nvlink_moe(
            buffers,
            leaves[0],
            static.ids,
            leaves[1],
            leaves[2],
            leaves[3],
            capacity=buffers.most_rows,
        )
        return (y, *torch.autograd.grad(y, leaves, static.grad))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may ask after events of theirs meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    for seed in (21, 22, 23):
        call = make_call(seed, "balanced", space.rank, space.world_size, *shape)
        with torch.no_grad():
            for leaf, value in zip(leaves, (call.x, call.probs, call.w1, call.w2), strict=True):
                leaf.copy_(value)
            static.ids.copy_(call.ids)
            static.grad.copy_(call.grad)
        graph.replay()
        eager = fluid(buffers, call)
        torch.cuda.synchronize()
        assert not unequal(outputs, eager)
    buffers.check_overflow()
    space.check_errors()
