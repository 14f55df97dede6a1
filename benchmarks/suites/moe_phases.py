"""Where the time of one MoE layer over NVLink goes: every step of a forward and backward that is a
launch of its own, and the host.

Steps run one after the other behind a GPU that was put to sleep first, so that the host is ahead
and a step's time is the GPU's alone. A step that waits for peers includes the wait; the least over
ranks is then its own cost. Beside each step stand the bytes on the wire, the bytes of memory it
cannot avoid, or its FLOPs, and the rate that follows.

Shapes: T tokens of a rank, K top-k, H hidden, F ffn, N expert rows of a rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases.moe import MoECase, torch_grouped_matmul
from benchmarks.harness.results import Row
from benchmarks.harness.timing import quantile
from megatron_fluid.kernels.grouped_gemm import (
    can_gate,
    gated_matmul,
    grouped_matmul,
    grouped_weight_grad,
)
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import RowGroups
from megatron_fluid.moe.fused_activation import fused_activation_backward, fused_activation_forward
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle
from megatron_fluid.moe.nvlink.steps import make_plan, publish, push, reduce, reduce_push, scatter
from megatron_fluid.moe.nvlink.transport import nvlink_moe, plan_nvlink, send_product

__all__ = ["Step", "host_times", "measure_phases", "print_phases"]

_SLEEP_CYCLES = 6_000_000  # about 3 ms: longer than the host takes to launch a pass


@dataclass(frozen=True)
class Step:
    """One step: what it runs, and what it has to do: `amount` of `unit` (wire bytes, memory bytes,
    FLOPs)."""

    mode: str
    name: str
    run: Callable[[], object]
    amount: float = 0.0
    unit: str = ""


@dataclass
class _State:
    """What one step leaves for the next."""

    handle: RoutingHandle
    ids: Tensor
    probs: Tensor
    rows: Tensor
    hidden: Tensor
    activated: Tensor
    out: Tensor
    row_grad: Tensor


def _steps(case: MoECase, domain: NvlinkBuffers, layer: Any, x: Tensor, grad: Tensor) -> list[Step]:
    """The steps of a forward and a backward of `layer` (router, logits, w1, w2) over `domain`."""
    w1, w2 = (ExpertWeights(w.detach(), domain.local_experts) for w in (layer.w1, layer.w2))
    forward1, forward2 = w1.forward_matrices, w2.forward_matrices
    with torch.no_grad():
        ids, probs = layer.route(x)
    handle = plan_nvlink(domain, ids, probs)
    ends = handle.ends
    groups = RowGroups(handle.offsets, ends, count=handle.row_count)
    assert ends is not None
    n, hidden, ffn, size = ends[-1], case.hidden, case.ffn, x.element_size()
    even = torch.arange(1, domain.local_experts + 1, device=x.device) * (n // domain.local_experts)
    even = even.to(torch.int32)
    bits = handle.destinations[: x.shape[0]]
    copies = sum(int(((bits >> d) & 1).sum()) for d in range(domain.ranks) if d != domain.rank)
    came = int((handle.inverse >= 0).any(1).sum())
    empty = x.new_empty(0)
    s = _State(handle, ids, probs, empty, empty, empty, empty, empty)
    wire, row = copies * hidden * size, hidden * size

    def route() -> None:
        s.ids, s.probs = layer.route(x)

    def announce() -> None:
        s.handle = publish(domain, s.ids, s.probs)
        s.handle.ends = ends

    def gather(tokens: Tensor) -> None:
        s.rows = scatter(domain, s.handle, tokens, x.new_empty(n, hidden))

    def fc1() -> None:
        s.hidden = grouped_matmul(s.rows, forward1, s.handle.offsets, ends)

    def activate() -> None:
        prob, count = s.handle.row_prob, s.handle.row_count
        s.activated = fused_activation_forward("swiglu", s.hidden, prob, count)

    def gated() -> None:
        s.activated = x.new_empty(n, ffn)
        prob = s.handle.row_prob[:n]
        h = gated_matmul(s.rows, forward1, s.handle.offsets, prob, s.activated, ends=ends)  # type: ignore[arg-type]
        assert h is not None
        s.hidden = h

    def fc2() -> None:
        s.out = grouped_matmul(s.activated, forward2, s.handle.offsets, ends)

    def fc2_sent() -> None:
        send_product(domain, s.handle, groups, s.activated, forward2)

    def fc1_dgrad_sent() -> None:
        send_product(domain, s.handle, groups, s.hidden, w1.backward_matrices, s.row_grad)

    def fc2_dgrad() -> None:
        s.out = grouped_matmul(s.rows, w2.backward_matrices, s.handle.offsets, ends)

    def activate_backward() -> None:
        prob, count = s.handle.row_prob, s.handle.row_count
        s.hidden, s.activated, dprobs = fused_activation_backward(
            "swiglu", s.hidden, s.out, prob, count
        )
        assert dprobs is not None
        s.row_grad = dprobs

    def fc1_dgrad() -> None:
        s.out = grouped_matmul(s.hidden, w1.backward_matrices, s.handle.offsets, ends)

    f1, f2 = 4.0 * n * hidden * ffn, 2.0 * n * hidden * ffn
    if can_gate(x, forward1, handle.row_prob, "swiglu"):
        first = [("forward", "fc1, activation", gated, f1, "FLOP")]
    else:
        first = [
            ("forward", "fc1", fc1, f1, "FLOP"),
            ("forward", "activation", activate, 3.0 * n * ffn * size, "memory"),
        ]
    sent, result = domain.schedule.sent_rows, torch.empty_like(x)
    if sent:
        came_back = int((ids >= 0).sum())
        second = [("forward", "fc2, rows sent", fc2_sent, f2, "FLOP")]
        last = [("backward", "fc1 dgrad, rows sent", fc1_dgrad_sent, f1, "FLOP")]
    else:
        came_back, summed = copies + x.shape[0], (n + came) * row
        second = [
            ("forward", "fc2", fc2, f2, "FLOP"),
            (
                "forward",
                "reduce push",
                lambda: reduce_push(domain, s.handle, s.out),
                summed,
                "memory",
            ),
        ]
        last = [
            ("backward", "fc1 dgrad", fc1_dgrad, f1, "FLOP"),
            (
                "backward",
                "reduce push",
                lambda: reduce_push(domain, s.handle, s.out, s.row_grad),
                summed,
                "memory",
            ),
        ]
    name, added = "sum" if sent else "reduce", (came_back + x.shape[0]) * row
    steps = [
        ("forward", "router", route, 2.0 * x.shape[0] * hidden * case.experts, "FLOP"),
        ("forward", "publish", announce, 0.0, ""),
        ("forward", "plan", lambda: make_plan(domain, s.handle), 0.0, ""),
        ("forward", "push", lambda: push(domain, s.handle, x), wire, "wire"),
        ("forward", "scatter", lambda: gather(x), (n + came) * row, "memory"),
        *first,
        *second,
        ("forward", name, lambda: reduce(domain, s.handle, result), added, "memory"),
        ("backward", "push", lambda: push(domain, s.handle, grad), wire, "wire"),
        ("backward", "scatter", lambda: gather(grad), (n + came) * row, "memory"),
        ("backward", "fc2 dgrad", fc2_dgrad, f2, "FLOP"),
        ("backward", "activation", activate_backward, 6.0 * n * ffn * size, "memory"),
        *last,
        (
            "backward",
            "fc2 wgrad",
            lambda: grouped_weight_grad(s.rows, s.activated, s.handle.offsets, ends),
            f2,
            "FLOP",
        ),
        (
            "backward",
            "fc1 wgrad",
            lambda: grouped_weight_grad(s.hidden, s.rows, s.handle.offsets, ends),
            f1,
            "FLOP",
        ),
        (
            "backward",
            name,
            lambda: reduce(domain, s.handle, result, torch.empty_like(s.probs)),
            added,
            "memory",
        ),
        # What the routing's uneven row counts cost a GEMM: the same rows, spread evenly.
        (
            "reference",
            "fc1, even rows",
            lambda: torch_grouped_matmul(s.rows, forward1, even, even.tolist()),
            f1,
            "FLOP",
        ),
        (
            "reference",
            "fc2, even rows",
            lambda: torch_grouped_matmul(s.activated, forward2, even, even.tolist()),
            f2,
            "FLOP",
        ),
    ]
    return [Step(*step) for step in steps]


def _pass(steps: list[Step], device: torch.device) -> list[float]:
    """Milliseconds of each step in one pass."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    if device.type != "cuda":
        times = []
        for step in steps:
            start = time.perf_counter()
            step.run()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    torch.cuda._sleep(_SLEEP_CYCLES)
    marks[0].record()
    for step, mark in zip(steps, marks[1:], strict=True):
        step.run()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def measure_phases(
    name: str, case: MoECase, domain: NvlinkBuffers, layer: Any, x: Tensor, grad: Tensor, iters: int
) -> list[Row]:
    """A row for each step, mode "phase forward" and so on: quantiles over passes of the slowest
    rank; config holds the fastest rank's median, the amount of work and the rate. Every rank calls
    it.
    """
    x, grad = x.detach(), grad.detach()
    with torch.no_grad():
        steps = _steps(case, domain, layer, x, grad)
        for _ in range(2):
            _pass(steps, x.device)
        passes = [_pass(steps, x.device) for _ in range(iters)]
    slow = torch.tensor(passes, dtype=torch.float64, device=x.device)
    fast, work = (
        slow.clone(),
        torch.tensor([step.amount for step in steps], dtype=torch.float64, device=x.device),
    )
    if dist.is_initialized():
        dist.all_reduce(slow, dist.ReduceOp.MAX)
        dist.all_reduce(fast, dist.ReduceOp.MIN)
        dist.all_reduce(work, dist.ReduceOp.MAX)
    rows = []
    for index, (step, amount) in enumerate(zip(steps, work.tolist(), strict=True)):
        samples, least = slow[:, index].tolist(), quantile(fast[:, index].tolist(), 0.5)
        config = {"fastest_rank_ms": least, "amount": amount, "unit": step.unit}
        config["rate_per_s"] = amount / max(least, 1e-9) * 1e3
        figures = [quantile(samples, q) for q in (0.5, 0.1, 0.9)]
        rows.append(Row(name, f"phase {step.mode}", step.name, *figures, iters, config))
    return rows


def host_times(
    domain: NvlinkBuffers, layer: Any, x: Tensor, grad: Tensor, name: str, iters: int
) -> list[Row]:
    """Milliseconds that the host spends in a call, by calls that never wait for the GPU (the plan
    was made before)."""
    with torch.no_grad():
        ids, probs = layer.route(x)
    handle = plan_nvlink(domain, ids, probs)

    def forward() -> Tensor:
        routed, weights = layer.route(x)
        return nvlink_moe(domain, x, routed, weights, *layer.experts, handle=handle)

    samples: dict[str, list[float]] = {"inference": [], "forward": [], "backward": []}
    for _ in range(iters):
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1, device=x.device))
        marks = [time.perf_counter()]
        with torch.no_grad():
            forward()
        marks.append(time.perf_counter())
        y = forward()
        marks.append(time.perf_counter())
        y.backward(grad)
        marks.append(time.perf_counter())
        for times, a, b in zip(samples.values(), marks, marks[1:], strict=False):
            times.append((b - a) * 1e3)
        for tensor in (x, layer.router, layer.w1, layer.w2):
            tensor.grad = None
    return [
        Row(name, "host", mode, *(quantile(times, q) for q in (0.5, 0.1, 0.9)), iters)
        for mode, times in samples.items()
    ]


def print_phases(rows: list[Row]) -> None:
    """A table of the rows of measure_phases and host_times."""
    for row in rows:
        line = f"  {row.mode:16} {row.variant:16} {row.median_ms * 1e3:9.1f} us"
        if row.config:
            line += f"  least {row.config['fastest_rank_ms'] * 1e3:9.1f} us"
        if row.config.get("amount"):
            scale, unit = (
                (1e12, "TFLOP/s")
                if row.config["unit"] == "FLOP"
                else (1e9, f"GB/s {row.config['unit']}")
            )
            line += f"  {row.config['rate_per_s'] / scale:8.1f} {unit}"
        print(line, flush=True)
