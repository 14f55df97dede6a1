"""Calls of the NVLink MoE path on all ranks of a job, an oracle that has every rank's arguments,
and comparisons on which all ranks agree.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from tests.support.expert_calls import nvlink_moe
from tests.support.launch import take_gpu, world_group
from tests.support.machine import RANKS
from tests.support.moe_cases import relative_error
from tests.support.moe_reference import moe_reference

Shape = tuple[int, int, int, int, int]
"""Tokens a rank, hidden, ffn, experts of all ranks, top-k."""

CANDIDATES = {
    "whole": NO_OVERLAP, "stream": Schedule(stream=True), "sent": Schedule(sent_rows=True),
    "stream_sent": Schedule(stream=True, sent_rows=True),
}  # fmt: skip
difference = relative_error
KINDS = ["balanced", "hot", "empty", "dropped", "uneven", "one rank", "nothing"]
NEEDS_TORCHRUN = [
    pytest.mark.skipif(RANKS < 2, reason="needs two or more ranks on GPUs"),
    pytest.mark.skipif(
        "RANK" not in os.environ, reason="start with torchrun --nproc_per_node N -m pytest"
    ),
]
"""Marks of tests that every rank of a job runs."""


def symmetric_memory_of_the_job() -> Iterator[SymmetricWorkspace]:
    """The symmetric memory of all ranks that torchrun started: for a fixture of a module."""
    rank = int(os.environ["RANK"])
    backend = take_gpu(int(os.environ.get("LOCAL_RANK", rank)), int(os.environ["WORLD_SIZE"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    workspace = SymmetricWorkspace(world_group(), timeout_s=20.0)
    yield workspace
    workspace.close()
    dist.destroy_process_group()


def buffers_of(
    space: SymmetricWorkspace, shape: Shape, schedule: Schedule = NO_OVERLAP
) -> NvlinkBuffers:
    """The buffers of calls of a shape."""
    tokens, hidden, _, experts, top_k = shape
    return NvlinkBuffers(space, tokens, hidden, top_k, experts, schedule=schedule)


def spread_routing(
    kind: str, tokens: int, experts: int, top_k: int, rank: int, ranks: int, g: torch.Generator
) -> Tensor:
    """ids [T, K] of one of KINDS, of at most so many tokens of a rank; on the device of `g`."""
    if kind == "uneven":
        tokens = [0, tokens, 7, tokens // 2][rank % 4]
    scores = torch.rand(tokens, experts, generator=g, device=g.device)
    if kind == "hot":
        scores[:, 1] += 10.0
    if kind == "empty":
        scores[:, ::2] -= 10.0
    if kind == "one rank":
        scores = scores[:, : max(top_k, experts // ranks)]
    ids = scores.topk(top_k, -1).indices
    if kind == "dropped":
        ids[torch.rand(ids.shape, generator=g, device=g.device) < 0.5] = -1
    return torch.full_like(ids, -1) if kind == "nothing" else ids


@dataclass
class Call:
    """One rank's x [T, H], ids [T, K], probs [T, K], w1 [El, F1, H], w2 [El, H, F], grad [T, H]."""

    x: Tensor
    ids: Tensor
    probs: Tensor
    w1: Tensor
    w2: Tensor
    grad: Tensor


def make_call(
    seed: int, kind: str, rank: int, ranks: int, tokens: int, hidden: int, ffn: int, experts: int,
    top_k: int,
) -> Call:  # fmt: skip
    g = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    ids = spread_routing(kind, tokens, experts, top_k, rank, ranks, g)
    tokens, bf16 = len(ids), torch.bfloat16
    local = experts // ranks

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device="cuda") * scale).to(bf16)

    return Call(
        normal(tokens, hidden), ids, torch.rand(tokens, top_k, generator=g, device="cuda"),
        normal(local, 2 * ffn, hidden, scale=hidden**-0.5),
        normal(local, hidden, ffn, scale=ffn**-0.5), normal(tokens, hidden),
    )  # fmt: skip


@dataclass
class Result:
    """y [T, H], dx [T, H], dprobs [T, K], dw1 [El, F1, H], dw2 [El, H, F] of one rank."""

    y: Tensor
    dx: Tensor
    dprobs: Tensor
    dw1: Tensor
    dw2: Tensor


def fluid(
    buffers: NvlinkBuffers, call: Call, capacity: int | None = None, **settings: Any
) -> Result:
    leaves = [t.detach().clone().requires_grad_() for t in (call.x, call.probs, call.w1, call.w2)]
    x, probs, w1, w2 = leaves
    y = nvlink_moe(buffers, x, call.ids, probs, w1, w2, "swiglu", capacity, **settings)
    dx, dprobs, dw1, dw2 = torch.autograd.grad(y, leaves, call.grad)
    return Result(y.detach(), dx, dprobs, dw1, dw2)


def oracle(calls: list[Call], rank: int) -> Result:
    """The same in fp32 from every rank's arguments."""
    x, probs, w1, w2 = (
        torch.cat([getattr(c, n) for c in calls]).float().requires_grad_()
        for n in ("x", "probs", "w1", "w2")
    )
    ids = torch.cat([c.ids for c in calls])
    y = moe_reference(x, ids, probs, w1, w2, "swiglu")
    total = (y * torch.cat([c.grad for c in calls]).float()).sum()
    grads = torch.autograd.grad(total, (x, probs, w1, w2))
    sizes = [c.x.shape[0] for c in calls]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    local = slice(rank * calls[0].w1.shape[0], (rank + 1) * calls[0].w1.shape[0])
    return Result(
        y[mine].detach(), grads[0][mine], grads[1][mine], grads[2][local], grads[3][local]
    )


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
    largest = agree(*(difference(v, right[n]) for n, v in results(found).items()))
    return dict(zip(right, largest, strict=True))


def unequal(found: Any, expected: Any) -> list[str]:
    """The results that are not bitwise equal on every rank. Collective."""
    right = results(expected)
    flags = agree(*(not torch.equal(v, right[n]) for n, v in results(found).items()))
    return [name for name, flag in zip(right, flags, strict=True) if flag]


def pooled_gaps(found: Result, expected: Result) -> dict[str, float]:
    """The relative Frobenius difference of each result over all ranks together. Collective.

    A probability's gradient is one inner product, which few live (token, k) can make small beside
    its rounding. So it is held against its typical size, too: sqrt(H) outputs of about 0.5 each.
    """
    right, sums = results(expected), []
    for name, value in results(found).items():
        wide = right[name].double()
        sums += [(value.double() - wide).square().sum(), wide.square().sum()]
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
