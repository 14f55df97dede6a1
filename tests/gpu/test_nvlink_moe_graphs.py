"""What the NVLink MoE path keeps between forward and backward, and CUDA graphs of it: rows that are
made again, layers and microbatches in turn. Started as test_nvlink_moe.py is.
"""

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.moe.nvlink.schedule import Schedule
from tests.support.expert_calls import nvlink_moe
from tests.support.nvlink_calls import (
    CANDIDATES,
    NEEDS_TORCHRUN,
    SENT,
    agree,
    buffers_of,
    difference,
    fluid,
    gaps,
    make_call,
    symmetric_memory_of_the_job,
    unequal,
)

pytestmark = NEEDS_TORCHRUN
space = pytest.fixture(symmetric_memory_of_the_job, scope="module")


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
def test_what_is_not_kept_is_made_again(space: SymmetricWorkspace, schedule: Schedule) -> None:
    shape = (256, 1024, 256, 4 * space.world_size, 4)
    buffers = buffers_of(space, shape, schedule)
    for seed in range(5):
        call = make_call(seed, "uneven", space.rank, space.world_size, *shape)
        expected = fluid(buffers, call)
        found = fluid(buffers, call, recompute=("rows", "hidden"))
        for name, gap in gaps(found, expected).items():
            assert gap < 1e-2, f"seed {seed}: {name} differs by {gap}"
    torch.cuda.synchronize()
    space.check_errors()


def changes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What is not bitwise equal on this rank: name, relative difference, elements that differ."""
    return [
        f"{name}: {difference(value, right):.2g} in {int((value != right).sum())} of "
        f"{right.numel()}"
        for (name, value), right in zip(found.items(), expected.values(), strict=True)
        if not torch.equal(value, right)
    ]


def test_layers_microbatches_and_accumulation_do_not_mix(space: SymmetricWorkspace) -> None:
    """12 layers share one buffers; two forwards run before their backwards; gradients add up."""
    shape = (64, 256, 64, 8, 2)
    buffers = buffers_of(space, shape, SENT)
    batches = [
        [
            make_call(100 * layer + b, "balanced", space.rank, space.world_size, *shape)
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


@pytest.mark.parametrize("schedule", CANDIDATES.values(), ids=CANDIDATES)
def test_a_captured_layer_equals_the_eager_one(
    space: SymmetricWorkspace, schedule: Schedule
) -> None:
    shape = (128, 512, 128, 16, 4)
    buffers = buffers_of(space, shape, schedule)
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
