"""Where the time of one MoE layer over NVLink goes: every step of a forward and backward that is a
launch of its own, and the host.

Steps run one after the other behind a GPU that was put to sleep first, so that the host is ahead
and a step's time is the GPU's alone. A step that waits for peers includes the wait; the least over
ranks is then its own cost. Beside each step stand the bytes on the wire, the bytes of memory it
cannot avoid, or its FLOPs, and the rate that follows. `in turn` is what a forward or backward
takes without overlap, `GEMMs` and `exchange` are its parts (a product that sends its rows counts as
a GEMM), and `limit` the larger of them.

Shapes: T tokens of a rank, K top-k, H hidden, F ffn, N expert rows of a rank.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases.moe import MoECase, torch_grouped_matmul
from benchmarks.harness.results import Row
from benchmarks.harness.timing import quantile
from megatron_fluid import MoELayer
from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.kernels.grouped_gemm.launch import can_gate, grouped_weight_grad
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle
from megatron_fluid.moe.autograd import run_experts
from megatron_fluid.moe.call import ExpertCall
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups, grouped_product
from megatron_fluid.moe.experts import PlainExperts, activation_backward, activation_forward
from megatron_fluid.moe.nvlink.buffers import (
    NvlinkBuffers,
    make_plan,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
)
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.shared import shared_buffers
from megatron_fluid.moe.nvlink.transport import NvlinkTransport, plan_nvlink
from megatron_fluid.moe.sharding import local_part
from megatron_fluid.moe.transport import Segment
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["Step", "host_times", "measure_phases", "phase_buffers", "print_phases"]

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


def phase_buffers(
    case: MoECase,
    tokens: int,
    device: torch.device,
    schedule: Schedule,
    space: Workspace | None = None,
) -> NvlinkBuffers:
    """Return the buffers of a schedule; on a CPU those of one simulated rank, in `space` if it is
    given. Collective."""
    shape = (tokens, case.hidden)
    if device.type != "cuda":
        space = SimulatedWorkspace(1).rank(0) if space is None else space
        return NvlinkBuffers(space, *shape, case.top_k, case.experts, schedule=schedule)
    group = dist.group.WORLD
    assert group is not None
    shape = (*shape, case.ffn, case.top_k, case.experts)
    return shared_buffers(group, *shape, schedule=schedule)


def _route(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] -> ids [T, K], probs [T, K] fp32."""
    routing = layer.router(x)
    return routing.ids, routing.probs.float()


def _steps(
    case: MoECase, buffers: NvlinkBuffers, layer: MoELayer, x: Tensor, grad: Tensor
) -> list[Step]:
    """The steps of a forward and a backward of `layer` over `buffers`."""
    weights = (layer.weight1, layer.weight2)
    w1, w2 = (ExpertWeights(local_part(w), buffers.local_experts) for w in weights)
    activation = layer.activation
    own = PlainExperts(w1, w2, activation)
    with torch.no_grad():
        ids, probs = _route(layer, x)
    handle = plan_nvlink(buffers, ids, probs)
    ends = handle.ends
    assert ends is not None
    n, hidden, ffn, size = ends[-1], case.hidden, case.ffn, x.element_size()
    even = torch.arange(1, buffers.local_experts + 1, device=x.device) * (
        n // buffers.local_experts
    )
    even = even.to(torch.int32)
    bits = handle.destinations[: x.shape[0]]
    copies = sum(int(((bits >> d) & 1).sum()) for d in range(buffers.ranks) if d != buffers.rank)
    came = int((handle.inverse >= 0).any(1).sum())
    empty = x.new_empty(0)
    s = _State(handle, ids, probs, empty, empty, empty, empty, empty)
    wire, row = copies * hidden * size, hidden * size

    def groups() -> RowGroups:
        return RowGroups(s.handle.offsets, ends, None, s.handle.row_count)

    def route() -> None:
        s.ids, s.probs = _route(layer, x)

    def announce() -> None:
        s.handle = publish(buffers, s.ids, s.probs)
        s.handle.ends = ends

    def gather(tokens: Tensor) -> None:
        s.rows = scatter(buffers, s.handle, tokens, x.new_empty(n, hidden))

    def fc1() -> None:
        s.hidden = grouped_product(s.rows, w1.forward_matrices, groups())

    def activate() -> None:
        prob, count = s.handle.row_prob[:n], s.handle.row_count
        s.activated = activation_forward(activation, s.hidden, prob, count)

    def gated() -> None:
        prob = s.handle.row_prob[:n]
        h, s.activated = own.activated(s.rows, groups(), prob, keep=True)
        assert h is not None
        s.hidden = h

    def fc2() -> None:
        s.out = grouped_product(s.activated, w2.forward_matrices, groups())

    def fc2_sent() -> None:
        exchange = NvlinkTransport(buffers, s.ids, s.handle).forward(x, None, True)
        segment = Segment(s.rows, groups())
        exchange.combine_product(segment, s.activated, w2.forward_matrices)

    def fc1_dgrad_sent() -> None:
        exchange = NvlinkTransport(buffers, s.ids, s.handle).backward(grad, True)
        segment = Segment(s.rows, groups())
        exchange.combine_product(segment, s.hidden, w1.backward_matrices, s.row_grad)

    def fc2_dgrad() -> None:
        s.out = grouped_product(s.rows, w2.backward_matrices, groups())

    def activate_backward() -> None:
        prob = s.handle.row_prob[:n]
        found = activation_backward(activation, s.hidden, s.out, prob, groups())
        s.hidden, s.activated = found[:2]
        assert found[2] is not None
        s.row_grad = found[2]

    def fc1_dgrad() -> None:
        s.out = grouped_product(s.hidden, w1.backward_matrices, groups())

    def weight_grad(left: Tensor, right: Tensor) -> None:
        grouped_weight_grad(left, right, s.handle.offsets, ends)

    f1, f2, summed = 4.0 * n * hidden * ffn, 2.0 * n * hidden * ffn, (n + came) * row
    sent, result = buffers.schedule.sent_rows, torch.empty_like(x)
    came_back = int((ids >= 0).sum()) if sent else copies + x.shape[0]
    name, added = "sum" if sent else "reduce", (came_back + x.shape[0]) * row
    forward: list[tuple[str, Callable[[], object], float, str]] = [
        ("router", route, 2.0 * x.shape[0] * hidden * case.experts, "FLOP"),
        ("publish", announce, 0.0, ""),
        ("plan", lambda: make_plan(buffers, s.handle), 0.0, ""),
        ("push", lambda: push(buffers, s.handle, x), wire, "wire"),
        ("scatter", lambda: gather(x), summed, "memory"),
    ]
    if can_gate(x, w1.forward_matrices, handle.row_prob, "swiglu"):
        forward += [("fc1, activation", gated, f1, "FLOP")]
    else:
        forward += [("fc1", fc1, f1, "FLOP")]
        forward += [("activation", activate, 3.0 * n * ffn * size, "memory")]
    backward: list[tuple[str, Callable[[], object], float, str]] = [
        ("push", lambda: push(buffers, s.handle, grad), wire, "wire"),
        ("scatter", lambda: gather(grad), summed, "memory"),
        ("fc2 dgrad", fc2_dgrad, f2, "FLOP"),
        ("activation", activate_backward, 6.0 * n * ffn * size, "memory"),
    ]
    if sent:
        forward += [("fc2, rows sent", fc2_sent, f2, "FLOP")]
        backward += [("fc1 dgrad, rows sent", fc1_dgrad_sent, f1, "FLOP")]
    else:
        forward += [("fc2", fc2, f2, "FLOP")]
        forward += [
            ("reduce push", lambda: reduce_push(buffers, s.handle, s.out), summed, "memory")
        ]
        backward += [("fc1 dgrad", fc1_dgrad, f1, "FLOP")]
        graded = functools.partial(reduce_push, buffers)
        backward += [("reduce push", lambda: graded(s.handle, s.out, s.row_grad), summed, "memory")]
    forward += [(name, lambda: reduce(buffers, s.handle, result), added, "memory")]
    backward += [
        ("fc2 wgrad", lambda: weight_grad(s.rows, s.activated), f2, "FLOP"),
        ("fc1 wgrad", lambda: weight_grad(s.hidden, s.rows), f1, "FLOP"),
        (
            name,
            lambda: reduce(buffers, s.handle, result, torch.empty_like(s.probs)),
            added,
            "memory",
        ),
    ]
    # What the routing's uneven row counts cost a GEMM: the same rows, spread evenly.
    evenly = functools.partial(torch_grouped_matmul, offsets=even, ends=even.tolist())
    matrices1, matrices2 = w1.forward_matrices, w2.forward_matrices
    assert isinstance(matrices1, Tensor) and isinstance(matrices2, Tensor)
    reference: list[tuple[str, Callable[[], object], float, str]] = [
        ("fc1, even rows", lambda: evenly(s.rows, matrices1), f1, "FLOP"),
        ("fc2, even rows", lambda: evenly(s.activated, matrices2), f2, "FLOP"),
    ]
    modes = {"forward": forward, "backward": backward, "reference": reference}
    return [Step(mode, *step) for mode, steps in modes.items() for step in steps]


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
    name: str,
    case: MoECase,
    buffers: NvlinkBuffers,
    layer: MoELayer,
    x: Tensor,
    grad: Tensor,
    iters: int,
) -> list[Row]:
    """A row for each step, mode "phase forward" and so on: quantiles over passes of the slowest
    rank; config holds the fastest rank's median, the amount of work and the rate. Every rank calls
    it.
    """
    x, grad = x.detach(), grad.detach()
    with torch.no_grad():
        steps = _steps(case, buffers, layer, x, grad)
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
        rows.append(_row(name, step.mode, step.name, samples, config))
    return rows + _sums(name, steps, slow.tolist())


def _row(
    name: str, mode: str, step: str, samples: Sequence[float], config: dict[str, object]
) -> Row:
    figures = [quantile(list(samples), q) for q in (0.5, 0.1, 0.9)]
    return Row(name, f"phase {mode}", step, *figures, len(samples), config)


def _sums(name: str, steps: Sequence[Step], passes: Sequence[Sequence[float]]) -> list[Row]:
    """What the steps of a mode take one after the other, GEMMs and the others apart, and the larger
    of these two: less than that no overlap can reach."""
    rows = []
    for mode in ("forward", "backward"):
        kinds: dict[str, list[float]] = {"GEMMs": [], "exchange": [], "in turn": [], "limit": []}
        for times in passes:
            of_mode = [(s, t) for s, t in zip(steps, times, strict=True) if s.mode == mode]
            gemms = sum(t for s, t in of_mode if s.unit == "FLOP")
            exchange = sum(t for s, t in of_mode if s.unit != "FLOP")
            sums = gemms, exchange, gemms + exchange, max(gemms, exchange)
            for kind, taken in zip(kinds.values(), sums, strict=True):
                kind.append(taken)
        rows += [_row(name, mode, kind, taken, {}) for kind, taken in kinds.items()]
    return rows


def host_times(
    buffers: NvlinkBuffers, layer: MoELayer, x: Tensor, grad: Tensor, name: str, iters: int
) -> list[Row]:
    """Milliseconds that the host spends in a call, by calls that never wait for the GPU (the plan
    was made before)."""
    with torch.no_grad():
        ids, probs = _route(layer, x)
    handle = plan_nvlink(buffers, ids, probs)
    El = buffers.local_experts
    w1, w2 = (ExpertWeights(w, El) for w in (layer.weight1, layer.weight2))

    def forward() -> Tensor:
        ids, probs = _route(layer, x)
        call = ExpertCall(x=x, probs=probs, w1=w1, w2=w2, num_experts=El)
        return run_experts(call, NvlinkTransport(buffers, ids, handle))

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
        for tensor in (x, *layer.parameters()):
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
